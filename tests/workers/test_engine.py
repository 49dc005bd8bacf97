"""Ranges, segments and slots of one engine, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.gpus import RESERVE_BYTES, Gpu, gpus, n_layers_that_fit
from swarmllm_workers.engine.memory import estimate, predict
from swarmllm_workers.engine.ranges import merge, subtract
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.engine.slots import Slots
from swarmllm_workers.errors import CallError

from .blueprint import write
from .conftest import MakeModel
from .families import FAMILIES

TOKENS = np.arange(65, 75, dtype=np.int32)
ROWS = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)

OpenEngine = Callable[..., Engine]


@pytest.fixture
def open_engine(make_model: MakeModel, tmp_path: Path) -> Iterator[OpenEngine]:
    engines: list[Engine] = []

    def open_(name: str = "llama", **settings: int) -> Engine:
        chosen = replace(EngineSettings(n_ctx=64, n_slots=2, n_threads=1), **settings)  # type: ignore[arg-type]
        engines.append(Engine(make_model(name), tmp_path / "segments", chosen))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


def bounds(engine: Engine) -> list[tuple[int, int]]:
    return sorted((segment.start, segment.end) for segment in engine.layers.segments)


def run(engine: Engine, request: str, start: int, end: int, position: int, data: np.ndarray) -> np.ndarray:
    route = engine.route(request, start, end)
    return engine.run(route, [Span(engine.take_slot(request), position, data, "logits")])[0].copy()


def test_ranges_merge_and_load_only_what_is_missing(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.layers.load(1, 2)
    engine.layers.load(0, 3)
    assert engine.layers.ranges == ((0, 3),)
    assert bounds(engine) == [(0, 1), (1, 2), (2, 3)]
    engine.layers.load(0, 3)
    assert len(engine.layers.segments) == 3


def test_whole_model_is_the_original_file(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine()
    engine.layers.load(0, 4)
    assert bounds(engine) == [(0, 4)]
    assert list((tmp_path / "segments").iterdir()) == []


def test_an_engine_says_which_matrices_it_uses(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.layers.load(1, 3)

    def used() -> set[str]:
        return {name for name in engine.source.tensors if engine.layers.uses(name)}

    layers = {name for name in engine.source.tensors if name.startswith(("blk.1.", "blk.2."))}
    assert used() == layers
    engine.layers.load(3, 4)
    assert used() == {name for name in engine.source.tensors if not name.startswith("blk.0.")}


def test_part_of_an_idle_segment_runs_after_cutting_it(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.layers.load(0, 4)
    expected = run(engine, "whole", 0, 4, 0, TOKENS)
    engine.release("whole")
    hidden = run(engine, "part", 0, 1, 0, TOKENS)
    assert bounds(engine) == [(0, 1), (1, 4)]
    np.testing.assert_array_equal(run(engine, "part", 1, 4, 0, hidden), expected)
    assert engine.layers.ranges == ((0, 4),)


def test_request_in_a_segment_that_is_cut_for_another_keeps_its_rows(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.layers.load(0, 4)
    first = run(engine, "old", 0, 4, 0, TOKENS)
    run(engine, "new", 1, 3, 0, ROWS)
    second = run(engine, "old", 0, 4, len(TOKENS), TOKENS[:1])
    kv_bytes = engine.memory.kv_bytes
    engine.release("old")
    assert engine.memory.kv_bytes == pytest.approx(kv_bytes / 2, rel=0.01), "the old segment stayed loaded"
    engine.release("new")
    np.testing.assert_array_equal(run(engine, "again", 0, 4, 0, TOKENS), first)
    np.testing.assert_array_equal(run(engine, "again", 0, 4, len(TOKENS), TOKENS[:1]), second)


def test_a_cut_for_a_request_keeps_within_what_is_allowed(open_engine: OpenEngine) -> None:
    probe = open_engine()
    whole = predict(probe.source, probe.n_layers, [(0, probe.n_layers)], probe.settings).total_bytes
    parts = predict(probe.source, probe.n_layers, [(0, 1), (1, probe.n_layers)], probe.settings).total_bytes
    engine = open_engine(max_bytes=max(whole, parts) + 1024)
    engine.layers.load(0, 4)
    first = run(engine, "old", 0, 4, 0, TOKENS)
    with pytest.raises(CallError, match="are allowed") as caught:
        run(engine, "new", 0, 1, 0, TOKENS)
    assert caught.value.kind == "out_of_memory"
    assert engine.memory.total_bytes <= engine.settings.max_bytes
    assert bounds(engine) == [(0, 4)], "a cut that was refused has changed something"
    engine.release("new")
    engine.release("old")
    run(engine, "new", 0, 1, 0, TOKENS)  # now the old segment can go
    assert bounds(engine) == [(0, 1), (1, 4)]
    assert engine.memory.total_bytes <= engine.settings.max_bytes
    engine.release("new")
    np.testing.assert_array_equal(run(engine, "again", 0, 4, 0, TOKENS), first)


def test_a_cut_for_which_the_machine_has_no_room_is_refused(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    engine.layers.load(0, 4)
    run(engine, "old", 0, 4, 0, TOKENS)
    monkeypatch.setattr("swarmllm_workers.engine.memory.available_bytes", lambda: 1000)
    with pytest.raises(CallError, match="are available"):
        run(engine, "new", 0, 1, 0, TOKENS)
    run(engine, "old", 0, 4, len(TOKENS), TOKENS[:1])


def test_what_goes_to_a_gpu_is_held_against_its_memory_too(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmllm_workers.engine.memory.available_bytes", lambda: 1000)
    monkeypatch.setattr("swarmllm_workers.engine.memory.gpus.gpus", lambda: (card(2**34),))
    with pytest.raises(CallError, match="are available:"):
        open_engine().layers.load(0, 4)
    open_engine(n_gpu_layers=99).layers.load(0, 4)
    monkeypatch.setattr("swarmllm_workers.engine.memory.gpus.gpus", lambda: (card(RESERVE_BYTES + 1000),))
    with pytest.raises(CallError, match="on this machine and its GPUs together"):
        open_engine(n_gpu_layers=99).layers.load(0, 4)


def card(free_bytes: int, *, has_own_memory: bool = True) -> Gpu:
    return Gpu("GPU0", "a card", 2**35, free_bytes, has_own_memory)


def test_a_libllama_without_a_gpu_sees_none() -> None:
    assert bool(gpus()) is bool(llama_cpp.llama_supports_gpu_offload())


@pytest.mark.parametrize(
    ("room_bytes", "expected"),
    [
        (0, 0),
        (10 + 5, 0),
        (10 + 5 + 3, 2),
        (10 + 5 + 3 + 2 - 1, 2),
        (10 + 5 + 3 + 2, 3),
        (10 + 5 + 3 + 2 + 1, 4),
        (1000, 4),
    ],
)
def test_the_last_layers_go_to_a_gpu_as_far_as_they_fit(room_bytes: int, expected: int) -> None:
    assert n_layers_that_fit([1, 2, 3], head_bytes=5, work_bytes=10, room_bytes=room_bytes) == expected


def test_how_many_layers_go_to_gpus_follows_from_what_they_have_free(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(*cards: Gpu) -> list[int]:
        monkeypatch.setattr("swarmllm_workers.engine.memory.gpus.gpus", lambda: cards)
        engine = open_engine(n_gpu_layers="auto")
        engine.layers.load(0, 4)
        return [segment.n_gpu_layers for segment in engine.layers.segments]

    engine = open_engine()
    whole = estimate(engine.source, 4, [(0, 4)], engine.settings).total_bytes
    by_room = [chosen(card(RESERVE_BYTES + whole * n // 16))[0] for n in range(17)]
    assert by_room == sorted(by_room)
    assert by_room[0] == 0
    assert by_room[-1] == 5
    assert len(set(by_room)) > 2
    assert chosen() == [0]
    assert chosen(card(2**34)) == [5]
    assert chosen(card(2**34, has_own_memory=False)) == [0]
    assert chosen(card(RESERVE_BYTES)) == [0]


def test_unloading_a_part_cuts_what_remains(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.layers.load(0, 4)
    run(engine, "r", 0, 4, 0, TOKENS)
    engine.layers.unload(1, 2)
    assert engine.layers.ranges == ((0, 1), (2, 4))
    assert bounds(engine) == [(0, 1), (2, 4)]
    with pytest.raises(CallError, match="1:2") as caught:
        run(engine, "r", 0, 4, len(TOKENS), TOKENS[:1])
    assert caught.value.kind == "not_loaded"
    run(engine, "r", 2, 4, 0, ROWS)


def test_route_of_a_running_request_breaks_with_a_reason(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.layers.load(0, 4)
    route = engine.route("r", 0, 4)
    span = Span(engine.take_slot("r"), 0, TOKENS, "logits")
    engine.run(route, [span])
    engine.layers.unload(0, 1)
    with pytest.raises(CallError, match="unloaded while") as caught:
        engine.run(route, [span])
    assert caught.value.kind == "not_loaded"


@pytest.mark.usefixtures("segment_files")
def test_what_could_not_be_cut_anew_is_loaded_at_its_next_use(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine()
    engine.layers.load(0, 4)
    (tmp_path / "segments").rename(tmp_path / "elsewhere")
    with pytest.raises(CallError) as caught:
        engine.layers.unload(1, 2)
    assert caught.value.kind == "out_of_memory"
    assert engine.layers.ranges == ((0, 1), (2, 4))
    assert bounds(engine) == []
    (tmp_path / "elsewhere").rename(tmp_path / "segments")
    run(engine, "r", 3, 4, 0, ROWS)
    assert bounds(engine) == [(0, 1), (2, 3), (3, 4)]


@pytest.mark.usefixtures("segment_files")
def test_failed_load_leaves_what_was_held(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine()
    engine.layers.load(0, 1)
    (tmp_path / "segments").rename(tmp_path / "elsewhere")
    with pytest.raises(CallError) as caught:
        engine.layers.load(0, 4)
    assert caught.value.kind == "out_of_memory"
    assert engine.layers.ranges == ((0, 1),)
    run(engine, "r", 0, 1, 0, TOKENS)


def test_rows_count_in_every_segment_a_request_uses(open_engine: OpenEngine) -> None:
    """One request with two stages here, as when its origin holds both ends of the pipeline."""
    engine = open_engine()
    engine.layers.load(0, 1)
    engine.layers.load(3, 4)
    run(engine, "r", 0, 1, 0, TOKENS)
    run(engine, "r", 3, 4, 0, ROWS)
    assert [segment.n_rows for segment in engine.layers.segments] == [len(TOKENS), len(ROWS)]
    engine.release("r")
    assert [segment.n_rows for segment in engine.layers.segments] == [0, 0]


def test_refused_batch_changes_nothing(open_engine: OpenEngine) -> None:
    engine = open_engine(n_ctx=16)
    engine.layers.load(0, 2)
    engine.layers.load(2, 4)
    run(engine, "a", 0, 4, 0, TOKENS)
    before = run(engine, "a", 0, 4, len(TOKENS), TOKENS[:1])
    with pytest.raises(CallError) as caught:
        run(engine, "b", 0, 4, 0, TOKENS)
    assert caught.value.kind == "context_full"
    assert [segment.n_rows for segment in engine.layers.segments] == [11, 11]
    np.testing.assert_array_equal(run(engine, "a", 0, 4, len(TOKENS), TOKENS[:1]), before)


def test_model_that_runs_whole_takes_token_ids_only(tmp_path: Path) -> None:
    """One layer attends and two are recurrent: no cut leaves both kinds on both sides."""
    family = FAMILIES["lfm2"]
    family = replace(family, keys={**family.keys, "attention.head_count_kv": [0, 0, 2]}, n_layers=3)
    engine = Engine(
        write(tmp_path / "m.gguf", family), tmp_path, EngineSettings(n_ctx=64, n_slots=2, n_threads=1)
    )
    assert engine.rule.cut_alignment == 0
    with pytest.raises(CallError, match="whole") as caught:
        engine.layers.load(0, 2)
    assert caught.value.kind == "cannot_cut"
    engine.layers.load(0, 3)
    assert np.isfinite(run(engine, "r", 0, 3, 0, TOKENS)).all()
    with pytest.raises(CallError, match="token ids only"):
        run(engine, "rows", 0, 3, 0, np.zeros((2, 64), np.float32))
    engine.close()


def test_slots_are_reused_smallest_first() -> None:
    slots = Slots(3)
    assert [slots.take(name) for name in "abc"] == [0, 1, 2]
    assert slots.take("b") == 1
    slots.release("b")
    slots.release("a")
    assert slots.release("unknown") is None
    assert slots.take("d") == 0
    assert len(slots) == 2


ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=8,
)


def layers(pieces: list[tuple[int, int]]) -> set[int]:
    return {layer for start, end in pieces for layer in range(start, end)}


@given(ranges, ranges)
def test_range_arithmetic_is_set_arithmetic(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    assert layers(merge(left)) == layers(left)
    assert layers(subtract(left, right)) == layers(left) - layers(right)
    merged = merge(left)
    assert all(a_end < b_start for (_, a_end), (b_start, _) in pairwise(merged))
