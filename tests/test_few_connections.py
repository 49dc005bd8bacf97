"""A cut model answers over nodes with which the asked one was not connected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

pytestmark = pytest.mark.slow

FEW = {"max_peers": 1, "dht": "off"}
"""As in a swarm that is too large for everybody to be connected with everybody."""


def one_more(folder: Path, name: str, load: list[str], first: DaemonProcess) -> Any:
    """It knows the first from a file, as a swarm may publish it."""
    file = folder / "nodes.txt"
    file.write_text("\n".join(["# to meet first", *first.addresses]))
    return running_daemon(folder, name, load=load, network=FEW | {"bootstrap_file": str(file)})


def connected(node: DaemonProcess) -> set[str]:
    return {peer["node_id"] for peer in node.http.get("/api/admin/peers").json()["peers"]}


def planned(node: DaemonProcess) -> list[str]:
    """Nodes by which a request would go now."""
    plan = node.http.get("/api/admin/plan?model=guide")
    return [stage["node_id"] for stage in plan.json()["stages"]] if plan.status_code == 200 else []


def ask(node: DaemonProcess) -> str:
    messages = [{"role": "user", "content": "What is a pipeline?"}]
    body = {"model": "guide", "messages": messages, "temperature": 0, "max_tokens": 24}
    answer = node.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_stages_are_dialled_when_a_request_needs_them(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "middle", load=["guide"]) as middle,
        one_more(tmp_path, "asked", [], middle) as asked,
        one_more(tmp_path, "first", ["guide:0:6"], middle) as first,
        one_more(tmp_path, "last", ["guide:6:12"], middle) as last,
    ):
        expected = ask(middle)
        for node in (asked, first, last):
            wait_for(lambda n=node: connected(n) == {middle.node_id}, DEADLINE_S, "one connection each")
        middle.http.post("/api/admin/models/guide/unload", json={})
        stages = [first.node_id, last.node_id]
        wait_for(lambda: planned(asked) == stages, DEADLINE_S, "the asked one to know who has the layers")
        assert connected(asked) == {middle.node_id}
        assert ask(asked) == expected
        assert {first.node_id, last.node_id} <= connected(asked)
        assert last.node_id in connected(first)
