"""Exact requests over two daemons, by links, beside others: the numbers of a daemon with the whole model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

QUESTION = "What is a pipeline, and how does a request walk through the stages of one? " * 6
N_OTHERS = 4


def is_complete(node: DaemonProcess) -> bool:
    return bool(node.http.get("/api/admin/plan?model=guide").status_code == 200)


def answer(node: DaemonProcess, prompt: str = QUESTION, **fields: Any) -> dict[str, Any]:
    body = {"model": "guide", "prompt": prompt, "max_tokens": 24, "temperature": 0.7, "seed": 5}
    told = node.http.post("/v1/completions", json=body | {"ignore_eos": True, "logprobs": 5} | fields)
    assert told.status_code == 200, told.text
    return dict(told.json())


def scores(node: DaemonProcess) -> dict[str, Any]:
    """Of the prompt's own tokens, as an evaluation asks for them."""
    told = answer(node, exact=True, echo=True, max_tokens=0)
    assert told["swarm"]["apart"]
    assert len(told["choices"][0]["logprobs"]["token_logprobs"]) > 100
    return dict(told["choices"][0]["logprobs"])


def vectors(node: DaemonProcess) -> list[str]:
    body = {"model": "guide", "input": [QUESTION, "a slot"], "encoding_format": "base64", "exact": True}
    told = node.http.post("/v1/embeddings", json=body)
    assert told.status_code == 200, told.text
    return [each["embedding"] for each in told.json()["data"]]


@pytest.mark.slow
def test_two_nodes_beside_others_tell_what_one_tells_alone(tmp_path: Path) -> None:
    common = {"n_threads": 1, "n_ctx": 4096, "check_rate": 1.0}
    with (
        running_daemon(tmp_path, "whole", load=["guide"], inference=common) as whole,
        running_daemon(tmp_path, "first", load=["guide:0:5"], inference=common) as first,
        running_daemon(
            tmp_path, "second", load=["guide:5:12"], inference=common, bootstrap=first.addresses
        ) as second,
        ThreadPoolExecutor(N_OTHERS) as threads,
    ):
        for node in (whole, first, second):
            wait_for(lambda node=node: is_complete(node), DEADLINE_S, "a pipeline")
        alone = answer(whole, exact=True)
        others = [threads.submit(answer, first, QUESTION[i:], max_tokens=60) for i in range(N_OTHERS)]
        for node in (first, second):
            told = answer(node, exact=True)
            assert told["swarm"]["apart"]
            assert [stage["layers"] for stage in told["swarm"]["route"]] == ["0:5", "5:12"]
            assert told["choices"] == alone["choices"]
            assert scores(node) == scores(whole)
            assert vectors(node) == vectors(whole)
        assert all(other.result()["usage"]["completion_tokens"] == 60 for other in others)
        assert all(node.stats()["pipelines"]["jobs_by_link"] for node in (first, second))
        assert answer(first, exact=True)["choices"] == alone["choices"]
        for node, seen in ((first, second), (second, first)):
            trust = node.http.get(f"/api/admin/peers/{seen.node_id}").json()["trust"]
            assert trust["score"] >= 0.5, trust
