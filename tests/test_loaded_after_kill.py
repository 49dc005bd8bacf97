"""A daemon that was killed serves again what its user had loaded, as soon as it is back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for

pytestmark = pytest.mark.slow

READY_TIMEOUT_S = 120.0


def kill(node: DaemonProcess) -> None:
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.wait()
    (node.data_dir / "daemon.json").unlink()


def when_ready(node: DaemonProcess) -> dict[str, Any]:
    """Its statistics once all is loaded that it wants to load."""
    wait_for(lambda: node.http.get("/health/ready").status_code == 200, READY_TIMEOUT_S, "readiness")
    return node.stats()


def answer(node: DaemonProcess) -> str:
    body = {"model": "guide", "prompt": "What is a segment?", "max_tokens": 8, "temperature": 0}
    found = node.http.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


def test_a_killed_daemon_comes_back_with_what_was_loaded_by_hand(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "solo", load=[]) as node:
        for layers in ("0:4", "4:12"):
            loaded = node.http.post("/api/admin/models/guide/load", json={"layers": layers, "n_ctx": 512})
            assert '"result"' in loaded.text, loaded.text
        said = answer(node)
        kill(node)
    with running_daemon(tmp_path, "solo", load=[]) as node:
        assert when_ready(node)["models"][0]["layers"] == ["0:12"]
        settings = node.http.get("/api/admin/models/guide/status").json()["settings"]
        assert settings["n_ctx"] == 512
        assert answer(node) == said
        assert node.http.post("/api/admin/models/guide/unload", json={}).status_code == 200
        kill(node)
    with running_daemon(tmp_path, "solo", load=[]) as node:
        assert when_ready(node)["models"] == []
        assert node.stop() == 0
