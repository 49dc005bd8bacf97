"""Rows that are freed while another request runs change none of its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmllm_workers.cache.prefixes import PrefixSettings
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings, exact_settings, unused_sequence_of
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.engine.unused_cells import N_CELLS_MIN, UnusedCells
from swarmllm_workers.errors import CallError

from .test_exactness import GUIDE

N_PROMPT, N_STEPS = 60, 24
OpenEngine = Callable[..., Engine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    engines: list[Engine] = []

    def open_(path: Path = GUIDE, **settings: Any) -> Engine:
        settings = {"n_ctx": 1024, "n_slots": 4, "flash_attention": "on"} | settings
        engine = Engine(path, tmp_path / "segments", EngineSettings(**settings))
        engine.layers.load(0, engine.n_layers)
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        engine.close()


def text(seed: int, n_tokens: int = N_PROMPT + N_STEPS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 250, n_tokens).astype(np.int32)


def run(engine: Engine, request_id: str, tokens: np.ndarray, position: int = 0) -> np.ndarray:
    """Logits of the last row."""
    route, slot = engine.route(request_id, 0, engine.n_layers), engine.take_slot(request_id)
    return engine.run(route, [Span(slot, position, tokens, "logits")])[0].copy()


def decode(engine: Engine, request_id: str, tokens: np.ndarray, start: int = N_PROMPT) -> list[np.ndarray]:
    return [run(engine, request_id, tokens[at : at + 1], at) for at in range(start, len(tokens))]


def alone(engine: Engine, tokens: np.ndarray) -> list[np.ndarray]:
    rows = [run(engine, "alone", tokens[:N_PROMPT]), *decode(engine, "alone", tokens)]
    engine.release("alone")
    return rows


def test_rows_of_an_ended_request_are_freed_beside_one_that_runs(open_engine: OpenEngine) -> None:
    engine, tokens = open_engine(), text(2)
    run(engine, "other", text(1, 61))
    rows = [run(engine, "this", tokens[:N_PROMPT])]
    engine.release("other")
    rows += decode(engine, "this", tokens)
    np.testing.assert_array_equal(rows, alone(open_engine(), tokens))


def test_refused_guesses_are_freed_beside_one_that_runs(open_engine: OpenEngine) -> None:
    engine, tokens = open_engine(), text(2)
    run(engine, "other", text(1, 70))
    rows = [run(engine, "this", tokens[:N_PROMPT])]
    run(engine, "other", text(3, 6), 61)
    rows += decode(engine, "this", tokens)
    np.testing.assert_array_equal(rows, alone(open_engine(), tokens))


def test_a_kept_prefix_is_dropped_beside_one_that_runs(open_engine: OpenEngine) -> None:
    prefixes = PrefixSettings(n_cells_entries=2, n_entries=2)
    engine, tokens = open_engine(prefixes=prefixes), text(2)
    run(engine, "other", text(1, 64))
    engine.keep("other", text(1, 64))
    engine.release("other")
    rows = [run(engine, "this", tokens[:N_PROMPT])]
    engine.prefixes.clear()
    rows += decode(engine, "this", tokens)
    np.testing.assert_array_equal(rows, alone(open_engine(prefixes=prefixes), tokens))


@pytest.mark.parametrize("seed", range(3))
def test_requests_come_and_end_in_any_order(open_engine: OpenEngine, seed: int) -> None:
    """Some of them leave their rows to those that begin alike, some forget rows that they compute again."""
    rng = np.random.default_rng(seed)
    engine = open_engine(prefixes=PrefixSettings(n_cells_entries=2, n_entries=2))
    by_itself = open_engine()
    running: dict[str, tuple[np.ndarray, int, list[np.ndarray]]] = {}
    for i in range(200):
        if len(running) < 3 and rng.random() < 0.3:
            tokens, n = text(1000 * seed + i), int(rng.integers(1, N_PROMPT))
            running[str(i)] = tokens, n, [run(engine, str(i), tokens[:n])]
        if not running:
            continue
        name = str(rng.choice(list(running)))
        tokens, n, rows = running[name]
        n_done = n + len(rows) - 1
        if rng.random() < 0.3:  # guesses that are all wrong
            run(engine, name, np.append(tokens[n_done], text(i, 4)), n_done)
        rows.append(run(engine, name, tokens[n_done : n_done + 1], n_done))
        if rng.random() < 0.2 or n_done + 1 == len(tokens):
            if rng.random() < 0.5:
                engine.keep(name, tokens[: n_done + 1])
            engine.release(name)
            del running[name]
            expected = [run(by_itself, "x", tokens[:n]), *decode(by_itself, "x", tokens[: n_done + 1], n)]
            by_itself.release("x")
            np.testing.assert_array_equal(rows, expected)


def test_cells_that_stay_taken_are_free_to_others(open_engine: OpenEngine) -> None:
    engine = open_engine(n_ctx=256)
    (segment,) = engine.route("runs", 0, engine.n_layers).segments
    run(engine, "ended", text(1, 150))
    run(engine, "runs", text(2, 60))
    engine.release("ended")
    assert segment.n_free == 256 - 60
    rows = run(engine, "new", text(3, 196))
    assert np.isfinite(rows).all()
    assert segment.n_free == 0
    with pytest.raises(CallError, match="257 rows in a context of 256"):
        run(engine, "runs", text(2, 61)[60:], 60)


def test_a_single_row_gets_the_last_cell_that_stayed_taken(open_engine: OpenEngine) -> None:
    engine = open_engine(n_ctx=256)
    run(engine, "ended", text(1, 196))
    run(engine, "runs", text(2, 60))
    engine.release("ended")
    (segment,) = engine.route("runs", 0, engine.n_layers).segments
    assert segment.can_step(engine.take_slot("runs"), 60)
    assert np.isfinite(segment.step(engine.take_slot("runs"), 60, text(2, 61)[60:], "logits")).all()


def test_rows_in_host_memory_come_back_where_cells_stayed_taken(open_engine: OpenEngine) -> None:
    """libllama wants as many free cells, and next to each other."""
    engine = open_engine(n_ctx=256)
    (segment,) = engine.route("ended", 0, engine.n_layers).segments
    run(engine, "ended", text(1, 100))
    run(engine, "runs", text(2, 60))
    state = bytes(segment.save(engine.take_slot("ended")))
    engine.release("ended")
    assert segment.restore(engine.take_slot("new"), state, 100)
    engine.release("new")
    assert segment.append_rows(engine.take_slot("newer"), state, 100)
    assert not segment.restore(engine.take_slot("newest"), b"no state", 100)


def test_cells_are_free_when_nobody_runs(open_engine: OpenEngine) -> None:
    engine = open_engine(prefixes=PrefixSettings(n_cells_entries=2, n_entries=2))
    (segment,) = engine.route("first", 0, engine.n_layers).segments
    run(engine, "first", text(1, 64))
    engine.keep("first", text(1, 64))
    engine.empty("first", 60)
    assert segment.n_taken == 64, "it is alone, and its rows are kept"
    run(engine, "second", text(2, 60))
    engine.release("first")
    engine.prefixes.clear()
    engine.empty("second", 50)
    assert (segment.n_taken, segment.n_free) == (64 + 50, 1024 - 50)
    run(engine, "third", text(3, 10))
    engine.empty("second", 40)
    assert segment.n_taken == 64 + 50 + 10
    engine.release("second")
    engine.release("third")
    assert segment.n_taken == 0


def test_as_many_stay_taken_as_are_in_use(open_engine: OpenEngine) -> None:
    engine = open_engine(n_ctx=4096)
    (segment,) = engine.route("ended", 0, engine.n_layers).segments
    for name, seed in (("ended", 1), ("runs", 2)):
        for start in range(0, 1500, 500):
            run(engine, name, text(seed, 1500)[start : start + 500], start)
    engine.release("ended")
    assert segment.n_taken == 3000
    run(engine, "third", text(3, 10))
    engine.release("third")
    assert segment.n_taken == 1500, "with ten more they would be too many"


class Sequences:
    """What a context is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def share_rows(self, source: int, target: int, first: int, end: int) -> None:
        self.calls.append((source, target, first, end))

    def truncate(self, sequence: int, length: int) -> bool:
        self.calls.append((sequence, length))
        return True


