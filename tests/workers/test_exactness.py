"""A chain of segments computes what the uncut model computes, bit for bit.

The reference is libllama's own run of the original file through `llama_cpp.Llama`: same tokens in the same
chunks, same number of threads, same context size, memory-mapped on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import llama_cpp
import numpy as np
import pytest
from long_runs import IS_LONG

from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_workers.engine import loaded_layers
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.kernels import repacking

from .conftest import MakeModel
from .factory import SPECS

pytestmark = pytest.mark.long

GUIDE = Path(__file__).parents[2] / "swarmllm" / "guide" / "guide.gguf"
N_CTX = 256
N_PROMPT = 40
CHUNKINGS = {"at once": [40], "halves": [20, 20], "uneven": [1, 7, 32]}
N_DECODE = 6


def tokens_for(n_vocab: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, n_vocab, N_PROMPT + N_DECODE).astype(np.int32)


def steps(chunking: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of each forward: the prompt's chunks, then single tokens."""
    bounds = [0, *np.cumsum(chunking).tolist(), *range(N_PROMPT + 1, N_PROMPT + N_DECODE + 1)]
    return list(pairwise(bounds))


def uncut_logits(path: Path, tokens: np.ndarray, chunking: Sequence[int]) -> np.ndarray:
    """f32 [n_steps, n_vocab]: logits of the last row of each step, by libllama alone. It leaves a file's rows
    in their order where the worker has it do so."""
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = not repacking.keeps_rows([path])
    with patch("llama_cpp.llama.llama_cpp.llama_model_default_params", return_value=params):
        model = llama_cpp.Llama(
            str(path),
            n_ctx=N_CTX,
            n_batch=512,
            n_threads=1,
            n_threads_batch=1,
            verbose=False,
            logits_all=False,
        )
    rows = []
    for start, end in steps(chunking):
        model.eval(tokens[start:end].tolist())
        pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        rows.append(np.ctypeslib.as_array(pointer, (model.n_vocab(),)).copy())
    model.close()
    return np.array(rows)


@pytest.fixture(autouse=True)
def _as_many_parts_as_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a chain's routes are open at once."""
    monkeypatch.setattr(loaded_layers, "PARTS_MAX", 1000)


def open_engine(path: Path, folder: Path, *, native_tap: bool = True, n_slots: int = 2) -> Engine:
    settings = EngineSettings(n_ctx=N_CTX, n_slots=n_slots, n_threads=1, native_tap=native_tap)
    return Engine(path, folder / "segments", settings)


def chain_logits(
    engine: Engine, bounds: Sequence[int], tokens: np.ndarray, chunking: Sequence[int]
) -> np.ndarray:
    """The same through segments with these boundaries, from one forward to the next as over a network: every
    segment's output is taken out and fed to the next."""
    ranges = list(pairwise(bounds))
    slot = engine.take_slot("chain")
    routes = [engine.route("chain", start, end) for start, end in ranges]
    rows = []
    for start, end in steps(chunking):
        data = tokens[start:end]
        for route in routes:
            data = engine.run(route, [Span(slot, start, data, "logits")])[0].copy()
        rows.append(data)
    engine.release("chain")
    return np.array(rows)


def cuts(n_layers: int, alignment: int) -> Iterator[list[int]]:
    """Every cut in two, one in three, one into the smallest pieces."""
    boundaries = list(range(alignment, n_layers, alignment))
    for boundary in boundaries:
        yield [0, boundary, n_layers]
    if len(boundaries) > 1:
        yield [0, boundaries[0], boundaries[-1], n_layers]
        yield [0, *boundaries, n_layers]


