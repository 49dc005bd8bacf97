"""A few rows in one batch get, to the bit, what each would get alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from swarmllm_workers.build_info import build_info
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.kernels import small_batches
from swarmllm_workers.kernels.kernel_choice import Way

from .conftest import MakeModel
from .factory import QUANTISATIONS, SLOW_TO_ENCODE, Spec
from .stepping import step_logits
from .test_exactness import GUIDE

REARRANGED = (Type.Q2_K,) if small_batches.keeps_rows_of_q4_k() else (Type.Q2_K, Type.Q4_K)
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
    found = step_logits(context, tokens, N_PROMPT, n_rows)
    context.close()
    model.close()
    return found


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


@pytest.fixture
def kernels() -> Iterator[list[Way]]:
    """Those of ours that this processor has."""
    yield [way for way in Way if Way.TILES < way <= small_batches.last_way()]
    small_batches.force(None)


def test_products_of_q8_0_are_ggmls_to_the_bit(make_model: MakeModel, kernels: list[Way]) -> None:
    """In a batch of any size: up to 7 rows ggml takes dot products, above tiles."""
    path = make_model(Spec("llama", n_layers=2, n_embd=256, n_ff=8192 + 32, head_size=64, types=(Type.Q8_0,)))
    for n_rows in (1, 2, 3, 4, 5, 6, small_batches.ROWS_MAX, 9, N_STEPS):
        found = []
        for way in (Way.DOTS if n_rows <= small_batches.ROWS_MAX else Way.TILES, Way.TILES, *kernels):
            small_batches.force(way)
            found.append(logits(path, n_rows))
        assert all(np.array_equal(each, found[0]) for each in found), n_rows
        if n_rows == 1:
            alone = found[0]
        assert n_rows > small_batches.ROWS_MAX or np.array_equal(found[0], alone)


BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", 32)])


def blocks(rng: np.random.Generator, n: int, k: int, lowest: int) -> np.ndarray:
    made = np.empty((n, k), BLOCK)
    made["scale"] = rng.normal(0, 0.05, (n, k))
    made["values"] = rng.integers(lowest, 128, (n, k, 32))
    return made


def dot_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """f32 [n, m], operation by operation as ggml_vec_dot_q8_0_q8_0 on AVX2. (Rounding a sum in f64 to f32 is
    a fused multiply-add in all but one of some hundred million cases.)"""
    sums = np.zeros((len(b), len(a), 8), np.float32)
    for block in range(a.shape[1]):
        x, y = a[:, block], b[:, block]
        fours = x["values"].reshape(-1, 8, 4).astype(np.int64), y["values"].reshape(-1, 8, 4).astype(np.int64)
        products = np.einsum("mef,nef->nme", *fours)
        scales = y["scale"].astype(np.float32)[:, None] * x["scale"].astype(np.float32)
        sums = (sums + scales[:, :, None].astype(np.float64) * products).astype(np.float32)
    halves = sums[..., 4:] + sums[..., :4]
    pairs = halves[..., :2] + halves[..., 2:]
    return pairs[..., 0] + pairs[..., 1]


def product(a: np.ndarray, b: np.ndarray, n_threads: int) -> np.ndarray:
    """f32 [n, m], what ggml gets for such blocks, from the threads one after the other."""
    assert small_batches._library is not None
    (m, k), n = a.shape, len(b)
    out = np.empty((n, m), np.float32)
    for index in range(n_threads):
        params = (ctypes.c_int * 2)(index, n_threads)
        sizes = [ctypes.c_int64(x) for x in (m, n, k)]
        pointers = [(ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(k)) for x in (a, b)]
        result = ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(m)
        small_batches._library.llamafile_sgemm(
            params, *sizes, *pointers[0], *pointers[1], *result, *(Type.Q8_0, Type.Q8_0, Type.F32)
        )
    return out


@pytest.mark.parametrize("n_columns", range(1, 12))
@pytest.mark.parametrize(("m", "k", "n_threads"), [(1, 1, 1), (37, 3, 1), (53, 28, 3), (8, 5, 2)])
def test_kernels_compute_every_shape(
    m: int, k: int, n_threads: int, n_columns: int, kernels: list[Way]
) -> None:
    """Also matrices of an odd number of rows, and shares of threads that are empty."""
    rng = np.random.default_rng(m * 100 + n_columns)
    a, b = blocks(rng, m, k, -128), blocks(rng, n_columns, k, -127)
    expected = dot_products(a, b)
    for way in kernels:
        small_batches.force(way)
        found = product(a, b, n_threads)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("n_rows", [2, 4, small_batches.ROWS_MAX])
def test_bundled_model_computes_small_batches_to_the_bit(n_rows: int) -> None:
    assert np.array_equal(logits(GUIDE, n_rows), logits(GUIDE, 1))


def test_prompts_still_go_through_tiles() -> None:
    """Else they would be slow: many rows differ from single ones by rounding, as ggml has it."""
    if "AVX512" not in build_info()["features"]:  # type: ignore[operator]
        pytest.skip("ggml's tiles for AVX2 add up in the order of its dot products")
    assert not np.array_equal(logits(GUIDE, N_STEPS), logits(GUIDE, 1))
