"""Administration over HTTP, on a node whose pool only remembers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from api_fakes import Stand, open_node, serve_node
from deadlines import DEADLINE_S
from node_ids import NODE_A, NODE_B

from swarmllm.config import ApiTable, Config, ModelTable
from swarmllm.errors import ConfigError, ModelNotFound, WorkerError
from swarmllm.guide import DRAFT_PATH, GUIDE_PATH
from swarmllm.models import LayerRange
from swarmllm_proto.codec import decode_record

MODELS = "/api/admin/models"


def lines(text: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in text.splitlines()]


async def load(stand: Stand, layers: str | None = None) -> list[dict[str, Any]]:
    answer = await stand.http.post(f"{MODELS}/guide/load", json={"layers": layers})
    assert answer.status_code == 200
    return lines(answer.text)


async def test_loading_shows_progress_and_then_the_model(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        progress, result = await load(stand, "0:4")
    assert progress == {"type": "progress", "done_bytes": 50, "total_bytes": 100, "phase": "loading"}
    assert result["type"] == "result"
    model = result["model"]
    assert (model["loaded"], model["missing"], model["complete"]) == (["0:4"], ["4:12"], False)
    assert [(holder["layers"], holder["is_self"]) for holder in model["holders"]] == [(["0:4"], True)]


async def test_without_layers_the_whole_model_is_loaded_and_unloaded(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        *_, result = await load(stand)
        status = (await stand.http.get(f"{MODELS}/guide/status")).json()
        unloaded = (await stand.http.post(f"{MODELS}/guide/unload", json={})).json()
    assert result["model"] == status
    assert (status["loaded"], status["missing"], status["complete"]) == (["0:12"], [], True)
    assert (unloaded["loaded"], unloaded["holders"]) == ([], [])


async def test_a_load_takes_settings_of_its_own_and_shows_them(tmp_path: Path) -> None:
    chosen = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0, "kv_type": "q8_0", "flash_attention": "on"}
    chosen |= {"use_mmap": False, "use_mlock": True}
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(f"{MODELS}/guide/load", json=chosen)
        assert lines(answer.text)[-1]["model"]["settings"] == chosen
        shown = (await stand.http.get(f"{MODELS}/guide/status")).json()
        props = (await stand.http.get("/props?model=guide")).json()
        for field, value in {"n_ctx": 8, "kv_type": "q4", "n_threads": 0, "use_mmap": "no", "ctx": 1}.items():
            wrong = await stand.http.post(f"{MODELS}/guide/load", json={field: value})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, field)
    assert shown["settings"] == chosen
    assert props["default_generation_settings"]["n_ctx"] == 512


async def test_an_unload_tells_its_progress_where_that_is_wanted(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await load(stand)
        answer = await stand.http.post(f"{MODELS}/guide/unload", json={"layers": "0:4", "progress": True})
    progress, result = lines(answer.text)
    assert progress == {"type": "progress", "done_bytes": 70, "total_bytes": 70}
    assert result["model"]["loaded"] == ["4:12"]


async def test_the_swarm_is_told_what_is_held(tmp_path: Path) -> None:
    async with open_node(tmp_path) as stand:
        entry, layers = await stand.node.models.resolve("guide", "4:8")
        await stand.node.models.load(entry, layers, lambda done, total: None, lambda done, total: None)
        record = decode_record(stand.router.records()[NODE_A])
        assert [(model.name, model.n_layers, model.ranges) for model in record.models] == [
            ("guide", 12, ((4, 8),))
        ]
        assert [(files.name, files.layers, files.embedding, files.head) for files in record.files] == [
            ("guide", ((0, 12),), True, True)
        ]
        await stand.node.publish()
        assert decode_record(stand.router.records()[NODE_A]) == record, "nothing new, nothing said"
        stand.pool.held.clear()
        stand.node.holdings_changed()
        with trio.fail_after(DEADLINE_S):
            while decode_record(stand.router.records()[NODE_A]).models:
                await trio.lowlevel.checkpoint()


async def test_verifying_names_what_is_damaged(tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(DRAFT_PATH.read_bytes())
    async with serve_node(tmp_path) as stand:
        await stand.http.post(MODELS, json={"path": str(copy), "name": "copy"})
        intact = lines((await stand.http.post(f"{MODELS}/copy/verify", json={})).text)
        status = (await stand.http.get(f"{MODELS}/copy/status")).json()
        with copy.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
        os.utime(copy, ns=(0, stand.catalogue.get("copy").state.mtime_ns))
        damaged = lines((await stand.http.post(f"{MODELS}/copy/verify", json={})).text)
        missing = await stand.http.post(f"{MODELS}/nothing/verify", json={})
    assert intact[-1] == {"type": "result", "model": status, "damaged": []}
    assert intact[-2]["done_bytes"] == intact[-2]["total_bytes"]
    assert len(damaged[-1]["damaged"]) == 1
    assert missing.status_code == 404


async def test_a_file_of_ones_own_cannot_be_pinned(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(f"{MODELS}/guide/pin", json={})
    assert answer.status_code == 409
    assert "never removed" in answer.json()["error"]["message"]


async def test_a_model_is_removed_unless_it_is_loaded_and_its_own_file_stays(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await load(stand, "0:4")
        model_id = stand.catalogue.get("guide").model_id
        refused = await stand.http.delete(f"{MODELS}/guide")
        assert stand.pool.forgotten == []
        await stand.http.post(f"{MODELS}/guide/unload", json={})
        removed = await stand.http.delete(f"{MODELS}/guide")
        gone = await stand.http.delete(f"{MODELS}/guide")
        record = decode_record(stand.router.records()[NODE_A])
    assert (refused.status_code, removed.status_code, gone.status_code) == (409, 200, 404)
    assert "swarmllm models unload guide" in refused.json()["error"]["message"]
    assert removed.json()["stored"] is False
    assert removed.json()["path"] == str(GUIDE_PATH)
    assert record.files == ()
    assert stand.pool.forgotten == [model_id]


@pytest.mark.parametrize(
    ("layers", "status", "field"),
    [("4", 400, "layers"), ("4:2", 400, "layers"), ("0:13", 400, "layers"), ("x" * 50, 400, "layers")],
)
async def test_layers_that_cannot_be_are_refused_before_anything_happens(
    tmp_path: Path, layers: str, status: int, field: str
) -> None:
    async with serve_node(tmp_path) as stand:
        for act in ("load", "unload"):
            answer = await stand.http.post(f"{MODELS}/guide/{act}", json={"layers": layers})
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)


async def test_a_load_that_fails_ends_with_an_error_line(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pool.failure = WorkerError("out of memory")
        *_, last = await load(stand)
    assert last["type"] == "error"
    assert last["error"]["message"] == "out of memory"


async def test_adding_a_model_hashes_it_and_lists_it(tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    shutil.copy(DRAFT_PATH, path)
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(MODELS, json={"path": str(path), "name": "small"})
        listed = (await stand.http.get(MODELS)).json()["models"]
    *progress, result = lines(answer.text)
    assert all(line["type"] == "progress" and line["done_bytes"] <= line["total_bytes"] for line in progress)
    assert (result["model"]["name"], result["model"]["path"]) == ("small", str(path))
    assert [model["name"] for model in listed] == ["guide", "small"]


async def test_the_list_of_models_says_what_copies_of_layers_take(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        folder = stand.node.config.data_dir / "segments"
        folder.mkdir(exist_ok=True)
        (folder / "x.gguf").write_bytes(bytes(8192))
        copies = (await stand.http.get(MODELS)).json()["copies"]
    assert copies == {"n_files": 1, "n_bytes": 8192, "quota_bytes": 64 * 2**30}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"path": "guide.gguf"}, 400, "path"),
        ({}, 400, "path"),
        ({"path": "/x", "nam": "y"}, 400, "nam"),
    ],
)
async def test_adding_needs_an_absolute_path(
    tmp_path: Path, body: dict[str, str], status: int, field: str
) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(MODELS, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)


async def test_a_file_that_is_no_model_ends_with_an_error_line(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(MODELS, json={"path": str(path)})
    assert lines(answer.text)[-1]["error"]["code"] == "bad_model"


async def test_stats_peers_and_configuration(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await load(stand, "0:4")
        stats = (await stand.http.get("/api/admin/stats")).json()
        peers = (await stand.http.get("/api/admin/peers")).json()
        config = (await stand.http.get("/api/admin/config")).json()
    assert stats["node_id"] == NODE_A
    assert stats["ready"] is True
    assert stats["requests"]["active"] == 0
    assert [(model["name"], model["layers"]) for model in stats["models"]] == [("guide", ["0:4"])]
    assert peers == {"peers": [], "left": []}
    assert config["config"]["api"]["max_body_bytes"] == 65536


async def test_a_peer_is_explained_by_id_end_of_id_or_nickname(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.tell_of_peer("node-b", "other", 4, ((0, 4),))
        by_id, by_end, by_name = [
            (await stand.http.get(f"/api/admin/peers/{name}")).json()
            for name in (NODE_B, NODE_B[-9:], "node-b's name")
        ]
        nobody = await stand.http.get("/api/admin/peers/nobody")
    assert by_id["trust"]["score"] == by_id["connected"]["trust"] == 0.5
    assert by_id["trust"]["may_work"] is True
    assert by_end["node_id"] == by_name["node_id"] == NODE_B
    assert (nobody.status_code, nobody.json()["error"]["param"]) == (400, "peer")


async def test_unknown_models_are_a_404(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        answers = [
            await stand.http.get(f"{MODELS}/gide/status"),
            await stand.http.post(f"{MODELS}/gide/load", json={}),
            await stand.http.post(f"{MODELS}/gide/unload", json={}),
        ]
    assert {answer.status_code for answer in answers} == {404}
    assert all("guide" in answer.json()["error"]["message"] for answer in answers)


async def test_a_model_that_only_a_peer_holds_is_shown_as_such(tmp_path: Path) -> None:
    async with open_node(tmp_path) as stand:
        await stand.tell_of_peer("node-b", "other", n_layers=8, ranges=((0, 4), (4, 8)))
        view = await stand.node.models.get("other")
        assert view.entry is None
        assert view.complete
        assert [(holder.nickname, holder.layers) for holder in view.holders] == [
            ("node-b's name", (LayerRange(0, 8),))
        ]
        assert [view.name for view in await stand.node.models.list()] == ["guide", "other"]
        with pytest.raises(ModelNotFound):
            await stand.node.models.resolve("other", None)


async def test_what_the_configuration_names_is_loaded_at_start(tmp_path: Path) -> None:
    config = Config(model=ModelTable(load=("guide:0:4", "guide:8:12")))
    async with open_node(tmp_path, config=config) as stand:
        (held,) = stand.pool.models().values()
        assert held == (LayerRange(0, 4), LayerRange(8, 12))
        assert stand.node.readiness().status == "ready"


@pytest.mark.parametrize("entry", ["gide", "guide:0:99", "guide:4", "guide:"])
async def test_a_start_that_cannot_be_meant_fails_with_the_reason(tmp_path: Path, entry: str) -> None:
    refused = pytest.RaisesExc(ConfigError, check=lambda error: error.field == "model.load")
    with pytest.RaisesGroup(refused, allow_unwrapped=True, flatten_subgroups=True):
        async with open_node(tmp_path, config=Config(model=ModelTable(load=(entry,)))):
            pass


async def test_readiness_tells_a_load_that_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(model=ModelTable(load=("guide",)))
    async with open_node(tmp_path, config=config, pool_failure=WorkerError("no memory")) as stand:
        readiness = stand.node.readiness()
    assert readiness.status == "failed"
    assert "no memory" in readiness.reason
    assert "no memory" in caplog.text


async def test_health_and_readiness_over_http(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        alive = await stand.http.get("/health")
        ready = await stand.http.get("/health/ready")
    assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")


async def test_readiness_names_each_model_and_what_it_lacks(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.http.post(f"{MODELS}/guide/load", json={"layers": "0:8"})
        node = await stand.http.get("/health/ready")
        lacking = await stand.http.get("/health/ready", params={"model": "guide"})
        unknown = await stand.http.get("/health/ready", params={"model": "gude"})
        await stand.http.post(f"{MODELS}/guide/load", json={"layers": "8:12"})
        whole = await stand.http.get("/health/ready", params={"model": "guide"})
        stand.node.admission.close()
        stopping = await stand.http.get("/health/ready", params={"model": "guide"})
    lacks = {"name": "guide", "complete": False, "missing_layers": ["8:12"]}
    assert (node.status_code, node.json()["models"]) == (200, [lacks])
    assert (lacking.status_code, lacking.json()["model"]) == (503, lacks)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    has_all = {"name": "guide", "complete": True, "missing_layers": []}
    assert (whole.status_code, whole.json()["model"]) == (200, has_all)
    assert (stopping.status_code, stopping.json()["status"]) == (503, "stopping")


async def test_a_model_is_ready_where_another_one_could_not_be_loaded(tmp_path: Path) -> None:
    config = Config(api=ApiTable(port=0), model=ModelTable(load=("guide:0:4",)))
    async with serve_node(tmp_path, config=config, pool_failure=WorkerError("no memory")) as stand:
        stand.pool.failure = None
        await stand.http.post(f"{MODELS}/guide/load", json={})
        assert (await stand.http.get("/health/ready")).json()["status"] == "failed"
        assert (await stand.http.get("/health/ready", params={"model": "guide"})).status_code == 200
