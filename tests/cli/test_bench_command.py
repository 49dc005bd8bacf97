"""`swarmllm bench`: what it sends, and what it makes of the times."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from fake_node import FakeNode, sse

from swarmllm.cli import client
from swarmllm.cli.bench import TimedStream, figures

COMPLETIONS = "/v1/completions"
KERNEL = {
    "type": "Q8_0",
    "k": 256,
    "n_threads": 2,
    "first_rows": 2,
    "last_rows": 2,
    "chosen": "avx2",
    "ggml_ns": 70_000,
    "ours_ns": 30_000,
}


@pytest.fixture(autouse=True)
def served(node: FakeNode) -> None:
    node.on("GET", "/v1/models", {"data": [{"id": "guide"}]})
    node.on("POST", "/tokenize", {"tokens": list(range(20))})
    stages = [
        {"layers": "0:4", "nickname": "kitchen", "node": "a"},
        {"layers": "4:8", "nickname": "", "node": "b"},
    ]
    path = "/api/admin/plan?model=guide&prompt_tokens=64&output_tokens=5"
    node.on("GET", path, {"stages": stages})
    workers = [{"model_id": "ab", "kernels": [KERNEL]}, {"model_id": "cd", "kernels": [KERNEL]}]
    node.on("GET", "/api/admin/stats", {"models": [{"name": "guide", "model_id": "ab"}], "workers": workers})


def answers(node: FakeNode, *texts: str) -> None:
    chunks: list[Any] = [{"choices": [{"text": text}]} for text in texts]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 5}})
    node.on("POST", COMPLETIONS, sse(*chunks, b"[DONE]"))


def test_every_prompt_is_fresh_and_every_answer_has_its_length(
    run: Callable[..., Result], node: FakeNode
) -> None:
    answers(node, "one", "", "two")
    result = run("bench", "--streams", "1,3", "--rounds", "2", "--output-tokens", "5", "--json")
    assert result.exit_code == 0, result.output
    bodies = node.bodies(COMPLETIONS)
    assert len(bodies) == 1 + 2 * (1 + 3), "one request to warm up, then all of every round"
    assert len({body["prompt"] for body in bodies}) == len(bodies)
    assert {(body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(5, True)}
    assert {len(body["prompt"].split()) for body in bodies[1:]} == {32}, "two tokens per word"
    shown = json.loads(result.stdout)
    assert shown["route"] == "0:4@kitchen -> 4:8@b"
    assert [each["n_streams"] for each in shown["results"]] == [1, 3]
    assert shown["kernels"] == [KERNEL], "of this model's worker"


def test_the_table_names_its_units(run: Callable[..., Result], node: FakeNode) -> None:
    answers(node, "one", "two")
    result = run("bench", "--output-tokens", "5", "--streams", "1", "--rounds", "1")
    assert "route 0:4@kitchen -> 4:8@b" in result.stdout
    assert "tokens/s" in result.stdout
    assert " ms" in result.stdout
    assert "kernels here: Q8_0, rows of 256, 2 threads: 2 avx2 (us: ggml 70, ours 30)\n" in result.stdout


def test_an_answer_without_text_is_a_failure(run: Callable[..., Result], node: FakeNode) -> None:
    answers(node)
    result = run("bench", "--output-tokens", "5")
    assert (result.exit_code, "no text" in result.stderr) == (client.EXIT_FAILED, True)


@pytest.mark.parametrize("wrong", ["0", "1,", "x", "-1", "1000"])
def test_wrong_counts_are_refused(run: Callable[..., Result], wrong: str) -> None:
    assert run("bench", "--streams", wrong).exit_code == client.EXIT_USAGE


def test_figures_of_streams_that_ran_together() -> None:
    one = TimedStream(0.0, 1.0, 3.0, (0.5, 0.5, 1.0), n_prompt_tokens=10, n_generated=5)
    other = TimedStream(0.0, 2.0, 4.0, (2.0,), n_prompt_tokens=20, n_generated=3)
    result = figures([one, other])
    assert result.n_prompt_tokens == 20
    assert result.prefill_tokens_per_s == 30 / 2
    assert result.tokens_per_s == (4 + 2) / 3
    assert result.stream_tokens_per_s == 2.0
    assert (result.gap_s, result.slow_gap_s) == (1.0, 2.0)
    assert result.first_token_s == 2.0
