"""Workers of several models share one memory: each is told what the others have mapped."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool_parts import MODEL, OTHER_MODEL, fake_pool

from swarmllm.models.layers import LayerRange


async def test_a_worker_is_told_what_the_others_have_mapped(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        await pool.load(MODEL, LayerRange(0, 4))
        assert pool.memory(MODEL.model_id).work_bytes == 0, "nobody is beside it"
        await pool.load(OTHER_MODEL, LayerRange(0, 2))
        assert pool.memory(OTHER_MODEL.model_id).work_bytes == 4000
        await pool.load(MODEL, LayerRange(4, 8))
        assert pool.memory(MODEL.model_id).work_bytes == 2000, "its own weights it knows itself"
        await pool.unload(MODEL.model_id)
        await pool.load(OTHER_MODEL, LayerRange(2, 3))
        assert pool.memory(OTHER_MODEL.model_id).work_bytes == 0


async def test_mapped_weights_are_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmllm.workerpool.layers.memory_bytes", lambda: (100_000, 10_000))
    async with fake_pool(tmp_path) as pool:
        assert pool.free_bytes() == 10_000
        await pool.load(MODEL, LayerRange(0, 4))
        assert pool.free_bytes() == 6000
        await pool.load(OTHER_MODEL, LayerRange(0, 8))
        assert pool.free_bytes() == 0
        # Not every system says what is available.
        monkeypatch.setattr("swarmllm.workerpool.layers.memory_bytes", lambda: (100_000, 0))
        assert pool.free_bytes() is None
