"""Guesses over cut models between real daemons: the text, what checks find, and a killed worker."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

pytestmark = pytest.mark.slow

PROMPT = "What is a pipeline?"
N_ANSWERS = 40
N_TOKENS = 160
"""The guide has said all that it knows before, and repeats itself."""
HALVES = {"first": "guide:0:5", "second": "guide:5:12", "third": "guide:5:12"}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DaemonProcess]]:
    """Two hold the second half: what one computes for the checking node is computed again by the other."""
    folder = tmp_path_factory.mktemp("guesses")
    common = {"n_threads": 1, "n_ctx": 2048, "check_rate": 0.0}
    plain = common | {"ngram_lookup_enabled": False}
    checking = common | {"check_rate": 1.0}
    telling = common | {"guess_from_prompt": "on"}
    drafting = common | {"speculative_decoding": True}
    with (
        running_daemon(folder, "whole", load=["guide"], inference=plain) as whole,
        running_daemon(folder, "first", load=[HALVES["first"]], inference=telling) as first,
        running_daemon(
            folder, "second", load=[HALVES["second"]], inference=drafting, bootstrap=first.addresses
        ) as second,
        running_daemon(
            folder, "third", load=[HALVES["third"]], inference=drafting, bootstrap=first.addresses
        ) as third,
        running_daemon(folder, "checking", load=[], inference=checking, bootstrap=first.addresses) as fourth,
    ):
        nodes = {"first": first, "second": second, "third": third, "checking": fourth}
        wait_for(
            lambda: len(first.http.get("/api/admin/peers").json()["peers"]) == len(nodes) - 1,
            DEADLINE_S,
            "all nodes to know each other",
        )
        for node in (whole, *nodes.values()):
            wait_for(
                lambda node=node: node.http.get("/api/admin/plan?model=guide").status_code == 200,
                DEADLINE_S,
                "a pipeline",
            )
        yield nodes | {"whole": whole}


def answer(node: DaemonProcess, **fields: Any) -> dict[str, Any]:
    body = {"model": "guide", "prompt": PROMPT, "max_tokens": N_TOKENS, "temperature": 0}
    told = node.http.post("/v1/completions", json=body | {"ignore_eos": True} | fields)
    assert told.status_code == 200, told.text
    return dict(told.json())


def n_right(told: dict[str, Any]) -> int:
    return int(told["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])


def checks(node: DaemonProcess) -> dict[str, int]:
    found = re.findall(r'swarmllm_checks_total{outcome="(\w+)"} (\d+)', node.http.get("/metrics").text)
    return {outcome: int(value) for outcome, value in found if int(value)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.4, "seed": 3},
        {"logprobs": 3},
        {"repetition_penalty": 1.01, "logit_bias": {"5": -1}},
    ],
    ids=["greedy", "seeded", "log-probabilities", "penalties"],
)
def test_the_text_is_that_of_one_node_without_guesses(
    nodes: dict[str, DaemonProcess], fields: dict[str, Any]
) -> None:
    expected = answer(nodes["whole"], **fields)
    for origin in ("first", "second"):
        # Whether guesses are worth it is measured, so a busy machine may take none at first.
        for turn in range(N_ANSWERS):
            told = answer(nodes[origin], **fields)
            assert len(told["swarm"]["route"]) == 2
            assert told["choices"] == expected["choices"]
            if turn >= 2 and n_right(told):
                break
        else:
            raise AssertionError(f"no guess was right in {N_ANSWERS} answers")
    assert n_right(expected) == 0


def test_a_last_stage_that_is_told_the_prompt_remembers_how_it_went_on(
    nodes: dict[str, DaemonProcess],
) -> None:
    fields = {"prompt": "How do I load a model on two nodes?", "max_tokens": 48}
    expected = answer(nodes["whole"], **fields)
    told = [answer(nodes["first"], **fields) for _ in range(5)]
    assert [each["choices"] for each in told] == [expected["choices"]] * 5
    assert max(map(n_right, told)) > 24


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.4, "seed": 3, "logprobs": 2},
        {"stop": ["model", "nodes"], "ignore_eos": False},
        {"max_tokens": 1},
        {"max_tokens": 6, "response_format": {"type": "json_object"}},
    ],
    ids=["seeded", "stopped", "one token", "grammar"],
)
def test_an_answer_that_is_remembered_ends_where_it_has_to(
    nodes: dict[str, DaemonProcess], fields: dict[str, Any]
) -> None:
    """It has left before there is any token, and another one may come."""
    fields = {"prompt": "How do I load a model on three nodes?", "max_tokens": 24, **fields}
    expected = answer(nodes["whole"], **fields)
    other = answer(nodes["whole"], **fields | {"logit_bias": {"5": 3, "9": -2}})
    for _ in range(3):
        told = answer(nodes["first"], **fields)
        assert told["choices"] == expected["choices"]
        assert told["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    told = answer(nodes["first"], **fields | {"logit_bias": {"5": 3, "9": -2}})
    assert told["choices"] == other["choices"]


def test_checks_of_rows_that_were_guessed_find_nothing_wrong(nodes: dict[str, DaemonProcess]) -> None:
    origin = nodes["checking"]
    n_guessed = 0

    def one_was_checked() -> bool:
        """Asks again: a busy machine may take no guess at first, and drop the check of an answer."""
        nonlocal n_guessed
        n_guessed += n_right(answer(origin))
        return n_guessed > 0 and checks(origin).get("right", 0) > 0

    wait_for(one_was_checked, DEADLINE_S, "an answer with guesses, and a check to be over")
    assert checks(origin).keys() <= {"right", "dropped"}
    for name in HALVES:
        trust = origin.http.get(f"/api/admin/peers/{nodes[name].node_id}").json()["trust"]
        assert trust["score"] >= 0.5, trust


def test_a_stream_of_guesses_survives_a_killed_worker(nodes: dict[str, DaemonProcess]) -> None:
    origin = nodes["first"]
    # Each is asked once: an answer that is remembered might be computed before the workers are killed.
    for prompt in ("What is a stage?", "What is a segment?", "What is a worker?"):
        expected = answer(nodes["whole"], prompt=prompt)["choices"][0]["text"]
        body = {"model": "guide", "prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0, "stream": True}
        recoveries = origin.stats()["pipelines"]["recoveries"]
        text = ""
        with origin.http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as stream:
            # After a try before, a worker is started where the stream needs it.
            halves = [nodes[name] for name in ("second", "third")]
            pids = wait_for(
                lambda halves=halves: [found[0] for node in halves if (found := node.worker_pids())],
                DEADLINE_S,
                "a worker",
            )
            for line in stream.iter_lines():
                found = re.search(r'"text":("(?:[^"\\]|\\.)*")', line)
                if found is None:
                    continue
                text += json.loads(found[1])
                if pids and len(text.split()) > 20:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                    pids = []
        assert text == expected
        if origin.stats()["pipelines"]["recoveries"] > recoveries:
            return
    raise AssertionError("no stream was disturbed")