@pytest.mark.parametrize(("n_used", "n_at_most"), [(10, N_CELLS_MIN), (5000, 5000)])
def test_no_more_stay_taken_than_are_in_use(n_used: int, n_at_most: int) -> None:
    context = Sequences()
    unused = UnusedCells(context, 8)  # type: ignore[arg-type]
    assert not unused.free()
    unused.take(1, 0, n_at_most, n_at_most, n_used)
    assert unused.n_cells == n_at_most
    unused.take(2, 3, 4, 1, n_used)
    assert unused.n_cells == 0
    assert context.calls == [(1, 8, 0, n_at_most), (2, 8, 3, 4), (8, 0)]
    assert not unused.free()


def test_nothing_stays_taken_where_there_is_no_sequence_for_it() -> None:
    context = Sequences()
    unused = UnusedCells(context, None)  # type: ignore[arg-type]
    unused.take(1, 0, 5, 5, 100)
    assert not unused.free()
    assert unused.n_cells == 0
    assert not context.calls


@pytest.mark.parametrize(
    ("settings", "sequence"),
    [
        (EngineSettings(n_slots=8), 8),
        (EngineSettings(n_slots=8, prefixes=PrefixSettings(n_cells_entries=3)), 13),
        (EngineSettings(n_slots=1), None),
        (EngineSettings(n_slots=255), 255),
        (EngineSettings(n_slots=256), None),
        (exact_settings(EngineSettings(n_slots=8), 64), None),
    ],
)
def test_which_sequence_is_for_cells_that_nobody_uses(settings: EngineSettings, sequence: int | None) -> None:
    assert unused_sequence_of(settings, is_recurrent=False) == sequence
    assert unused_sequence_of(settings, is_recurrent=True) is None
