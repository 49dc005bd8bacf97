"""Daemons run a model in four parts: added from a folder, given to another node, pulled from a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from faulty_server import open_shelf
from other_guide import other_guide
from split_gguf import split_gguf

from swarmllm.models import build_manifest

pytestmark = pytest.mark.slow

INFERENCE = {"n_threads": 1, "n_slots": 2}
MODELS = "/api/admin/models"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    whole = folder / "whole.bin"
    whole.write_bytes(other_guide("S"))
    return split_gguf(whole, folder, [0, 30, 71], stem="Split-Q8_0")


def events(node: DaemonProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with node.http.stream("POST", path, json=body) as answer:
        return [json.loads(line) for line in answer.iter_lines()]


def done(node: DaemonProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    last = events(node, path, body)[-1]
    assert last["type"] == "result", last
    return dict(last["model"])


def ask(node: DaemonProcess, model: str) -> str:
    messages = [{"role": "user", "content": "What is a pipeline?"}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 40}
    answer = node.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def is_complete(node: DaemonProcess, model: str) -> bool:
    answer = node.http.get(f"{MODELS}/{model}/status")
    return answer.status_code == 200 and bool(answer.json()["complete"])


def sources(node: DaemonProcess, model: str) -> int:
    answer = node.http.get(f"{MODELS}/{model}/status")
    return len(answer.json()["sources"]) if answer.status_code == 200 else 0


def test_a_model_of_four_parts_answers_whole_and_over_two_nodes(tmp_path: Path, parts: list[Path]) -> None:
    model_id = build_manifest(parts[0]).model_id
    with (
        running_daemon(tmp_path, "a", load=["guide"], inference=INFERENCE) as a,
        running_daemon(tmp_path, "b", load=[], inference=INFERENCE, bootstrap=a.addresses) as b,
    ):
        expected = ask(a, "guide")
        added = done(a, MODELS, {"path": str(parts[0].parent), "name": "split"})
        assert (added["model_id"], added["path"], added["n_parts"]) == (model_id, str(parts[0]), 4)
        whole = done(a, f"{MODELS}/split/load", {})
        assert whole["loaded"] == ["0:12"]
        assert ask(a, "split") == expected
        done(a, f"{MODELS}/split/unload", {"progress": True})

        wait_for(lambda: sources(b, "split"), DEADLINE_S, "b to know who has the parts")
        fetched = done(b, f"{MODELS}/split/load", {"layers": "5:12"})
        assert (fetched["model_id"], fetched["n_parts"]) == (model_id, 1)
        done(a, f"{MODELS}/split/load", {"layers": "0:8"})
        for node in (a, b):
            wait_for(lambda node=node: is_complete(node, "split"), DEADLINE_S, "both to know both")
            assert ask(node, "split") == expected
            assert events(node, f"{MODELS}/split/verify", {})[-1]["damaged"] == []
        assert a.http.delete(f"{MODELS}/split").status_code in (200, 409)
        assert all(part.exists() for part in parts)


def test_a_model_of_four_parts_is_pulled_from_a_hub_and_answers(tmp_path: Path, parts: list[Path]) -> None:
    with open_shelf() as hub, running_daemon(tmp_path, "solo", load=["guide"], inference=INFERENCE) as node:
        listing = {"siblings": [{"rfilename": f"Q8_0/{part.name}"} for part in parts]}
        hub.files["/api/models/org/repo"] = json.dumps(listing).encode()
        for part in parts:
            hub.files[f"/org/repo/resolve/main/Q8_0/{part.name}"] = part.read_bytes()
        body = {"source": "hf:org/repo:Q8_0", "hf_endpoint": hub.url}
        started = node.http.post("/api/admin/downloads", json=body).json()

        def view() -> dict[str, Any]:
            return dict(node.http.get(f"/api/admin/downloads/{started['id']}").json())

        wait_for(lambda: view()["state"] in ("done", "failed"), DEADLINE_S, "the download to end")
        assert (view()["state"], view()["error"], view()["model"]) == ("done", "", "split-q8_0")
        done(node, f"{MODELS}/split-q8_0/load", {})
        assert ask(node, "split-q8_0") == ask(node, "guide")


def test_a_missing_part_is_named_by_the_daemon(tmp_path: Path, parts: list[Path]) -> None:
    with running_daemon(tmp_path, "solo", load=[], inference=INFERENCE) as node:
        alone = tmp_path / parts[1].name
        alone.write_bytes(parts[1].read_bytes())
        answer: httpx.Response = node.http.post(MODELS, json={"path": str(alone), "name": "alone"})
        assert f"part 1 of 4 is missing: there is no {tmp_path / parts[0].name}" in answer.text
