"""A file of a 70B model's size, all holes: what is decided by its header takes neither memory nor disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.common.quantised_models import SEVENTY_BILLION, write_model
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.memory import available_bytes
from swarmllm_workers.engine.segment_file import plan_part
from swarmllm_workers.errors import CallError

GIB = 2**30
FILE_BYTES = 41 * 10**9
"""About; in Q4_K_M."""
SETTINGS = EngineSettings(n_ctx=512, n_slots=1, n_threads=1, max_bytes=16 * GIB)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_model(SEVENTY_BILLION, tmp_path_factory.mktemp("70b"), n_parts=4, is_sparse=True)


@pytest.fixture
def engine(paths: list[Path], tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(paths[0], tmp_path / "segments", SETTINGS)
    yield engine
    engine.close()


def blocks_bytes(paths: list[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


def test_a_part_of_it_is_planned_from_the_headers(engine: Engine, paths: list[Path]) -> None:
    size_bytes = sum(path.stat().st_size for path in paths)
    assert FILE_BYTES < size_bytes < 1.05 * FILE_BYTES
    assert blocks_bytes(paths) < 16 * 2**20
    assert engine.architecture is not None
    part = plan_part(engine.source, engine.architecture, 38, 42)
    # Two files have these layers, the last one the norm that goes with each part.
    assert len({place.path for place in part.places.values()}) == 3
    assert sum(place.size_bytes for place in part.places.values()) == pytest.approx(size_bytes / 20, rel=0.1)
    assert len(part.header) < 2**20


def test_layers_that_do_not_fit_are_refused_before_anything_is_read(
    engine: Engine, paths: list[Path], tmp_path: Path
) -> None:
    before = available_bytes()
    with pytest.raises(CallError) as caught:
        engine.layers.load(0, 80)
    assert caught.value.kind == "out_of_memory"
    assert "layers 0:80" in caught.value.message
    assert "load fewer layers" in caught.value.message
    assert engine.layers.ranges == ()
    assert list((tmp_path / "segments").iterdir()) == []
    assert blocks_bytes(paths) < 16 * 2**20
    assert available_bytes() > before - 4 * GIB


def test_two_layers_take_their_kv_and_nothing_of_the_disk(
    engine: Engine, paths: list[Path], tmp_path: Path
) -> None:
    engine.layers.load(40, 42)
    memory = engine.memory
    assert 0.8 * GIB < memory.weights_bytes < 1.2 * GIB
    # f16 keys and values of 8 heads of 128 numbers.
    assert memory.kv_bytes == 2 * 2 * 512 * 8 * 128 * 2
    assert memory.mapped_bytes == pytest.approx(memory.weights_bytes, rel=0.02)
    assert list((tmp_path / "segments").iterdir()) == []
    assert blocks_bytes(paths) < 16 * 2**20


def test_a_file_that_ends_early_is_refused_by_its_header(tmp_path: Path) -> None:
    (path,) = write_model(replace(SEVENTY_BILLION, n_layers=8), tmp_path, is_sparse=True)
    os.truncate(path, path.stat().st_size - 2**30)
    with pytest.raises(CallError) as caught:
        Engine(path, tmp_path / "segments", SETTINGS)
    assert caught.value.kind == "bad_model"
