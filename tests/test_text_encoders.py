"""A daemon with models of the BERT kind: vectors, ranks, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_process import DaemonProcess, running_daemon
from deadlines import DEADLINE_S
from gguf.constants import PoolingType

from tests.workers.text_encoder_files import N_CTX, N_EMBD, build

pytestmark = pytest.mark.slow
DOCUMENTS = ["a layer.", "what is a stage?", "nothing, nothing"]
SAID = [{"role": "user", "content": "hi"}]


REFERENCE = """
import json, sys, llama_cpp
path, n_ctx, *texts = sys.argv[1:]
n_ctx = int(n_ctx)
model = llama_cpp.Llama(path, embedding=True, n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, verbose=False)
print(json.dumps([[model.embed(text), model.tokenize(text.encode())] for text in texts]))
"""


def told_by_libllama(path: Path) -> tuple[np.ndarray, list[list[int]]]:
    """f32 [texts, n_embd], and the token ids, by llama-cpp-python alone in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(path), str(N_CTX), *DOCUMENTS],
        stdout=subprocess.PIPE,
        check=True,
        timeout=DEADLINE_S,
    )
    vectors, tokens = zip(*json.loads(done.stdout), strict=True)
    return np.array(vectors, np.float32), list(tokens)


def add(node: DaemonProcess, path: Path, name: str) -> None:
    answer = node.http.post("/api/admin/models", json={"path": str(path), "name": name})
    assert "error" not in json.loads(answer.text.splitlines()[-1]), answer.text


def refused(node: DaemonProcess, path: str, body: dict[str, Any]) -> str:
    answer = node.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["param"])


def test_vectors_and_ranks_of_whole_models(tmp_path: Path) -> None:
    bert = build(tmp_path / "bert.gguf", "bert", PoolingType.CLS)
    ranker = build(tmp_path / "ranker.gguf", "bert", PoolingType.RANK, seed=1)
    raw, tokens = told_by_libllama(bert)
    with running_daemon(tmp_path, "encoding", load=[]) as node:
        add(node, bert, "bert")
        asked = {"model": "bert", "input": DOCUMENTS}
        assert node.http.post("/v1/embeddings", json={"input": DOCUMENTS}).json()["model"] == "bert"
        add(node, ranker, "ranker")
        assert refused(node, "/v1/embeddings", {"input": DOCUMENTS}) == "model"
        answer = node.http.post("/v1/embeddings", json=asked)
        assert answer.status_code == 200, answer.text
        vectors = np.array([each["embedding"] for each in answer.json()["data"]], np.float32)
        lengths = np.array([float(np.linalg.norm(each)) for each in raw])[:, None]
        assert np.array_equal(vectors, np.asarray(raw / lengths, np.float32))
        assert answer.headers["x-swarm-nodes"] == "1"
        assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, tokens))
        ollama = node.http.post("/api/embed", json=asked).json()
        assert np.array_equal(np.array(ollama["embeddings"], np.float32), vectors)
        as_tokens = {"model": "bert", "input": tokens[0]}
        assert node.http.post("/v1/embeddings", json=as_tokens).json()["data"][0]["embedding"] == (
            vectors[0].tolist()
        )

        question = {"model": "ranker", "query": "a stage?"}
        for path in ("/rerank", "/v1/rerank", "/reranking", "/v1/reranking"):
            ranked = node.http.post(path, json=question | {"documents": DOCUMENTS}).json()
            scores = [each["relevance_score"] for each in ranked["results"]]
            assert scores == sorted(scores, reverse=True)
            assert sorted(each["index"] for each in ranked["results"]) == [0, 1, 2]
        told = question | {"texts": DOCUMENTS, "top_n": 2, "return_text": True}
        assert node.http.post("/rerank", json=told).json() == [
            {"index": each["index"], "score": each["relevance_score"], "text": DOCUMENTS[each["index"]]}
            for each in ranked["results"][:2]
        ]

        long = "a " * N_CTX
        assert refused(node, "/v1/embeddings", asked | {"input": ["a", long]}) == "input[1]"
        assert "too large" in node.http.post("/v1/embeddings", json=asked | {"input": long}).text
        assert refused(node, "/v1/embeddings", asked | {"pooling": "mean"}) == "pooling"
        assert refused(node, "/v1/embeddings", asked | {"dimensions": N_EMBD - 1}) == "dimensions"
        assert refused(node, "/v1/embeddings", asked | {"model": "ranker"}) == "model"
        assert refused(node, "/rerank", question | {"documents": ["a", long]}) == "documents[1]"
        assert refused(node, "/rerank", question | {"documents": []}) == "documents"
        assert refused(node, "/rerank", question) == "documents"
        for model in ("bert", "guide"):
            assert refused(node, "/rerank", question | {"documents": ["a"], "model": model}) == "model"
        assert refused(node, "/v1/chat/completions", {"model": "bert", "messages": SAID}) == "model"
        assert refused(node, "/v1/completions", {"model": "bert", "prompt": "a"}) == "model"
        assert refused(node, "/tokenize", {"model": "bert", "content": "a"}) == "model"
        for layers in ({}, {"layers": "0:1"}):
            loaded = node.http.post("/api/admin/models/bert/load", json=layers)
            assert "not cut over nodes" in loaded.text
        listed = {each["name"]: each for each in node.http.get("/api/admin/models").json()["models"]}
        assert listed["bert"]["cut_alignment"] == 0
        assert "as a whole" in listed["bert"]["whole_reason"]
