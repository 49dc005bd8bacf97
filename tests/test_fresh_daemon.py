"""A fresh daemon answers: the model that a request asks for is loaded, and goes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from other_guide import other_guide

pytestmark = pytest.mark.slow

N_TOKENS = 600
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
        wait_for(lambda: not loaded(node), DEADLINE_S, "the guide to go")
        assert '"done_reason":"load"' in ask(node, prompt="", keep_alive="1h")[1]
        assert loaded(node) == ["0:12"]
        assert node.http.post(f"{GUIDE}/load", json={}).status_code == 200
        assert ask(node, keep_alive=0)[0] == 200
        assert "expires_at" not in node.http.get("/api/ps").json()["models"][0]
        assert loaded(node) == ["0:12"], "a person has loaded it"
        deletion = ("DELETE", "/api/delete")
        assert node.http.request(*deletion, json={"model": "guide"}).status_code == 409
        assert node.http.post(f"{GUIDE}/unload", json={}).status_code == 200
        assert ask(node, keep_alive="1h")[0] == 200
        assert node.http.request(*deletion, json={"model": "guide"}).status_code == 200, "nobody loaded it"
        assert node.stats()["models"] == []


def test_a_model_that_another_node_uses_stays(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "holder", load=[], inference=INFERENCE) as holder,
        running_daemon(
            tmp_path, "asker", load=[], bootstrap=holder.addresses, model={"on_demand": False}
        ) as asker,
    ):
        assert ask(holder, keep_alive="1h")[0] == 200
        wait_for(
            lambda: asker.http.get(f"{GUIDE}/status").json()["complete"],
            DEADLINE_S,
            "the asker to hear of it",
        )
        body = {
            "model": "guide",
            "prompt": "What is",
            "max_tokens": N_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        with asker.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = filter(None, answer.iter_lines())
            assert next(lines).startswith("data: {")
            assert ask(holder, keep_alive=0)[0] == 200
            *_, last, end = lines
        assert end == "data: [DONE]"
        assert '"finish_reason":"length"' in last, "it went on to its end"
        assert loaded(holder) == ["0:12"]
        (running,) = holder.http.get("/api/ps").json()["models"]
        assert running["expires_at"]
        wrong = asker.http.post("/api/embed", json={"model": "guide", "input": "a", "keep_alive": "soon"})
        assert wrong.status_code == 400
        said = "keep_alive: 'soon' is neither seconds nor a duration like 5m."
        assert wrong.json() == {"error": said}


def test_embeddings_say_how_long_a_model_stays(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "fresh", load=[], inference=INFERENCE) as node:
        body = {"model": "guide", "input": "What is a segment?"}
        assert node.http.post("/api/embed", json=body | {"keep_alive": "1h"}).status_code == 200
        assert loaded(node) == ["0:12"]
        body = {"model": "guide", "prompt": "What is a segment?"}
        assert node.http.post("/api/embeddings", json=body | {"keep_alive": 0}).status_code == 200
        wait_for(lambda: not loaded(node), DEADLINE_S, "the guide to go")


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "off", load=[], inference=INFERENCE, model={"on_demand": False}) as node:
        status, text = ask(node)
        assert status == 503
        assert "`swarmllm models load guide` loads all of it on this node" in text
        refused = node.http.post(f"{GUIDE}/load", json={"n_ctx": 2**24}).text
        assert "out_of_memory" in refused
        assert "`swarmllm share guide` distributes the model" in refused
        assert loaded(node) == []


def test_a_model_that_only_another_node_has_on_its_disk_is_loaded_when_it_is_asked_for(
    tmp_path: Path,
) -> None:
    file = tmp_path / "far.gguf"
    file.write_bytes(other_guide("F"))
    without = {"on_demand": False}
    # b has no nodes to meet after its start, so it does not wait for others that may hold the model.
    with (
        running_daemon(tmp_path, "b", load=[], inference=INFERENCE) as b,
        running_daemon(
            tmp_path, "a", load=[], inference=INFERENCE, model=without, bootstrap=b.addresses
        ) as a,
    ):
        with a.http.stream("POST", "/api/admin/models", json={"path": str(file), "name": "far"}) as added:
            assert '"result"' in list(added.iter_lines())[-1]
        wait_for(lambda: ask(b, model="far")[0] == 200, DEADLINE_S, "the model to be loaded")
        far = b.http.get("/api/admin/models/far/status").json()
        assert (far["loaded"], far["stored"]) == (["0:12"], True)
        assert a.stats()["models"] == []
        assert b.stats()["loading"] == []
