"""Products of large batches from panels: near those of the numbers that blocks stand for, and the same bits
whatever else is computed."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmllm_workers.engine import libllama  # noqa: F401  (loads ggml)
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.kernels import interposing, small_batches
from swarmllm_workers.kernels.kernel_choice import PANEL_ROWS_MIN, MatrixType, Way

from .conftest import MakeModel
from .factory import Spec

UNITS = {Way.PANELS_AVX2: 1, Way.PANELS_VNNI: 2, Way.PANELS_AMX: 3, Way.PANELS_FEW: 4}
"""As panels.h has them."""
HERE = tuple(way for way, unit in UNITS.items() if unit <= small_batches.panel_units())
FEW = (Way.PANELS_FEW,) if Way.PANELS_VNNI in HERE else ()
K_QUANTS = (MatrixType.Q4_K, MatrixType.Q5_K, MatrixType.Q6_K)
KINDS = (*K_QUANTS, MatrixType.Q8_0, MatrixType.Q4_0, MatrixType.Q5_0)
BY_BLOCK = (MatrixType.Q4_0,)
"""Types that may come from panels in every batch."""
Q8_K = np.dtype([("scale", "<f4"), ("values", "i1", 256), ("sums", "<i2", 16)])
Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
SCALES_AT = {MatrixType.Q4_K: (0, 2), MatrixType.Q5_K: (0, 2), MatrixType.Q6_K: (208,)}
"""Offsets of what is f16 in a block; 0 of the other types."""
has_panels = pytest.mark.skipif(not HERE, reason="not for this processor")


def ways_of(kind: MatrixType, m: int = 16) -> list[Way]:
    """Here, for `m` rows of the matrix."""
    few = FEW if kind in BY_BLOCK and m >= 16 else ()
    return [*(way for way in HERE if kind in K_QUANTS or way != Way.PANELS_AVX2), *few]


class Product(ctypes.Structure):
    """`struct panel_product`"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unit", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("m", "n", "k")),
        *(each for at in "abc" for each in ((at, ctypes.c_void_p), (f"ld{at}", ctypes.c_int64))),
        ("thread", ctypes.c_int),
        ("n_threads", ctypes.c_int),
    )


def matrix(rng: np.random.Generator, kind: MatrixType, m: int, k: int, values: str = "random") -> np.ndarray:
    """u8 [m, k, bytes of a block]"""
    n_bytes = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (m, k, n_bytes), np.uint8)
    if values != "random":
        blocks[:] = {"all bits set": 255, "no bit set": 0, "lowest": 128}[values]
    for at in SCALES_AT.get(kind, (0,)):
        blocks[:, :, at : at + 2] = rng.normal(0, 0.01, (m, k, 1)).astype(np.float16).view(np.uint8)
    return blocks


def columns(rng: np.random.Generator, kind: MatrixType, n: int, k: int, largest: bool = False) -> np.ndarray:
    made = np.zeros((n, k), Q8_K if kind in K_QUANTS else Q8_0)
    made["scale"] = rng.normal(0, 0.1, (n, k))
    size = made["values"].shape[-1]
    made["values"] = rng.choice([-127, 127], (n, k, 1)) if largest else rng.integers(-127, 128, (n, k, size))
    if kind in K_QUANTS:
        made["sums"] = made["values"].reshape(n, k, 16, 16).sum(-1, np.int32)
    return made