def assert_chains_equal_uncut(path: Path, folder: Path, chunkings: dict[str, list[int]]) -> None:
    engine = open_engine(path, folder)
    tokens = tokens_for(engine.n_vocab)
    assert engine.rule.cut_alignment > 0
    for name, chunking in chunkings.items():
        expected = uncut_logits(path, tokens, chunking)
        assert np.isfinite(expected).all()
        assert expected.std() > 0.1
        engine.layers.load(0, engine.n_layers)
        ways = list(cuts(engine.n_layers, engine.rule.cut_alignment))
        if name != "uneven" and not IS_LONG:
            ways = ways[-1:]  # the smallest pieces
        for bounds in ([0, engine.n_layers], *ways):
            got = chain_logits(engine, bounds, tokens, chunking)
            assert np.abs(got - expected).max() == 0.0, f"prompt {name}, cut at {bounds}"
            engine.layers.unload(0, engine.n_layers)
            engine.layers.load(0, engine.n_layers)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_chain_of_segments_equals_uncut_model_bit_for_bit(
    name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    assert_chains_equal_uncut(make_model(name), tmp_path, CHUNKINGS)


@pytest.mark.slow
def test_guide_model_is_exact_for_every_cut(tmp_path: Path) -> None:
    assert_chains_equal_uncut(GUIDE, tmp_path, {"uneven": CHUNKINGS["uneven"]})


def test_every_architecture_of_the_specs_is_in_the_table() -> None:
    assert {spec.architecture for spec in SPECS.values()} <= set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_python_tap_computes_the_same_as_the_native_one(
    name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    path = make_model(name)
    results = []
    for native in (True, False):
        engine = open_engine(path, tmp_path, native_tap=native)
        engine.layers.load(0, engine.n_layers)
        tokens = tokens_for(engine.n_vocab)
        results.append(chain_logits(engine, [0, 2, engine.n_layers], tokens, [40]))
        engine.close()
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.slow
def test_spans_of_several_requests_in_one_batch_equal_the_uncut_model(
    make_model: MakeModel, tmp_path: Path
) -> None:
    """Mixed prefill and decode of three slots, in the same batches for the cut and the uncut model."""
    path = make_model("llama")
    tokens = tokens_for(256)
    batches = [
        [(0, 0, 12), (1, 0, 5)],
        [(0, 12, 13), (1, 5, 20), (2, 0, 9)],
        [(2, 9, 10), (1, 20, 21), (0, 13, 14)],
    ]
    results = []
    for bounds in ([0, 4], [0, 1, 3, 4]):
        engine = open_engine(path, tmp_path, n_slots=3)
        for start, end in pairwise(bounds):
            engine.layers.load(start, end)
        route = engine.route("all", 0, 4)
        assert len(route.segments) == len(bounds) - 1
        rows = []
        for batch in batches:
            spans = [Span(slot, start, tokens[start:end], "logits") for slot, start, end in batch]
            rows += [row.copy() for row in engine.run(route, spans)]
        results.append(np.array(rows))
        engine.close()
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_other_requests_say_does_not_change_a_bit(
    name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """Three requests in turns, through segments and uncut. (Alone the first may differ in rounding: its
    rows lie in other cells of the KV cache then, and attention sums in the order of the cells.)"""

    def first_of_three(bounds: Sequence[int], others: int) -> np.ndarray:
        engine = open_engine(make_model(name), tmp_path, n_slots=3)
        for start, end in pairwise(bounds):
            engine.layers.load(start, end)
        prompts = [np.random.default_rng(seed).integers(0, 256, 24) for seed in (3, others, others + 1)]
        rows = []
        for start, end in [(0, 12), *pairwise(range(12, 25))]:
            for i, prompt in enumerate(prompts):
                route, slot = engine.route(str(i), 0, engine.n_layers), engine.take_slot(str(i))
                row = engine.run(route, [Span(slot, start, prompt[start:end].astype(np.int32), "logits")])[0]
                if i == 0:
                    rows.append(row.copy())
        engine.close()
        return np.array(rows)

    n_layers = SPECS[name].n_layers
    expected = first_of_three([0, n_layers], others=10)
    np.testing.assert_array_equal(first_of_three([0, 1, n_layers], others=10), expected)
    np.testing.assert_array_equal(first_of_three([0, 1, n_layers], others=20), expected)


@pytest.mark.slow
def test_rolling_back_and_repeating_gives_the_same_logits(make_model: MakeModel, tmp_path: Path) -> None:
    engine = open_engine(make_model("qwen2"), tmp_path)
    engine.layers.load(0, 2)
    engine.layers.load(2, 4)
    tokens = tokens_for(256)
    slot, route = engine.take_slot("r"), engine.route("r", 0, 4)

    def run(start: int, end: int) -> np.ndarray:
        return engine.run(route, [Span(slot, start, tokens[start:end], "logits")])[0].copy()

    run(0, 20)
    first = [run(at, at + 1) for at in range(20, 24)]
    assert [segment.lengths[slot] for segment in route.segments] == [24, 24]
    second = [run(at, at + 1) for at in range(20, 24)]
    np.testing.assert_array_equal(first, second)
    engine.close()
