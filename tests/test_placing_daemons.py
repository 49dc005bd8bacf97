"""Three real nodes that are told only which model, not which layers: they share it out, answer, and mend."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is a pipeline?"}]


def held(node: DaemonProcess) -> list[str]:
    return [text for model in node.stats()["models"] for text in model["layers"]]


def is_settled(nodes: list[DaemonProcess]) -> bool:
    status = nodes[0].http.get("/api/admin/models/guide/status").json()
    states = [placed["state"] for node in nodes for placed in node.stats()["placing"]]
    return bool(status["complete"]) and states == ["as planned"] * len(nodes)


def test_nodes_share_a_model_out_and_mend_it_when_one_dies(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"inference": {"n_threads": 1}}
    with running_daemon(tmp_path, "probe", load=[], **tables) as probe:
        model = probe.http.get("/api/admin/models/guide/status").json()
        layer_gib = model["size_bytes"] / model["n_layers"] / 2**30
    # Room for two thirds of the model each, so that two can do what three did.
    room = {"models": ["guide"], "max_memory_gib": layer_gib * 8.5, "interval_s": 0.3}
    tables |= {"auto_manage": room}
    with (
        running_daemon(tmp_path, "a", load=[], **tables) as a,
        running_daemon(tmp_path, "b", load=[], bootstrap=a.addresses, **tables) as b,
        running_daemon(tmp_path, "c", load=[], bootstrap=a.addresses, **tables) as c,
    ):
        nodes = [a, b, c]
        wait_for(lambda: is_settled(nodes), 90, "a placement of which everybody is content")
        assert all(len(held(node)) <= 1 for node in nodes)
        body = {"model": "guide", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
        answers = [node.http.post("/v1/chat/completions", json=body).json() for node in nodes]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        dead = next(node for node in nodes if any(text.startswith("0:") for text in held(node)))
        dead.process.send_signal(signal.SIGKILL)
        dead.process.wait()
        rest = [node for node in nodes if node is not dead]
        wait_for(lambda: is_settled(rest), 90, "the rest to take over")
        again = rest[0].http.post("/v1/chat/completions", json=body).json()
        assert again["choices"][0]["message"] == answers[0]["choices"][0]["message"]
