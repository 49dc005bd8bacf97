"""Three real nodes fetch a third each of a file that none of them knows, one is killed in between, and then
they answer with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from faulty_server import FaultyServer
from other_guide import other_guide

from swarmllm.models import LayerRange, build_manifest, needed_tensors

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is a pipeline?"}]
NAME = "stranger"
INFERENCE = {"n_threads": 1, "n_slots": 2}
HEADER_STEP_BYTES = 2**20


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    path.write_bytes(other_guide("S"))
    return path


def pull(node: DaemonProcess, source: str, layers: str) -> dict[str, Any]:
    body = {"source": source, "layers": layers, "name": NAME}
    download = node.http.post("/api/admin/downloads", json=body).json()

    def ended() -> dict[str, Any] | None:
        now = dict(node.http.get(f"/api/admin/downloads/{download['id']}").json())
        return now if now["state"] in ("done", "failed", "cancelled") else None

    found: dict[str, Any] = wait_for(ended, DEADLINE_S, "the end of the download")
    assert (found["state"], found["error"], found["model"]) == ("done", "", NAME)
    return found


def status(node: DaemonProcess) -> dict[str, Any]:
    return dict(node.http.get(f"/api/admin/models/{NAME}/status").json())


def load(node: DaemonProcess, name: str, layers: str) -> dict[str, Any]:
    with node.http.stream("POST", f"/api/admin/models/{name}/load", json={"layers": layers}) as answer:
        events = [json.loads(line) for line in answer.iter_lines()]
    assert events[-1]["type"] == "result", events[-1]
    return dict(events[-1]["model"])


def ask(node: DaemonProcess, model: str) -> str:
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    answer = node.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_three_nodes_pull_a_third_each_and_answer(
    tmp_path: Path, web_server: FaultyServer, model_file: Path
) -> None:
    web_server.files["/stranger.gguf"] = model_file.read_bytes()
    source = web_server.url + "/stranger.gguf"
    manifest = build_manifest(model_file)
    header_bytes = min(tensor.offset for tensor in manifest.tensors)

    def allowed_bytes(layers: str) -> int:
        needed = needed_tensors(manifest, LayerRange.parse(layers))
        slack = max(HEADER_STEP_BYTES, header_bytes // 4)
        return header_bytes + slack + sum(tensor.size_bytes for tensor in needed)

    with running_daemon(tmp_path, "b", load=[], inference=INFERENCE) as b:
        with running_daemon(tmp_path, "a", load=[], inference=INFERENCE, bootstrap=b.addresses) as a:
            assert pull(a, source, "0:4")["waits_for"] == "the hashes of layers 4:12, head"
            assert web_server.n_bytes <= allowed_bytes("0:4") < manifest.size_bytes
            listed = a.http.get("/api/admin/models").json()["models"]
            assert [model["name"] for model in listed] == ["guide", NAME]
            assert NAME not in a.http.get("/v1/models").text
            removed = a.http.delete(f"/api/admin/models/{NAME}").json()
            assert (removed["name"], removed["stored"]) == (NAME, True)
            assert a.http.get(f"/api/admin/models/{NAME}/status").status_code == 404
            assert not list((a.data_dir / "downloads").iterdir())
            pull(a, source, "0:4")
            a.process.kill()
            a.process.wait()
            # It was left behind, and names an address where nobody is.
            (a.data_dir / "daemon.json").unlink()
        with (
            running_daemon(tmp_path, "c", load=[], inference=INFERENCE, bootstrap=b.addresses) as c,
            running_daemon(tmp_path, "a", load=[], inference=INFERENCE, bootstrap=b.addresses) as a,
        ):
            waiting = status(a)
            assert (waiting["model_id"], waiting["loaded"], waiting["complete"]) == ("", [], False)
            assert waiting["waiting"]["layers"] == ["0:4"]
            refused = a.http.post(f"/api/admin/models/{NAME}/load", json={"layers": "0:4"})
            assert refused.status_code == 409
            assert "it waits for the hashes of layers 4:12, head" in refused.json()["error"]["message"]
            before = web_server.n_bytes
            pull(c, source, "8:12")
            assert web_server.n_bytes - before <= allowed_bytes("8:12")
            before = web_server.n_bytes
            pull(b, source, "4:8")
            assert web_server.n_bytes - before <= allowed_bytes("4:8")
            web_server.files.clear()

            nodes = {"0:4": a, "4:8": b, "8:12": c}
            for layers, node in nodes.items():
                wait_for(lambda node=node: status(node)["model_id"], DEADLINE_S, "the node to know the model")
                assert status(node)["model_id"] == manifest.model_id
                assert load(node, NAME, layers)["loaded"] == [layers]
            load(a, "guide", "0:12")
            uncut = ask(a, "guide")
            assert uncut
            for node in nodes.values():
                wait_for(
                    lambda node=node: status(node)["complete"], DEADLINE_S, "every node to know the holders"
                )
                assert ask(node, NAME) == uncut
            assert [node.stop() for node in (a, c)] == [0, 0]
