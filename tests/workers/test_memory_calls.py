"""What stands before libllama's calls for memory: cells are zero without having been written, and get their
memory when the layers are ready."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from swarmllm.guide import GUIDE_PATH
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.operation import complete
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.kernels import interposing, memory_calls

from .process_memory import private_bytes

pytestmark = pytest.mark.skipif(
    interposing.find_library("memory_calls") is None, reason="not built here: memory_calls"
)
SETTINGS = EngineSettings(n_ctx=2**15, n_slots=2)
MIB = 2**20


def test_cells_take_their_memory_after_the_load_and_not_during_it(tmp_path: Path) -> None:
    engine = Engine(GUIDE_PATH, tmp_path / "segments", SETTINGS)
    before = private_bytes()
    engine.layers.load(0, 4)
    kv_bytes = engine.memory.kv_bytes
    assert kv_bytes >= 32 * MIB
    assert private_bytes() - before < kv_bytes / 4
    complete(engine.layers.filling())
    assert private_bytes() - before >= kv_bytes
    engine.close()


def test_those_of_an_exact_request_are_its_own_when_it_begins(tmp_path: Path) -> None:
    engine = Engine(GUIDE_PATH, tmp_path / "segments", EngineSettings(n_ctx=2**15, n_slots=2))
    engine.layers.load(0, 4)
    engine.set_apart("exact", 2**15)
    before = private_bytes()
    engine.route("exact", 0, 4)
    assert private_bytes() - before >= engine.apart.memory.kv_bytes
    engine.close()


def test_cells_that_were_used_are_zero_when_they_are_cleared(tmp_path: Path) -> None:
    """Plain attention multiplies with cells that are masked: what is not zero there may be no number."""
    engine = Engine(GUIDE_PATH, tmp_path / "segments", EngineSettings(n_ctx=4096, n_slots=2))
    engine.layers.load(0, 12)
    (segment,) = engine.layers.segments
    regions = list(segment._context._to_fill)
    for address, size in regions:
        ctypes.memset(address, 0xFF, size)
    lib.llama_memory_clear(segment._context._memory, True)
    for address, size in regions:
        assert not np.frombuffer(ctypes.string_at(address, size), np.uint8).any()
    rows = np.arange(300, dtype=np.int32)
    (logits,) = engine.run(engine.route("r", 0, 12), [Span(0, 0, rows, "logits")])
    assert np.isfinite(logits).all()
    engine.close()


def test_what_was_cleared_is_told_once_and_to_who_had_it_cleared(tmp_path: Path) -> None:
    engine = Engine(GUIDE_PATH, tmp_path / "segments", SETTINGS)
    engine.layers.load(0, 2)
    assert memory_calls.cleared() == []
    (segment,) = engine.layers.segments
    told = segment._context._to_fill
    assert sum(size for _, size in told) == pytest.approx(engine.memory.kv_bytes, abs=2 * 4096)
    engine.close()
    assert segment._context._to_fill == []
