"""A worker that stands still in the middle of an answer: a standby goes on, and nobody is called guilty."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

N_TOKENS = 300
BODY = {
    "model": "guide",
    "prompt": "What is a pipeline? What is a stage, and what is a worker?",
    "max_tokens": N_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def routes(node: DaemonProcess) -> set[str]:
    """The nodes of the route that is planned now, by nickname."""
    plan = node.http.get("/api/admin/plan?model=guide")
    return {each["nickname"] for each in plan.json()["stages"]} if plan.status_code == 200 else set()


def events(node: DaemonProcess) -> Iterator[dict[str, Any]]:
    with node.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.slow
def test_an_answer_goes_on_while_a_worker_of_its_route_stands_still(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "asked", load=["guide:0:6"]) as asked,
        running_daemon(tmp_path, "one", load=["guide:6:12"], bootstrap=asked.addresses) as one,
        running_daemon(tmp_path, "two", load=["guide:6:12"], bootstrap=asked.addresses) as two,
    ):
        wait_for(lambda: routes(asked), DEADLINE_S, "a pipeline")
        peers = "/api/admin/peers"
        wait_for(lambda: len(asked.http.get(peers).json()["peers"]) == 2, DEADLINE_S, "both others")
        whole = asked.http.post("/v1/completions", json=BODY).json()
        pids = {node.node_id: node.worker_pids() for node in (one, two)}
        stream = events(asked)
        text = next(stream)["choices"][0]["text"]
        slow = next(node for node in (one, two) if node.stats()["pipelines"]["active_stage_requests"])
        with stopped(pids[slow.node_id]):
            text += "".join(each["choices"][0]["text"] for each in stream if each["choices"])
        assert text == whole["choices"][0]["text"]
        assert asked.stats()["pipelines"]["hedges_won"] >= 1
        trust = asked.http.get(f"{peers}/{slow.node_id}").json()["trust"]
        assert trust["score"] >= 0.5, trust
