"""A few rows in one batch get, to the bit, what each would get alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from swarmllm_workers import small_batches
from swarmllm_workers.libllama import Context, ContextSettings, Model

from .conftest import MakeModel
from .factory import QUANTISATIONS, SLOW_TO_ENCODE, Spec
from .test_exactness import GUIDE

REARRANGED = (Type.Q2_K, Type.Q4_K)
"""ggml stores these anew where the CPU has AVX-512, and computes four rows at a time."""
N_PROMPT = 50
N_STEPS = 21

pytestmark = pytest.mark.skipif(
    small_batches.find_library() is None, reason="small_batches.c was not built (pip install -e . does)"
)


def logits(path: Path, n_rows: int) -> np.ndarray:
    """f32 [N_STEPS, n_vocab]: the rows after the prompt, `n_rows` at a time."""
    model = Model(path)
    context = Context(model, ContextSettings(n_ctx=256, n_slots=1, n_threads=2, n_outputs_max=32))
    tokens = np.random.default_rng(5).integers(0, model.n_vocab, N_PROMPT + N_STEPS).astype(np.int32)
    context.decode(tokens[:N_PROMPT], np.arange(N_PROMPT), 0, np.zeros(N_PROMPT, np.int8))
    found = []
    for at in range(N_PROMPT, N_PROMPT + N_STEPS, n_rows):
        rows = tokens[at : at + n_rows]
        context.decode(rows, np.arange(at, at + len(rows)), 0, True)
        found += [context.logits(row).copy() for row in range(len(rows))]
    context.close()
    model.close()
    return np.array(found)


def test_ggml_asks_before_it_uses_tiles() -> None:
    logits(GUIDE, 2)
    assert small_batches.is_asked()


@pytest.mark.slow
@pytest.mark.parametrize("type_", [t for t in QUANTISATIONS if t not in SLOW_TO_ENCODE], ids=lambda t: t.name)
def test_rows_of_a_small_batch_are_those_of_single_rows(make_model: MakeModel, type_: Type) -> None:
    spec = Spec("llama", n_embd=256, n_ff=512, head_size=64, types=(type_,))
    path = make_model(spec)
    alone = logits(path, 1)
    assert np.isfinite(alone).all()
    for n_rows in (2, 3) if type_ in REARRANGED else (2, 5, small_batches.ROWS_MAX):
        assert np.array_equal(logits(path, n_rows), alone), n_rows


@pytest.mark.parametrize("n_rows", [4, 5, 6, small_batches.ROWS_MAX])
@pytest.mark.parametrize("n_ff", [8192, 8192 + 32])
def test_large_matrices_of_q8_0_are_computed_in_strips_to_the_bit(
    make_model: MakeModel, n_rows: int, n_ff: int
) -> None:
    path = make_model(Spec("llama", n_layers=2, n_embd=256, n_ff=n_ff, head_size=64, types=(Type.Q8_0,)))
    assert n_ff * 256 > small_batches.CACHED_BYTES_MAX
    assert np.array_equal(logits(path, n_rows), logits(path, 1))


@pytest.mark.parametrize("n_rows", [2, 4, small_batches.ROWS_MAX])
def test_bundled_model_computes_small_batches_to_the_bit(n_rows: int) -> None:
    assert np.array_equal(logits(GUIDE, n_rows), logits(GUIDE, 1))


def test_prompts_still_go_through_tiles() -> None:
    """Else they would be slow: many rows differ from single ones by rounding, as ggml has it."""
    assert not np.array_equal(logits(GUIDE, N_STEPS), logits(GUIDE, 1))
