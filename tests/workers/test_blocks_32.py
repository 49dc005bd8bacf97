"""Products of Q4_0, Q5_0, Q8_0, IQ4_NL and MXFP4 with several columns have, to the bit, what ggml's dot
product of each column has."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.kernels import interposing, small_batches
from swarmllm_workers.kernels.kernel_choice import IS_ARM, MatrixType, Way, ways_of
from swarmllm_workers.kernels.kernel_tuning import KernelTuning, ways
from swarmllm_workers.kernels.product_timing import ProductBench

from .conftest import MakeModel
from .factory import Spec
from .test_small_batches import logits

pytestmark = pytest.mark.skipif(
    small_batches.find_library() is None or small_batches.last_way() <= Way.TILES,
    reason="small_batches.c was not built, or has no kernels for this processor",
)

KINDS = tuple(kind for kind in MatrixType if not kind.is_k_quant)
DOTS = {
    MatrixType.Q8_0: "q8_0",
    MatrixType.Q4_0: "q4_0",
    MatrixType.Q5_0: "q5_0",
    MatrixType.IQ4_NL: "iq4_nl",
    MatrixType.MXFP4: "mxfp4",
}
BLOCK_BYTES = {
    MatrixType.Q8_0: 34,
    MatrixType.Q4_0: 18,
    MatrixType.Q5_0: 22,
    MatrixType.IQ4_NL: 18,
    MatrixType.MXFP4: 17,
}
OURS = tuple(way for way in ways() if not way.is_ggmls and not way.has_own_sums)
IN_PAIRS = () if IS_ARM else (MatrixType.IQ4_NL, MatrixType.MXFP4)
COLUMN = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
VALUES = ("random", "all bits set", "no bit set", "largest", "tiny scales", "huge scales")


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    yield
    small_batches.force(None)
    small_batches.use("auto")


def matrix(rng: np.random.Generator, kind: MatrixType, m: int, k: int, values: str) -> np.ndarray:
    """u8 [m, k, bytes of a block]."""
    n_bytes = BLOCK_BYTES[kind]
    blocks = np.frombuffer(rng.bytes(m * k * n_bytes), np.uint8).reshape(m, k, n_bytes).copy()
    if values in ("all bits set", "no bit set"):
        blocks[:] = 255 if values == "all bits set" else 0
    if kind == MatrixType.MXFP4:  # the exponent of two
        lowest, highest = {"tiny scales": (0, 4), "huge scales": (200, 250)}.get(values, (100, 140))
        blocks[:, :, 0] = rng.integers(lowest, highest, (m, k))
        return blocks
    size = {"tiny scales": 1e-7, "huge scales": 60000}.get(values, 0.01)
    blocks[:, :, :2] = rng.uniform(-size, size, (m, k, 1)).astype(np.float16).view(np.uint8)
    return blocks


def columns(rng: np.random.Generator, n: int, k: int, values: str) -> np.ndarray:
    made = np.empty((n, k), COLUMN)
    made["scale"] = rng.normal(0, 1e4 if values == "huge scales" else 0.1, (n, k))
    made["values"] = 127 if values == "largest" else rng.integers(-127, 128, (n, k, 32))
    return made


def dot_products(kind: MatrixType, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """f32 [n, m], by ggml."""
    dot = getattr(interposing.mapped_libraries("libggml-cpu")[0], f"ggml_vec_dot_{DOTS[kind]}_q8_0")
    found = np.empty((len(b), len(a)), np.float32)
    none = ctypes.c_size_t(0)
    for j, column in enumerate(b):
        for i, row in enumerate(a):
            pointers = [ctypes.c_void_p(x.ctypes.data) for x in (found[j, i:], row, column)]
            dot(len(column) * 32, pointers[0], none, pointers[1], none, pointers[2], none, 1)
    return found


def product(kind: MatrixType, a: np.ndarray, b: np.ndarray, n_threads: int) -> np.ndarray | None:
    """f32 [n, m], what ggml gets for such blocks, from the threads one after the other; None: it is left to
    ggml."""
    library = small_batches._library
    assert library is not None
    library.llamafile_sgemm.restype = ctypes.c_bool
    (m, k), n = a.shape[:2], len(b)
    out = np.full((n, m), np.nan, np.float32)
    answers = set()
    for index in range(n_threads):
        params = (ctypes.c_int * 2)(index, n_threads)
        sizes = [ctypes.c_int64(x) for x in (m, n, k)]
        ours = [(ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(k)) for x in (a, b)]
        result = ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(m)
        types = int(kind), int(Type.Q8_0), int(Type.F32)
        answers.add(library.llamafile_sgemm(params, *sizes, *ours[0], *ours[1], *result, *types))
    (is_ours,) = answers
    return out if is_ours else None


def assert_equal(kind: MatrixType, a: np.ndarray, b: np.ndarray, n_threads: int = 1) -> None:
    expected = dot_products(kind, a, b)
    for way in ways_of(kind, len(b), OURS):
        small_batches.force(way)
        found = product(kind, a, b, n_threads)
        assert found is not None
        same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
        assert same.all(), way


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_values_have_ggmls_bits(kind: MatrixType, values: str) -> None:
    rng = np.random.default_rng(1)
    a, b = matrix(rng, kind, 5, 6, values), columns(rng, 17, 6, values)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17):
        assert_equal(kind, a, b[:n].copy())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 20), k=st.integers(1, 40), n_threads=st.integers(1, 4))
def test_all_shapes_have_ggmls_bits(kind: MatrixType, m: int, n: int, k: int, n_threads: int) -> None:
    """Also shares of threads that are empty."""
    k += k % 2 if kind in IN_PAIRS else 0
    rng = np.random.default_rng(m * n * k)
    assert_equal(kind, matrix(rng, kind, m, k, "random"), columns(rng, n, k, "random"), n_threads)


@pytest.mark.parametrize("k", [400, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_leave_the_cache_between_groups_of_columns_have_ggmls_bits(
    kind: MatrixType, k: int
) -> None:
    rng = np.random.default_rng(3)
    assert_equal(kind, matrix(rng, kind, 90, k, "random"), columns(rng, 11, k, "random"))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are made unreadable as Linux does it")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_behind_the_matrix_is_read(kind: MatrixType) -> None:
    """A page that cannot be read follows its last byte."""
    rng = np.random.default_rng(6)
    blocks = matrix(rng, kind, 5, 4, "random")
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    bytes_of_pages = np.frombuffer(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.c_void_p(bytes_of_pages.ctypes.data + mmap.PAGESIZE)
    at_the_end = bytes_of_pages[mmap.PAGESIZE - blocks.size : mmap.PAGESIZE].reshape(blocks.shape)
    at_the_end[:] = blocks
    assert libc.mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    assert_equal(kind, at_the_end, columns(rng, 2, 4, "random"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_cannot_compute_is_ggmls(kind: MatrixType) -> None:
    """Rows that are too long, and of IQ4_NL and MXFP4 those of an odd number of blocks."""
    rng = np.random.default_rng(4)
    small_batches.force(small_batches.last_way())
    for k, is_ours in ((1024, True), (1026, False), (3, kind not in IN_PAIRS)):
        a, b = matrix(rng, kind, 2, k, "random"), columns(rng, 2, k, "random")
        assert (product(kind, a, b, 1) is not None) == is_ours


@pytest.fixture
def path(make_model: MakeModel) -> Path:
    """ggml rearranges no matrix of Q5_0."""
    return make_model(Spec("llama", n_layers=3, n_embd=256, n_ff=512, head_size=64, types=(Type.Q5_0,)))


def test_rows_have_the_bits_that_they_have_alone_in_batches_of_any_size(path: Path) -> None:
    small_batches.force(Way.DOTS)
    alone = logits(path, 1)
    assert np.isfinite(alone).all()
    for n_rows in (1, 2, 7, 8, 21):
        small_batches.force(small_batches.last_way())
        assert np.array_equal(logits(path, n_rows), alone), n_rows


def test_products_are_measured_in_ggmls_ways_and_ours(path: Path, tmp_path: Path) -> None:
    source = GgufFile(path)
    with ProductBench(source, MatrixType.Q5_0, 256, 1, cached_bytes=2**20) as bench:
        for n_rows in (1, 2, 8, 17):
            found = set()
            for way in ways_of(MatrixType.Q5_0, n_rows, ways()):
                small_batches.force(way)
                found.add(bench.result(n_rows))
            assert len(found) == 1
    source.close()
    small_batches.force(None)
    tuning = KernelTuning("auto", tmp_path / "timings.json")
    tuning.tune(tuning.read([path]), 1)
    assert {choice.type for choice in tuning.choices} == {"Q5_0"}
    ours = {"avx2", "avx2-streamed", "avx512-pairs", "panels-vnni", "panels-amx"}
    assert {choice.chosen for choice in tuning.choices} <= ours | {"ggml-dots", "ggml-tiles"}


def test_a_batch_before_anything_was_measured_is_ours() -> None:
    """But for single rows and long prompts."""
    rng = np.random.default_rng(5)
    a = matrix(rng, MatrixType.Q5_0, 4, 4, "random")
    for mode, expected in (("auto", {2, 16}), ("ours", {1, 2, 16, 40}), ("ggml", set())):
        small_batches.use(mode)  # type: ignore[arg-type]
        asked = {n for n in (1, 2, 16, 40) if _is_ours(a, columns(rng, n, 4, "random"))}
        assert asked == expected, mode


def _is_ours(a: np.ndarray, b: np.ndarray) -> bool:
    """Told from ggml's tiles by taking them away."""
    library = small_batches._library
    assert library is not None
    tiled = ctypes.c_void_p.in_dll(library, "swarmllm_tiled")
    before, tiled.value = tiled.value, None
    try:
        return product(MatrixType.Q5_0, a, b, 1) is not None
    finally:
        tiled.value = before
