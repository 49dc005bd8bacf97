"""A daemon whose models come and go, and whose users delete and copy files under it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, process_exists, running_daemon
from gguf import GGUFReader

from swarmllm.guide import DRAFT_PATH

pytestmark = pytest.mark.slow

MODELS = "/api/admin/models"


def other_content(path: Path, n: int) -> Path:
    """The draft of the guide with another number in one weight: another model of the same size."""
    shutil.copy(DRAFT_PATH, path)
    (norm,) = (each for each in GGUFReader(path).tensors if each.name == "output_norm.weight")
    with path.open("r+b") as file:
        file.seek(norm.data_offset)
        file.write(bytes([n]))
    return path


def result(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text, answer.text
    return dict(answer.json()) if answer.headers["content-type"] == "application/json" else {}


def ask(node: DaemonProcess, model: str) -> tuple[int, str]:
    body = {"model": model, "prompt": "What is a segment?", "max_tokens": 4, "temperature": 0}
    answer = node.http.post("/v1/completions", json=body)
    return answer.status_code, answer.text


def held_by(node: DaemonProcess) -> tuple[int, int, int]:
    """Open files, tasks and processes."""
    pid = node.process.pid
    stats = node.stats()
    tasks = stats["tasks"]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), tasks, len(children)


def test_models_that_were_removed_leave_nothing_behind(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "solo", load=[]) as node:
        seen: list[tuple[int, int, int]] = []
        pids: set[int] = set()
        for n in range(8):
            path = other_content(tmp_path / f"{n}.gguf", n)
            result(node.http.post(MODELS, json={"path": str(path), "name": f"m{n}"}))
            if n % 2:
                result(node.http.post(f"{MODELS}/m{n}/load", json={"n_ctx": 256}))
                assert ask(node, f"m{n}")[0] == 200
                result(node.http.post(f"{MODELS}/m{n}/unload", json={}))
            result(node.http.post("/tokenize", json={"model": f"m{n}", "content": "a"}))
            assert len(node.worker_pids()) == 1
            pids |= set(node.worker_pids())
            assert node.http.delete(f"{MODELS}/m{n}").status_code == 200
            assert node.stats()["workers"] == []
            path.unlink()
            seen.append(held_by(node))
        assert not [pid for pid in pids if process_exists(pid)]
        # Threads and connections come and go by a few, whatever was done.
        assert seen[-1][2] == 0
        assert seen[-1][0] <= seen[1][0] + 4, seen
        assert seen[-1][1] <= seen[1][1] + 4, seen
        assert node.stop() == 0


def test_a_loaded_model_answers_without_its_file_and_says_so(tmp_path: Path) -> None:
    path = other_content(tmp_path / "mine.gguf", 1)
    with running_daemon(tmp_path, "solo", load=[]) as node:
        result(node.http.post(MODELS, json={"path": str(path), "name": "mine"}))
        result(node.http.post(f"{MODELS}/mine/load", json={"n_ctx": 256}))
        before = ask(node, "mine")
        assert before[0] == 200
        os.utime(path)
        assert ask(node, "mine")[0] == 200
        assert node.stats()["models"][0]["trouble"] is None
        path.unlink()
        assert ask(node, "mine")[0] == 200
        assert "cannot be read" in node.stats()["models"][0]["trouble"]
        result(node.http.post(f"{MODELS}/mine/unload", json={}))
        status, text = ask(node, "mine")
        assert status != 200
        assert "cannot be read" in text
        assert node.stop() == 0


def test_a_second_name_for_the_same_content_leads_to_the_loaded_model(tmp_path: Path) -> None:
    path = other_content(tmp_path / "mine.gguf", 1)
    copy = Path(shutil.copy(path, tmp_path / "copy.gguf"))
    with running_daemon(tmp_path, "solo", load=[]) as node:
        result(node.http.post(MODELS, json={"path": str(path), "name": "good"}))
        result(node.http.post(f"{MODELS}/good/load", json={"n_ctx": 256}))
        result(node.http.post(MODELS, json={"path": str(copy), "name": "other"}))
        assert [ask(node, name)[0] for name in ("good", "other")] == [200, 200]
        assert node.http.get(f"{MODELS}/other/status").json()["further_names"] == ["other"]
        left = node.http.delete(f"{MODELS}/good")
        assert (left.status_code, left.json()["name"]) == (200, "other")
        assert [ask(node, name)[0] for name in ("good", "other")] == [404, 200]
        assert node.http.delete(f"{MODELS}/other").status_code == 409, "it is loaded"
        assert node.stop() == 0
