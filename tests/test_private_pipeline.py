"""The ends of the model at home, its middle on a node that holds all of it, and a plan that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

pytestmark = pytest.mark.slow

ANSWER = {
    "model": "guide",
    "messages": [{"role": "user", "content": "What is a pipeline?"}],
    "temperature": 0,
}


def ask(node: DaemonProcess) -> tuple[str, str]:
    """(text, x-swarm-route)"""
    answer = node.http.post("/v1/chat/completions", json=ANSWER | {"max_tokens": 20})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.headers["x-swarm-route"]


def plan(node: DaemonProcess) -> dict[str, list[dict[str, str]]]:
    """Once it knows what the other holds."""
    answer = node.http.get("/api/admin/plan", params={"model": "guide"})
    planned = dict(answer.json()) if answer.status_code == 200 else {}
    return planned if planned.get("refused") else {}


def test_the_middle_is_lent_and_the_ends_are_not(tmp_path: Path) -> None:
    ends = ["guide:0:2", "guide:10:12"]
    with (
        running_daemon(tmp_path, "all", load=["guide"]) as whole,
        running_daemon(
            tmp_path,
            "home",
            load=ends,
            bootstrap=whole.addresses,
            inference={"encrypted_pipeline": True, "n_threads": 1},
        ) as home,
    ):
        planned = wait_for(lambda: plan(home), DEADLINE_S, "holders of all layers")
        assert [(stage["node_id"], stage["layers"]) for stage in planned["stages"]] == [
            (home.node_id, "0:2"),
            (whole.node_id, "2:10"),
            (home.node_id, "10:12"),
        ]
        assert [(refusal["node_id"], refusal["layers"]) for refusal in planned["refused"]] == [
            (whole.node_id, "0:2"),
            (whole.node_id, "10:12"),
        ]
        text, route = ask(home)
        assert text == ask(whole)[0]
        for stage in planned["stages"]:
            assert f"{stage['layers']}@{stage['node_id']}" in route
