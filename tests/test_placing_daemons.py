"""Three real nodes that are told only which model, not which layers: they share it out, answer, and mend."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for

from swarmllm.guide import GUIDE_PATH
from swarmllm.models import LayerRange, build_manifest
from swarmllm.node.placing.plan import shape_of

pytestmark = pytest.mark.slow

SETTLE_TIMEOUT_S = 240.0
QUESTION = [{"role": "user", "content": "What is a pipeline?"}]


def held(stats: dict[str, Any]) -> list[LayerRange]:
    return [LayerRange.parse(text) for model in stats["models"] for text in model["layers"]]


def settled(nodes: list[DaemonProcess]) -> list[dict[str, Any]] | None:
    """What each of them says, once they see each other and nobody else, the model is complete and all are
    content. One look for everything: where machines are slow they may begin to move again just behind it,
    and that is fine as long as the model goes on working."""
    if not all(node.http.get("/api/admin/models/guide/status").json()["complete"] for node in nodes):
        return None
    seen = [node.stats() for node in nodes]
    states = [placed["state"] for stats in seen for placed in stats["placing"]]
    meet = all(stats["peers_connected"] == len(nodes) - 1 for stats in seen)
    return seen if meet and states == ["as planned"] * len(nodes) else None


def test_nodes_share_a_model_out_and_mend_it_when_one_dies(tmp_path: Path) -> None:
    manifest = build_manifest(GUIDE_PATH)
    shape = shape_of(manifest)
    # Room for two thirds of the model each, so that two can do what three did.
    room_gib = manifest.size_bytes / manifest.n_layers * 8.5 / 2**30
    tables: dict[str, Any] = {
        "inference": {"n_threads": 1},
        "auto_manage": {"models": ["guide"], "max_memory_gib": room_gib, "interval_s": 0.3},
    }
    with (
        running_daemon(tmp_path, "a", load=[], **tables) as a,
        running_daemon(tmp_path, "b", load=[], bootstrap=a.addresses, **tables) as b,
        running_daemon(tmp_path, "c", load=[], bootstrap=a.addresses, **tables) as c,
    ):
        nodes = [a, b, c]

        def shared_out(nodes: list[DaemonProcess]) -> list[list[LayerRange]]:
            seen = wait_for(
                lambda: settled(nodes), SETTLE_TIMEOUT_S, "a placement of which everybody is content"
            )
            parts = [held(stats) for stats in seen]
            assert all(sum(map(shape.n_bytes, ranges)) <= room_gib * 2**30 for ranges in parts)
            return parts

        parts = shared_out(nodes)
        body = {"model": "guide", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
        answers = [node.http.post("/v1/chat/completions", json=body).json() for node in nodes]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        dead = next(
            node for node, ranges in zip(nodes, parts, strict=True) if any(0 in layers for layers in ranges)
        )
        dead.process.send_signal(signal.SIGKILL)
        dead.process.wait()
        rest = [node for node in nodes if node is not dead]
        shared_out(rest)
        again = rest[0].http.post("/v1/chat/completions", json=body).json()
        assert again["choices"][0]["message"] == answers[0]["choices"][0]["message"]


def test_a_shared_model_is_held_by_those_that_accept_it(tmp_path: Path) -> None:
    manifest = build_manifest(GUIDE_PATH)
    room = {"max_memory_gib": manifest.size_bytes / manifest.n_layers * 8.5 / 2**30, "interval_s": 0.3}
    shares: dict[str, Any] = {"inference": {"n_threads": 1}, "auto_manage": {**room, "share": ["guide"]}}
    accepts: dict[str, Any] = {"inference": {"n_threads": 1}, "auto_manage": {**room, "accept": ["members"]}}
    with (
        running_daemon(tmp_path, "a", load=[], **shares) as a,
        running_daemon(tmp_path, "b", load=[], bootstrap=a.addresses, **accepts) as b,
    ):
        seen = wait_for(lambda: settled([a, b]), SETTLE_TIMEOUT_S, "a placement of which both are content")
        assert all(held(stats) for stats in seen)
        body = {"model": "guide", "messages": QUESTION, "temperature": 0, "max_tokens": 8}
        assert b.http.post("/v1/chat/completions", json=body).status_code == 200
