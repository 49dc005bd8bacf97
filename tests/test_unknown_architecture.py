"""Where files may be cut, on real daemons: who has the whole file tries it, and who fetches layers of a model
relies on that where the table does not have its architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from workers.blueprint import write
from workers.families import FAMILIES
from workers.generic_families import CUT_EXACTLY, RUN_WHOLE

from swarmllm_proto.architectures import ARCHITECTURES

pytestmark = pytest.mark.slow

INFERENCE = {"n_threads": 1, "n_slots": 2, "n_ctx": 256}


def lines(node: DaemonProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with node.http.stream("POST", f"/api/admin/models{path}", json=body) as answer:
        return [json.loads(line) for line in answer.iter_lines()]


def add(node: DaemonProcess, path: Path, name: str) -> list[dict[str, Any]]:
    return lines(node, "", {"path": str(path), "name": name})


def status(node: DaemonProcess, name: str) -> dict[str, Any]:
    answer = node.http.get(f"/api/admin/models/{name}/status")
    return dict(answer.json()) if answer.status_code == 200 else {"sources": [], "complete": False}


def complete(node: DaemonProcess, name: str) -> str:
    body = {"model": name, "prompt": "swarm", "temperature": 0, "max_tokens": 12, "logprobs": 1}
    answer = node.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["logprobs"]["tokens"])


@pytest.mark.parametrize("is_tried", [True, False])
def test_a_file_of_a_listed_architecture_is_tried_unless_the_table_is_believed(
    tmp_path: Path, is_tried: bool
) -> None:
    path = write(tmp_path / "listed.gguf", FAMILIES["lfm2, heads listed"])
    inference = {**INFERENCE, "check_cuts": is_tried}
    with running_daemon(tmp_path, "a", load=[], inference=inference) as a:
        for wanted in (is_tried, False):  # once
            added = add(a, path, "listed")
            assert ("checking" in {event.get("phase") for event in added}) == wanted
            model = added[-1]["model"]
            assert (model["cut_alignment"], model["whole_reason"]) == (3, "")
        assert lines(a, "/listed/load", {"layers": "0:3"})[-1]["type"] == "result"


def test_a_verdict_is_reached_once_kept_and_passed_on(tmp_path: Path) -> None:
    exact, whole = CUT_EXACTLY["apertus"][0], RUN_WHOLE["afmoe"][0]
    assert not {exact.architecture, whole.architecture} & set(ARCHITECTURES)
    exact_path = write(tmp_path / "exact.gguf", exact)
    whole_path = write(tmp_path / "whole.gguf", whole)
    with running_daemon(tmp_path, "a", load=[], inference=INFERENCE) as a:
        added = add(a, exact_path, "exact")
        assert "checking" in {event.get("phase") for event in added}
        model = added[-1]["model"]
        assert (model["cut_alignment"], model["whole_reason"]) == (1, "")
        again = add(a, exact_path, "exact")
        assert "checking" not in {event.get("phase") for event in again}
        assert again[-1]["model"]["cut_alignment"] == 1

        refused = add(a, whole_path, "whole")[-1]["model"]
        assert refused["cut_alignment"] == 0
        assert "other numbers than in the whole model" in refused["whole_reason"]
        answer = a.http.post("/api/admin/models/whole/load", json={"layers": "0:4"})
        assert answer.status_code == 422
        assert "other numbers than in the whole model" in answer.text

        lines(a, "/exact/load", {})
        expected = complete(a, "exact")
        assert a.http.post("/api/admin/models/exact/unload", json={}).status_code == 200
        with running_daemon(tmp_path, "b", load=[], inference=INFERENCE, bootstrap=a.addresses) as b:
            wait_for(
                lambda: status(b, "exact")["sources"], DEADLINE_S, "the other node to know who has the file"
            )
            loaded = lines(b, "/exact/load", {"layers": "3:8"})[-1]
            assert loaded["type"] == "result", loaded
            assert loaded["model"]["cut_alignment"] == 1
            assert lines(a, "/exact/load", {"layers": "0:3"})[-1]["type"] == "result"
            for node in (a, b):
                wait_for(
                    lambda node=node: status(node, "exact")["complete"], DEADLINE_S, "all layers to be held"
                )
                assert complete(node, "exact") == expected
            answer = b.http.post("/api/admin/models/whole/load", json={"layers": "0:4"})
            assert answer.status_code == 422
            assert "has not been verified" in answer.text
