"""A node that starts again loads what its user had loaded by hand, and knows what else to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_fakes import Stand, open_node, serve_node

from swarmllm.config import Config, ModelTable
from swarmllm.errors import WorkerError
from swarmllm.guide import DRAFT_PATH
from swarmllm.models import LayerRange
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions

MODELS = "/api/admin/models"


async def load(stand: Stand, name: str = "guide", **body: object) -> None:
    answer = await stand.http.post(f"{MODELS}/{name}/load", json=body)
    assert '"result"' in answer.text, answer.text


def held(stand: Stand) -> dict[str, list[str]]:
    """By name."""
    return {
        stand.catalogue.get(id_).name: list(map(str, ranges)) for id_, ranges in stand.pool.models().items()
    }


async def test_what_was_loaded_by_hand_comes_back_with_its_options_until_it_is_unloaded(
    tmp_path: Path,
) -> None:
    async with serve_node(tmp_path) as stand:
        await load(stand, layers="0:4", n_ctx=512)
        await load(stand, layers="8:12")
    async with serve_node(tmp_path) as stand:
        assert held(stand) == {"guide": ["0:4", "8:12"]}
        assert list(stand.pool.options.values()) == [LoadOptions(n_ctx=512)]
        assert (await stand.http.get("/health/ready")).status_code == 200
        await stand.http.post(f"{MODELS}/guide/unload", json={"layers": "2:4"})
    async with serve_node(tmp_path) as stand:
        assert held(stand) == {"guide": ["0:2", "8:12"]}
        await stand.http.post(f"{MODELS}/guide/unload", json={"progress": True})
    async with open_node(tmp_path) as stand:
        assert not held(stand)


async def test_what_the_configuration_loaded_is_its_own_affair(tmp_path: Path) -> None:
    named = Config(model=ModelTable(load=("guide:0:4",)))
    async with open_node(tmp_path, config=named) as stand:
        assert held(stand) == {"guide": ["0:4"]}
        entry, layers = await stand.node.models.resolve("guide", "8:12")
        await stand.node.models.load(
            entry, layers, lambda done, total: None, lambda done, total: None, LoadOptions(n_threads=3)
        )
    async with open_node(tmp_path) as stand:
        assert held(stand) == {"guide": ["8:12"]}
        assert list(stand.pool.options.values()) == [LoadOptions(n_threads=3)]
    async with open_node(tmp_path, config=named) as stand:
        assert held(stand) == {"guide": ["0:4", "8:12"]}
        assert list(stand.pool.options.values()) == [AS_CONFIGURED], "its options are the configuration's"


async def test_restoring_can_be_switched_off_without_forgetting(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await load(stand)
    async with open_node(tmp_path, config=Config(model=ModelTable(restore=False))) as stand:
        assert not held(stand)
        assert stand.node.readiness().status == "ready"
    async with open_node(tmp_path) as stand:
        assert held(stand) == {"guide": ["0:12"]}


async def test_what_the_swarm_placed_here_is_not_remembered(tmp_path: Path) -> None:
    async with open_node(tmp_path) as stand:
        entry = await stand.node.models.find("guide")
        await stand.node.models.hold(entry, LayerRange(0, 4))
        assert held(stand) == {"guide": ["0:4"]}
    async with open_node(tmp_path) as stand:
        assert not held(stand)


async def test_a_model_whose_file_is_gone_is_named_until_it_is_back_or_not_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy.gguf"
    content = DRAFT_PATH.read_bytes()
    copy.write_bytes(content)
    async with serve_node(tmp_path) as stand:
        await stand.http.post(MODELS, json={"path": str(copy), "name": "copy"})
        await load(stand, "copy")
        await load(stand)
    copy.unlink()
    for _ in range(2):
        async with serve_node(tmp_path) as stand:
            assert held(stand) == {"guide": ["0:12"]}
            ready = await stand.http.get("/health/ready")
            stats = (await stand.http.get("/api/admin/stats")).json()
            assert (ready.status_code, ready.json()["status"]) == (503, "failed")
            assert stats["ready"] is False
            assert stats["reason"] == ready.json()["reason"]
            assert str(copy) in stats["reason"]
            assert "swarmllm models unload copy" in stats["reason"]
            assert str(copy) in caplog.text
    async with serve_node(tmp_path) as stand:
        assert (await stand.http.post(f"{MODELS}/copy/unload", json={})).json()["loaded"] == []
        assert (await stand.http.get("/health/ready")).status_code == 200
        assert (await stand.http.post(f"{MODELS}/copy/unload", json={})).status_code == 409
    async with open_node(tmp_path) as stand:
        assert stand.node.readiness().status == "ready"


async def test_a_removed_model_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(DRAFT_PATH.read_bytes())
    async with serve_node(tmp_path) as stand:
        await stand.http.post(MODELS, json={"path": str(copy), "name": "copy"})
        await load(stand, "copy")
    copy.rename(tmp_path / "aside.gguf")
    async with serve_node(tmp_path) as stand:
        assert stand.node.readiness().status == "failed"
        assert (await stand.http.delete(f"{MODELS}/copy")).status_code == 200
        assert stand.node.readiness().status == "ready"
    caplog.clear()
    async with open_node(tmp_path) as stand:
        assert stand.node.readiness().status == "ready"
    assert "copy" not in caplog.text


async def test_a_configured_model_that_fails_does_not_keep_others_from_being_loaded(tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(DRAFT_PATH.read_bytes())
    async with serve_node(tmp_path) as stand:
        await stand.http.post(MODELS, json={"path": str(copy), "name": "copy"})
        await load(stand, layers="8:12")
        model_id = stand.catalogue.get("copy").model_id
    named = Config(model=ModelTable(load=("guide:0:4", "copy", "guide:4:6")))
    no_memory = WorkerError("no memory for it")
    async with open_node(tmp_path, config=named, pool_failure=no_memory, refused_models=[model_id]) as stand:
        assert held(stand) == {"guide": ["0:6", "8:12"]}
        assert stand.node.readiness().status == "failed"
        assert "no memory for it" in stand.node.readiness().reason
