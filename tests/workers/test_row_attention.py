"""Fused attention gives a row the same bits alone and among others, on one thread and on several, cut and
uncut, also beyond the 512 cells from which on ggml would cut its work into parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from swarmllm_proto.ipc import FlashAttention
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.kernels import row_attention
from swarmllm_workers.kernels.interposing import find_library

from .stepping import step_logits
from .test_exactness import GUIDE

N_CTX = 1024
N_PROMPT = 600
N_STEPS = 6

pytestmark = pytest.mark.skipif(
    find_library("row_attention") is None, reason="row_attention.c was not built (pip install -e . does)"
)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    model = Model(GUIDE)
    yield model
    model.close()


def tokens_of(n_vocab: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, n_vocab, N_PROMPT + N_STEPS).astype(np.int32)


def logits(
    model: Model,
    *,
    n_threads: int = 1,
    n_rows: int = 1,
    n_foreign: int = 0,
    flash_attention: FlashAttention = "on",
) -> np.ndarray:
    """f32 [N_STEPS, n_vocab]: the rows after the prompt, `n_rows` at a time, where another sequence has
    `n_foreign` cells behind the prompt's."""
    context = Context(
        model,
        ContextSettings(
            n_ctx=N_CTX, n_slots=2, n_threads=n_threads, n_outputs_max=32, flash_attention=flash_attention
        ),
    )
    tokens = tokens_of(model.n_vocab)
    for start, end in ((0, 300), (300, N_PROMPT)):
        context.decode(tokens[start:end], np.arange(start, end), 0, np.zeros(end - start, np.int8))
    if n_foreign:
        context.decode(tokens[:n_foreign], np.arange(n_foreign), 1, np.zeros(n_foreign, np.int8))
    found = step_logits(context, tokens, N_PROMPT, n_rows)
    context.close()
    return found


def test_ggml_asks_before_it_attends(model: Model) -> None:
    logits(model)
    assert row_attention.is_asked()


def test_a_row_gets_the_same_bits_on_any_number_of_threads(model: Model) -> None:
    alone = logits(model)
    assert np.isfinite(alone).all()
    assert np.array_equal(logits(model, n_threads=3), alone)


@pytest.mark.parametrize("n_rows", [2, 3, N_STEPS])
def test_a_row_gets_the_same_bits_in_a_batch(model: Model, n_rows: int) -> None:
    assert np.array_equal(logits(model, n_rows=n_rows, n_threads=2), logits(model, n_threads=2))


def test_a_row_gets_the_same_bits_while_others_hold_cells(model: Model) -> None:
    assert np.array_equal(logits(model, n_foreign=300), logits(model))


def test_auto_is_plain_attention_where_rows_would_get_other_bits(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits(model, flash_attention="off")
    assert not np.array_equal(logits(model, flash_attention="auto"), plain)
    monkeypatch.setattr(row_attention, "_library", None)
    assert np.array_equal(logits(model, flash_attention="auto"), plain)


def test_a_cut_model_computes_what_the_whole_one_does(tmp_path: Path) -> None:
    """The stages have different numbers of threads."""
    reference = llama_cpp.Llama(
        str(GUIDE), n_ctx=N_CTX, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False
    )
    tokens = tokens_of(reference.n_vocab())
    bounds = [0, 300, *range(N_PROMPT, N_PROMPT + N_STEPS + 1)]
    expected = []
    for start, end in pairwise(bounds):
        reference.eval(tokens[start:end].tolist())
        pointer = llama_cpp.llama_get_logits_ith(reference.ctx, -1)
        expected.append(np.ctypeslib.as_array(pointer, (reference.n_vocab(),)).copy())
    reference.close()
    engines = [
        Engine(GUIDE, tmp_path, EngineSettings(n_ctx=N_CTX, n_threads=n_threads, flash_attention="auto"))
        for n_threads in (1, 2)
    ]
    got = []
    ranges = [(0, 5), (5, 12)]
    for engine, (first, last) in zip(engines, ranges, strict=True):
        engine.layers.load(first, last)
    for start, end in pairwise(bounds):
        data = tokens[start:end]
        for engine, (first, last) in zip(engines, ranges, strict=True):
            route = engine.route("request", first, last)
            data = engine.run(route, [Span(engine.take_slot("request"), start, data, "logits")])[0].copy()
        got.append(data)
    for engine in engines:
        engine.close()
    assert np.array_equal(np.array(got), np.array(expected))
