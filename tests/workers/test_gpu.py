"""Layers on a GPU give what the processor gives, but for rounding: whole, cut, and cut between both.

Skipped where libllama sees no GPU; `make test-gpu` fails then. A GPU has other bits than the processor, and
with some drivers a cut model has others than the uncut one, because operations are joined within a graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.gpus import gpus
from swarmllm_workers.engine.kernel_class import kernel_class
from swarmllm_workers.engine.segment import Span

from .client import GREEDY
from .test_batching import Room, guide_prompts, open_room  # noqa: F401

NEEDED: Final = "SWARMLLM_TEST_GPU" in os.environ
if not gpus() and not NEEDED:
    pytest.skip("libllama sees no GPU", allow_module_level=True)

N_LAYERS: Final = 12
ALL: Final = N_LAYERS + 1
TOKENS: Final = np.random.default_rng(3).integers(0, 2000, 96).astype(np.int32)
ROUNDED: Final = 0.05
"""Of the logits' spread: what 12 layers in Q8_0 differ by between a processor and a GPU, and more."""

OpenEngine = Callable[..., Engine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    engines: list[Engine] = []

    def open_(**settings: Any) -> Engine:
        chosen = replace(EngineSettings(n_ctx=256, n_slots=2, flash_attention="auto"), **settings)
        engines.append(Engine(GUIDE_PATH, tmp_path / "segments", chosen))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


def run(engine: Engine, request: str, start: int, end: int, position: int, data: np.ndarray) -> np.ndarray:
    route = engine.route(request, start, end)
    want = "logits" if end == N_LAYERS else "hidden"
    return engine.run(route, [Span(engine.take_slot(request), position, data, want)])[0].copy()  # type: ignore[arg-type]


def logits(stages: Sequence[tuple[Engine, int, int]], request: str = "r") -> list[np.ndarray]:
    """Of a prompt's last row, and of three single rows behind it."""
    found = []
    pieces = [(0, TOKENS[:90]), *((at, TOKENS[at : at + 1]) for at in range(90, 93))]
    for position, tokens in pieces:
        rows = tokens
        for engine, start, end in stages:
            rows = run(engine, request, start, end, position, rows)
        found.append(rows.ravel())
    return found


def assert_alike(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> None:
    for one, other in zip(some, others, strict=True):
        assert np.sqrt(np.mean((one - other) ** 2)) < ROUNDED * other.std()
        assert one.argmax() == other.argmax()


def loaded(engine: Engine, *ranges: tuple[int, int]) -> Engine:
    for start, end in ranges:
        engine.layers.load(start, end)
    return engine


def test_libllama_sees_a_gpu() -> None:
    assert gpus()


def test_a_gpu_and_the_processor_give_the_same_but_for_rounding(open_engine: OpenEngine) -> None:
    there = loaded(open_engine(n_gpu_layers=ALL), (0, N_LAYERS))
    here = loaded(open_engine(), (0, N_LAYERS))
    assert_alike(logits([(there, 0, N_LAYERS)]), logits([(here, 0, N_LAYERS)]))


def test_auto_puts_all_layers_there_that_fit(open_engine: OpenEngine) -> None:
    engine = loaded(open_engine(n_gpu_layers="auto"), (0, N_LAYERS))
    assert [segment.n_gpu_layers for segment in engine.layers.segments] == [ALL]
    assert not engine.layers.segments[0].mapped_bytes


@pytest.mark.parametrize("cuts", [(0, 6, 12), (0, 1, 5, 12)])
def test_a_model_is_cut_on_one_gpu(open_engine: OpenEngine, cuts: tuple[int, ...]) -> None:
    engine = loaded(open_engine(n_gpu_layers="auto"), *pairwise(cuts))
    whole = loaded(open_engine(n_gpu_layers="auto"), (0, N_LAYERS))
    parts = [(engine, start, end) for start, end in pairwise(cuts)]
    assert_alike(logits(parts), logits([(whole, 0, N_LAYERS)]))


def test_one_stage_is_on_the_gpu_and_one_on_the_processor(open_engine: OpenEngine) -> None:
    there, here = open_engine(n_gpu_layers="auto"), open_engine()
    for engine in (there, here):
        loaded(engine, (0, 6), (6, 12))
    whole = loaded(open_engine(), (0, N_LAYERS))
    expected = logits([(whole, 0, N_LAYERS)])
    assert_alike(logits([(there, 0, 6), (here, 6, 12)], "first"), expected)
    assert_alike(logits([(here, 0, 6), (there, 6, 12)], "last"), expected)


def test_some_layers_of_a_segment_are_there_and_others_are_not(open_engine: OpenEngine) -> None:
    some = loaded(open_engine(n_gpu_layers=5), (0, N_LAYERS))
    here = loaded(open_engine(), (0, N_LAYERS))
    assert_alike(logits([(some, 0, N_LAYERS)]), logits([(here, 0, N_LAYERS)]))


def test_keys_and_values_move_between_gpu_and_processor(open_engine: OpenEngine) -> None:
    engines = {
        "gpu": loaded(open_engine(n_gpu_layers="auto"), (0, N_LAYERS)),
        "processor": loaded(open_engine(), (0, N_LAYERS)),
    }
    states, after = {}, {}
    for name, engine in engines.items():
        run(engine, "r", 0, N_LAYERS, 0, TOKENS[:64])
        (segment,) = engine.layers.segments
        states[name] = bytes(segment.save(engine.take_slot("r")))
        after[name] = run(engine, "r", 0, N_LAYERS, 64, TOKENS[64:65]).ravel()
    for name, other in (("gpu", "processor"), ("processor", "gpu"), ("gpu", "gpu")):
        engine = engines[other]
        engine.route("moved", 0, N_LAYERS)
        slot = engine.take_slot("moved")
        (segment,) = engine.layers.segments
        assert segment.restore(slot, states[name], 64)
        moved = run(engine, "moved", 0, N_LAYERS, 64, TOKENS[64:65]).ravel()
        assert_alike([moved], [after[name]])
        engine.release("moved")


def test_streams_on_a_gpu_do_not_disturb_each_other(open_room: Callable[..., Room]) -> None:  # noqa: F811
    room = open_room(GUIDE_PATH, (0, N_LAYERS), n_ctx=1024, n_gpu_layers="auto")
    (answered,) = (message for message, _ in room.sent if isinstance(message, ipc.Loaded))
    assert answered.n_gpu_layers == ALL
    assert answered.gpus
    assert not answered.kernel_class, "nobody's bits are known to be equal"
    prompts = guide_prompts(room)
    alone = []
    for index, prompt in enumerate(prompts):
        room.generate(prompt, f"alone-{index}", GREEDY)
        room.run()
        alone.append(room.tokens(f"alone-{index}"))
    for index, prompt in enumerate(prompts):
        room.generate(prompt, f"beside-{index}", GREEDY)
    room.run()
    assert not room.errors()
    assert [room.tokens(f"beside-{index}") for index in range(len(prompts))] == alone


def test_a_gpu_has_no_kernel_class(open_engine: OpenEngine) -> None:
    engine = open_engine(n_gpu_layers="auto")
    assert kernel_class(engine.source, engine.settings) == ""