def expected(kind: MatrixType, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """f64 [n, m]"""
    rows = dequantize(a.reshape(len(a), -1), kind).astype(np.float64)
    return (b["scale"][..., None].astype(np.float64) * b["values"]).reshape(len(b), -1) @ rows.T


def product(
    way: Way, kind: MatrixType, a: np.ndarray, b: np.ndarray, n_threads: int = 1
) -> np.ndarray | None:
    """f32 [n, m], or None: it is not computed."""
    path = interposing.find_library("small_batches")
    assert path is not None
    of_threads = ctypes.CDLL(str(path)).swarmllm_panel_product
    of_threads.restype = ctypes.c_bool
    (m, k), n = a.shape[:2], len(b)
    out = np.full((n, m), np.nan, np.float32)
    answers = set()
    for thread in range(n_threads):
        addresses = (a.ctypes.data, k, b.ctypes.data, k, out.ctypes.data, m)
        order = Product(kind, UNITS[way], m, n, k, *addresses, thread, n_threads)
        answers.add(of_threads(ctypes.byref(order)))
    (is_computed,) = answers
    assert is_computed or np.isnan(out).all()
    return out if is_computed else None


def bits(found: np.ndarray | None) -> np.ndarray:
    assert found is not None
    return found.view(np.uint32)


@has_panels
@pytest.mark.parametrize("values", ["random", "all bits set", "no bit set", "lowest"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_numbers_that_blocks_stand_for(kind: MatrixType, values: str) -> None:
    rng = np.random.default_rng(1)
    for m, n, k in ((16, 16, 1), (33, 70, 4), (7, 17, 7), (100, 64, 5), (20, 24, 100)):
        a, b = matrix(rng, kind, m, k, values), columns(rng, kind, n, k, largest=values != "random")
        right = expected(kind, a, b)
        for way in ways_of(kind, m):
            found = product(way, kind, a, b)
            assert found is not None
            assert np.abs(found - right).max() <= 1e-5 * max(right.std(), np.abs(right).max())


@has_panels
@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_a_value_has_the_same_bits_with_whatever_it_is_computed(
    kind: MatrixType, data: st.DataObject
) -> None:
    """In whichever way, among whatever rows and columns, by however many threads."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    m, n, k = (data.draw(st.integers(least, most)) for least, most in ((1, 70), (16, 50), (1, 9)))
    a, b = matrix(rng, kind, m, k), columns(rng, kind, n, k)
    ways = ways_of(kind)
    if not ways:
        pytest.skip("not for this processor")
    found = bits(product(ways[0], kind, a, b))
    rows, order = slice(data.draw(st.integers(0, m - 1)), m), rng.permutation(n)
    part = np.ascontiguousarray(a[rows])
    for way in ways_of(kind, len(part)):
        n_threads = data.draw(st.integers(1, 5))
        again = bits(product(way, kind, part, b[order].copy(), n_threads))
        assert np.array_equal(again, found[order][:, rows])


@has_panels
def test_few_columns_and_other_types_are_left_alone() -> None:
    rng = np.random.default_rng(1)
    for way in HERE:
        for kind in KINDS:
            assert product(way, kind, matrix(rng, kind, 16, 2), columns(rng, kind, 15, 2)) is None
        other = MatrixType.IQ4_XS
        blocks = rng.integers(0, 256, (16, 2, GGML_QUANT_SIZES[other][1]), np.uint8)
        assert product(way, other, blocks, columns(rng, MatrixType.Q4_K, 16, 2)) is None


@pytest.mark.skipif(not FEW, reason="not for this processor")
@pytest.mark.parametrize("kind", BY_BLOCK)
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_few_columns_have_the_bits_of_many(kind: MatrixType, data: st.DataObject) -> None:
    """Of each number of columns, of more than fit a register, and of rows that end in the middle of one."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    m, n, k = (data.draw(st.integers(least, most)) for least, most in ((16, 70), (1, 20), (1, 40)))
    a, b = matrix(rng, kind, m, k), columns(rng, kind, 16, k)
    b = np.concatenate([b, columns(rng, kind, n, k, largest=data.draw(st.booleans()))])
    many = bits(product(Way.PANELS_VNNI, kind, a, b))
    few = bits(product(Way.PANELS_FEW, kind, a, b[16:].copy(), data.draw(st.integers(1, 5))))
    assert np.array_equal(few, many[16:])


@pytest.mark.skipif(not FEW, reason="not for this processor")
@pytest.mark.parametrize("kind", BY_BLOCK)
def test_a_few_columns_of_long_rows_and_of_low_matrices(kind: MatrixType) -> None:
    rng = np.random.default_rng(1)
    for m, k, is_computed in ((16, 1024, True), (32, 100, True), (16, 1025, False), (15, 4, False)):
        a, b = matrix(rng, kind, m, k), columns(rng, kind, 17, k)
        few = product(Way.PANELS_FEW, kind, a, b)
        assert (few is not None) == is_computed
        if few is not None:
            assert np.array_equal(bits(few), bits(product(Way.PANELS_VNNI, kind, a, b)))


@pytest.mark.skipif(not FEW, reason="not for this processor")
@pytest.mark.parametrize("kind", BY_BLOCK)
def test_nothing_behind_the_matrix_is_read_for_a_few_columns(kind: MatrixType) -> None:
    """A page that cannot be read follows its last byte."""
    rng = np.random.default_rng(6)
    blocks = matrix(rng, kind, 17, 7)
    size = -(-blocks.size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    at_the_end = pages[size - blocks.size : size].reshape(blocks.shape)
    at_the_end[:] = blocks
    behind = ctypes.c_void_p(pages.ctypes.data + size)
    assert ctypes.CDLL(None, use_errno=True).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    b = columns(rng, kind, 16, 7)
    few = product(Way.PANELS_FEW, kind, at_the_end, b)
    assert np.array_equal(bits(few), bits(product(Way.PANELS_VNNI, kind, blocks, b)))


@has_panels
def test_no_exact_batch_and_none_of_less_than_64_rows_is_computed_from_panels(make_model: MakeModel) -> None:
    """Of those, rows keep the bits that they have in batches of ggml's dot products."""
    path = make_model(Spec("llama", n_layers=2, n_embd=256, n_ff=512, head_size=64, types=K_QUANTS))
    n = PANEL_ROWS_MIN
    tokens = np.random.default_rng(5).integers(0, 250, n).astype(np.int32)
    model = Model(path)
    context = Context(model, ContextSettings(n_ctx=256, n_slots=1, n_threads=1, n_outputs_max=1))

    def last_logits(n_rows: int) -> np.ndarray:
        context.truncate(0, 0)
        has_logits = np.arange(n_rows) == n_rows - 1
        context.decode(tokens[:n_rows], np.arange(n_rows), 0, has_logits.astype(np.int8))
        return context.logits(n_rows - 1).copy()

    table = {(kind, k): [Way.DOTS] * 11 + [HERE[-1]] for kind in K_QUANTS for k in (256, 512)}
    try:
        small_batches.force(Way.DOTS)
        dots = {n_rows: last_logits(n_rows) for n_rows in (n - 1, n)}
        small_batches.force(None)
        small_batches.fill_table(table)
        assert np.array_equal(last_logits(n - 1), dots[n - 1])
        from_panels = last_logits(n)
        assert not np.array_equal(from_panels, dots[n])
        assert np.abs(from_panels - dots[n]).max() < 0.2 * dots[n].std()  # ggml's tiles: as much
        with small_batches.alike():
            assert np.array_equal(last_logits(n), dots[n])
    finally:
        small_batches.force(None)
        small_batches.use("auto")
        context.close()
        model.close()


# ---- Rounding columns. ----


@pytest.fixture
def rounding() -> Iterator[ctypes.c_int64]:
    """1: by ours."""
    library = small_batches._library
    if library is None or not hasattr(library, "swarmllm_try_to_quantise"):
        pytest.skip("small_batches.c was not built")
    is_ours = ctypes.c_int64.in_dll(library, "swarmllm_quantises")
    before = is_ours.value
    if not small_batches.panel_units():
        pytest.skip("ggml rounds on this processor")
    assert before, "ours was found to have other bits"
    yield is_ours
    is_ours.value = before


def rounded(numbers: np.ndarray) -> bytes:
    blocks = np.full(len(numbers) // 256, 7, Q8_K)
    library = small_batches._library
    assert library is not None
    library.quantize_row_q8_K_ref(
        *(ctypes.c_void_p(each.ctypes.data) for each in (numbers, blocks)), ctypes.c_int64(len(numbers))
    )
    return blocks.tobytes()


numbers_of_a_block = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, 127.0, -127.0, 1e-38, 3e38]),
    st.floats(width=32),
)


@given(st.lists(numbers_of_a_block, min_size=1, max_size=20), st.integers(0, 2**32), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_columns_are_rounded_as_ggml_rounds_them(
    rounding: ctypes.c_int64, some: list[float], seed: int, has_noise: bool
) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.normal(0, 1, 512).astype(np.float32) if has_noise else np.zeros(512, np.float32)
    numbers[rng.integers(0, 512, len(some))] = some
    found = {}
    for rounding.value in (0, 1):
        found[rounding.value] = rounded(numbers)
    assert found[0] == found[1]


@pytest.mark.parametrize("largest", [[1.0, -1.0], [-1.0, 1.0]])
def test_of_equals_the_first_one_decides_the_sign(rounding: ctypes.c_int64, largest: list[float]) -> None:
    """Both in one register."""
    numbers = np.zeros(256, np.float32)
    numbers[10:12] = largest
    found = {}
    for rounding.value in (0, 1):
        found[rounding.value] = rounded(numbers)
    assert found[0] == found[1]


def test_ggml_rounds_where_ours_has_other_bits(rounding: ctypes.c_int64) -> None:
    library = small_batches._library
    assert library is not None
    numbers = np.ones(256, np.float32)
    ours, theirs = np.zeros(1, Q8_K), np.zeros(1, Q8_K)
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in (numbers, ours, theirs)]
    assert library.swarmllm_try_to_quantise(*addresses, ctypes.c_int64(256)) == 1
    assert ours.tobytes() == theirs.tobytes()
    assert theirs["values"].tolist() == [[-127] * 256]
