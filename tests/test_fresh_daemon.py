"""A fresh daemon answers: the model that a request asks for is loaded, and goes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import PATIENCE_S

pytestmark = pytest.mark.slow

INFERENCE = {"n_threads": 1, "n_slots": 2}
GUIDE = "/api/admin/models/guide"


def loaded(node: DaemonProcess) -> list[str]:
    return list(node.http.get(f"{GUIDE}/status").json()["loaded"])


def ask(node: DaemonProcess, **more: Any) -> tuple[int, str]:
    body = {"model": "guide", "prompt": "What is a segment?", "stream": False, "options": {"num_predict": 4}}
    answer = node.http.post("/api/generate", json=body | more)
    return answer.status_code, answer.text


def test_a_fresh_daemon_answers_and_lets_the_model_go(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "fresh", load=[], inference=INFERENCE) as node:
        assert loaded(node) == []
        assert ask(node)[0] == 200
        assert loaded(node) == ["0:12"]
        (running,) = node.http.get("/api/ps").json()["models"]
        assert running["expires_at"]
        assert ask(node, keep_alive=0)[0] == 200
        wait_for(lambda: not loaded(node), PATIENCE_S, "the guide to go")
        assert '"done_reason":"load"' in ask(node, prompt="", keep_alive="1h")[1]
        assert loaded(node) == ["0:12"]
        assert node.http.post(f"{GUIDE}/load", json={}).status_code == 200
        assert ask(node, keep_alive=0)[0] == 200
        assert "expires_at" not in node.http.get("/api/ps").json()["models"][0]
        assert loaded(node) == ["0:12"], "a person has loaded it"


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "off", load=[], inference=INFERENCE, model={"on_demand": False}) as node:
        assert ask(node)[0] == 503
        assert loaded(node) == []
