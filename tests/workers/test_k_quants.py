"""Products of K-quants with several columns have, to the bit, what ggml's dot product of each column has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm_proto.ipc import FlashAttention
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.kernels import interposing, repacking, small_batches
from swarmllm_workers.kernels.kernel_choice import IS_ARM, ROW_CLASSES, ROWS_MAX, MatrixType, Way
from swarmllm_workers.kernels.kernel_tuning import KernelTuning, ways
from swarmllm_workers.kernels.product_timing import ProductBench

from .conftest import MakeModel
from .factory import Spec
from .stepping import step_logits

pytestmark = pytest.mark.skipif(
    small_batches.find_library() is None or small_batches.last_way() <= Way.TILES,
    reason="small_batches.c was not built, or has no kernels for this processor",
)

KINDS = tuple(kind for kind in MatrixType if kind.is_k_quant)
KERNELS = tuple(way for way in Way if Way.TILES < way <= small_batches.last_way())
DOTS = {
    MatrixType.Q4_K: "q4_K",
    MatrixType.Q5_K: "q5_K",
    MatrixType.Q6_K: "q6_K",
    MatrixType.IQ4_XS: "iq4_xs",
}
BLOCK_BYTES = {MatrixType.Q4_K: 144, MatrixType.Q5_K: 176, MatrixType.Q6_K: 210, MatrixType.IQ4_XS: 136}
SCALES = {MatrixType.Q6_K: (208, 1), MatrixType.IQ4_XS: (0, 1)}
"""Where a block's floats lie, and how many."""
COLUMN = np.dtype([("scale", "<f4"), ("values", "i1", 256), ("sums", "<i2", 16)])
VALUES = ("random", "all bits set", "no bit set", "lowest", "tiny scales", "huge scales")


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
    at, n_scales = SCALES.get(kind, (0, 2))
    if values == "lowest" and kind == MatrixType.Q6_K:
        blocks[:, :, 192:208] = 128  # scales of -128
    size = {"tiny scales": 1e-7, "huge scales": 60000}.get(values, 0.01)
    scales = rng.uniform(-size, size, (m, k, n_scales)).astype(np.float16)
    blocks[:, :, at : at + 2 * n_scales] = scales.view(np.uint8).reshape(m, k, 2 * n_scales)
    return blocks


def columns(rng: np.random.Generator, n: int, k: int, values: str) -> np.ndarray:
    made = np.empty((n, k), COLUMN)
    made["scale"] = rng.normal(0, 1e30 if values == "huge scales" else 0.1, (n, k))
    made["values"] = rng.integers(-127, 128, (n, k, 256))
    if values in ("all bits set", "lowest"):
        made["values"] = 127 if values == "all bits set" else -128
    made["sums"] = made["values"].reshape(n, k, 16, 16).sum(-1)
    return made


def dot_products(kind: MatrixType, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """f32 [n, m], by ggml."""
    dot = getattr(interposing.mapped_libraries("libggml-cpu")[0], f"ggml_vec_dot_{DOTS[kind]}_q8_K")
    found = np.empty((len(b), len(a)), np.float32)
    none = ctypes.c_size_t(0)
    for j, column in enumerate(b):
        for i, row in enumerate(a):
            pointers = [ctypes.c_void_p(x.ctypes.data) for x in (found[j, i:], row, column)]
            dot(len(column) * 256, pointers[0], none, pointers[1], none, pointers[2], none, 1)
    return found


def product(kind: MatrixType, a: np.ndarray, b: np.ndarray, n_threads: int) -> np.ndarray:
    """f32 [n, m], what ggml gets for such blocks, from the threads one after the other."""
    library = small_batches._library
    assert library is not None
    library.llamafile_sgemm.restype = ctypes.c_bool
    (m, k), n = a.shape[:2], len(b)
    out = np.full((n, m), np.nan, np.float32)
    for index in range(n_threads):
        params = (ctypes.c_int * 2)(index, n_threads)
        sizes = [ctypes.c_int64(x) for x in (m, n, k)]
        ours = [(ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(k)) for x in (a, b)]
        result = ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(m)
        types = int(kind), int(Type.Q8_K), int(Type.F32)
        assert library.llamafile_sgemm(params, *sizes, *ours[0], *ours[1], *result, *types)
    return out


def assert_equal(kind: MatrixType, a: np.ndarray, b: np.ndarray, n_threads: int = 1) -> None:
    expected = dot_products(kind, a, b)
    for way in KERNELS:
        small_batches.force(way)
        found = product(kind, a, b, n_threads)
        same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
        assert same.all(), way


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_values_have_ggmls_bits(kind: MatrixType, values: str) -> None:
    rng = np.random.default_rng(1)
    a, b = matrix(rng, kind, 5, 3, values), columns(rng, 17, 3, values)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17):
        assert_equal(kind, a, b[:n].copy())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 20), k=st.integers(1, 40), n_threads=st.integers(1, 4))
def test_all_shapes_have_ggmls_bits(kind: MatrixType, m: int, n: int, k: int, n_threads: int) -> None:
    """Also shares of threads that are empty, and rows so long that two are computed together."""
    rng = np.random.default_rng(m * n * k)
    assert_equal(kind, matrix(rng, kind, m, k, "random"), columns(rng, n, k, "random"), n_threads)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_leave_the_cache_between_groups_of_columns_have_ggmls_bits(kind: MatrixType) -> None:
    rng = np.random.default_rng(3)
    assert_equal(kind, matrix(rng, kind, 90, 40, "random"), columns(rng, 11, 40, "random"))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_longer_than_there_is_room_for_are_ggmls(kind: MatrixType) -> None:
    library = small_batches._library
    assert library is not None
    library.llamafile_sgemm.restype = ctypes.c_bool
    small_batches.force(KERNELS[-1])
    nothing, sizes = ctypes.c_void_p(), [ctypes.c_int64(x) for x in (8, 2, 129)]
    stride, types = ctypes.c_int64(129), (int(kind), int(Type.Q8_K), int(Type.F32))
    params = (ctypes.c_int * 2)(0, 1)
    assert not library.llamafile_sgemm(params, *sizes, *(nothing, stride) * 3, *types)


@pytest.fixture
def path(make_model: MakeModel) -> Path:
    types = (Type.Q4_K, Type.Q6_K, Type.Q5_K, Type.IQ4_XS)
    return make_model(Spec("llama", n_layers=3, n_embd=256, n_ff=512, head_size=64, types=types))


def logits(path: Path, n_rows: int, flash_attention: FlashAttention = "auto") -> np.ndarray:
    """f32 [21, n_vocab]: the rows after a prompt of 7, `n_rows` at a time."""
    model = Model(path)
    settings = ContextSettings(
        n_ctx=256, n_slots=1, n_threads=2, n_outputs_max=32, flash_attention=flash_attention
    )
    context = Context(model, settings)
    tokens = np.random.default_rng(5).integers(0, model.n_vocab, 28).astype(np.int32)
    context.decode(tokens[:7], np.arange(7), 0, np.zeros(7, np.int8))
    found = step_logits(context, tokens, 7, n_rows)
    context.close()
    model.close()
    return found


@pytest.mark.parametrize("flash_attention", ["auto", "off"])
def test_rows_have_the_bits_that_they_have_alone_in_batches_of_any_size(
    path: Path, flash_attention: FlashAttention
) -> None:
    small_batches.force(Way.DOTS)
    alone = logits(path, 1, flash_attention)
    assert np.isfinite(alone).all()
    assert repacking.keeps_rows([path])
    sizes: tuple[int, ...] = (1, 2, 3, 5, 7, 8, 9, 16, 21)
    if flash_attention == "off" and small_batches.last_way() < Way.AVX512:
        # Attention that is not fused is computed by ggml's tiles from eight rows on.
        sizes = sizes[:5]
    for n_rows in sizes:
        for way in (Way.DOTS, *KERNELS):
            small_batches.force(way)
            assert np.array_equal(logits(path, n_rows, flash_attention), alone), (n_rows, way)


def test_ggmls_tiles_are_taken_where_the_table_says_so(path: Path) -> None:
    """From eight rows on; their bits are others. Where ggml has none, it takes dot products."""
    small_batches.force(Way.DOTS)
    alone = logits(path, 1)
    small_batches.force(Way.TILES)
    assert np.array_equal(logits(path, ROWS_MAX), alone)
    assert np.array_equal(logits(path, ROWS_MAX + 1), alone) != small_batches.has_k_tiles()


def test_products_of_ggmls_graphs_have_the_same_bits_in_every_way(path: Path) -> None:
    source = GgufFile(path)
    for kind in KINDS:
        with ProductBench(source, kind, 256, 1, cached_bytes=2**20) as bench:
            for n_rows in (1, 2, 7, 8, 17):
                found = set()
                for way in ways():
                    if way != Way.TILES and not way.has_own_sums:
                        small_batches.force(way)
                        found.add(bench.result(n_rows))
                        assert bench.run(n_rows) > 0
                assert len(found) == 1
    source.close()


def test_every_type_of_a_model_is_measured(path: Path, tmp_path: Path) -> None:
    tuning = KernelTuning("auto", tmp_path / "timings.json")
    tuning.tune(tuning.read([path]), 1)
    assert {choice.type for choice in tuning.choices} == {kind.name for kind in KINDS}
    again = KernelTuning("auto", tmp_path / "timings.json")
    assert again.tune(again.read([path]), 1, measures=False)
    assert again.choices == tuning.choices


@pytest.mark.skipif(IS_ARM, reason="ARM has a test of its own")
def test_files_keep_their_rows_where_our_kernels_are_worth_it(make_model: MakeModel, path: Path) -> None:
    assert repacking.keeps_rows([path])
    assert not repacking.rearranges([path])
    small_batches.use("ggml")
    assert not repacking.keeps_rows([path])
    assert repacking.rearranges([path])
    small_batches.use("auto")

    def made(architecture: str, *types: Type, n_experts: int = 0) -> Path:
        size = {"n_layers": 2, "n_embd": 256, "n_ff": 512, "head_size": 64, "n_experts": n_experts}
        return make_model(Spec(architecture, types=types, **size))

    assert not repacking.keeps_rows([made("llama", Type.Q6_K)])
    assert not repacking.keeps_rows([made("llama", Type.Q4_K, Type.Q2_K)])
    assert repacking.keeps_rows([made("llama", Type.Q4_K, Type.IQ4_NL)]) == small_batches.has_pairs()
    assert not repacking.keeps_rows([made("qwen3moe", Type.IQ4_NL, n_experts=4)])
    with_experts = made("qwen3moe", Type.Q4_K, n_experts=4)
    assert repacking.keeps_rows([with_experts]) == small_batches.multiplies_experts()
    assert not repacking.keeps_rows([path.with_name("none.gguf")])


@pytest.mark.parametrize("features", [set(), {"dot"}, {"dot", "sve"}])
def test_on_arm_files_keep_their_rows_only_for_who_asks_for_our_kernels(
    features: set[str], make_model: MakeModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repacking, "IS_ARM", True)
    monkeypatch.setattr(small_batches, "last_way", lambda: Way.NEON)
    monkeypatch.setattr(small_batches, "ggml_has", features.__contains__)
    size = {"n_layers": 2, "n_embd": 256, "n_ff": 512, "head_size": 64}
    q8_0, q5_0 = (make_model(Spec("llama", types=(kind,), **size)) for kind in (Type.Q8_0, Type.Q5_0))
    small_batches.use("auto")
    assert not any(repacking.keeps_rows([each]) for each in (path, q8_0, q5_0))
    assert [repacking.rearranges([each]) for each in (path, q8_0)] == ["dot" in features] * 2
    assert not repacking.rearranges([q5_0])
    small_batches.use("ours")
    assert repacking.keeps_rows([path])
    assert repacking.keeps_rows([q8_0]) == ("sve" not in features)
    assert not repacking.keeps_rows([path.with_name("none.gguf")])


EXPERT = Spec(
    "qwen3moe",
    n_layers=2,
    n_embd=256,
    n_ff=512,
    head_size=64,
    qk_norm=True,
    n_experts=4,
    types=(Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS),
)


def test_experts_have_the_bits_that_a_row_has_alone_in_batches_of_any_size(make_model: MakeModel) -> None:
    """Also where more columns than a kernel takes at a time chose one expert."""
    path = make_model(EXPERT)
    small_batches.force(Way.DOTS)
    alone = logits(path, 1)
    for n_rows in (1, 2, 5, 8, 9, 21):
        for way in KERNELS:
            small_batches.force(way)
            assert np.array_equal(logits(path, n_rows), alone), (n_rows, way)
    # Of eight rows for one expert on, ggml's own are others, where it has them.
    small_batches.force(Way.TILES)
    assert np.array_equal(logits(path, 21), alone) != small_batches.multiplies_experts()


def test_experts_are_measured_as_other_matrices_are(make_model: MakeModel, tmp_path: Path) -> None:
    path = make_model(EXPERT)
    tuning = KernelTuning("auto", tmp_path / "timings.json")
    tuning.tune(tuning.read([path]), 1)
    source = GgufFile(path)
    experts = {(each.type.name, each.shape[0]) for each in source.tensors.values() if len(each.shape) == 3}
    source.close()
    assert {k for _, k in experts} == {256, 512}
    if not small_batches.multiplies_experts():
        experts = {(type_, k) for type_, k in experts if type_ != "Q4_K"}  # ggml rearranges them
    assert experts <= {(choice.type, choice.k) for choice in tuning.choices}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(
    m=st.integers(1, 300),
    n_batch=st.integers(1, 12),
    n_used=st.integers(1, 3),
    n_threads=st.integers(1, 3),
    is_one=st.booleans(),
)
def test_one_expert_times_the_columns_that_chose_it_has_ggmls_bits(
    kind: MatrixType, m: int, n_batch: int, n_used: int, n_threads: int, is_one: bool
) -> None:
    """`is_one`: the experts of a batch row have one column together, as gates have, and not one each."""
    rng = np.random.default_rng(m + n_batch)
    k, n_experts, chosen_expert = 2, 3, 1
    weights = np.stack([matrix(rng, kind, m, k, "random") for _ in range(n_experts)])
    n_slots = 1 if is_one else n_used
    b = columns(rng, n_batch * n_slots, k, "random").reshape(n_batch, n_slots, k)
    pairs = [(slot, row) for row in range(n_batch) for slot in range(n_used) if rng.random() < 0.7]
    chosen = np.array(pairs, np.int32).reshape(-1, 2)
    out = np.full((n_batch, n_used, m), np.nan, np.float32)
    for way in KERNELS:
        small_batches.force(way)
        out[:] = np.nan
        for index in range(n_threads):
            assert not len(chosen) or ask_for_expert(
                kind, weights, b, chosen, out, chosen_expert, index, n_threads
            )
        for slot, row in pairs:
            expected = dot_products(kind, weights[chosen_expert], b[row, slot % n_slots][None])[0]
            assert np.array_equal(out[row, slot].view(np.uint32), expected.view(np.uint32))
        n_written = int(np.isfinite(out).sum())
        assert n_written <= len(pairs) * m


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_never_multiplied_from_panels(kind: MatrixType) -> None:
    """They go the way of a smaller batch, however many columns chose one."""
    rng = np.random.default_rng(1)
    m, k, n = 20, 2, 70
    weights = np.stack([matrix(rng, kind, m, k, "random")])
    b = columns(rng, n, k, "random").reshape(n, 1, k)
    chosen = np.stack([np.zeros(n, np.int32), np.arange(n, dtype=np.int32)], axis=1)
    out = np.full((n, 1, m), np.nan, np.float32)
    ways = [Way.DOTS] * (len(ROW_CLASSES) - 2) + [KERNELS[-1], Way.PANELS_AVX2]
    small_batches.fill_table({(kind, 256 * k): ways})
    assert ask_for_expert(kind, weights, b, chosen, out, 0, 0, 1)
    expected = dot_products(kind, weights[0], b[:, 0])
    assert np.array_equal(out[:, 0].view(np.uint32), expected.view(np.uint32))
    small_batches.force(Way.PANELS_AVX2)
    assert not ask_for_expert(kind, weights, b, chosen, out, 0, 0, 1), "ggml's dot products"


class Head(ctypes.Structure):
    """Of a `ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_size_t * 4),
        ("operation", ctypes.c_int),
        ("settings", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("operands", ctypes.c_void_p * 10),
        ("viewed", ctypes.c_void_p),
        ("viewed_at", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    )


def ask_for_expert(
    kind: MatrixType,
    weights: np.ndarray,
    b: np.ndarray,
    chosen: np.ndarray,
    out: np.ndarray,
    expert: int,
    thread: int,
    n_threads: int,
) -> bool:
    """As ggml does, which has made columns of Q8_K out of f32 before."""
    library = small_batches._library
    assert library is not None
    ask = library.ggml_compute_forward_mul_mat_id_tiled
    ask.restype = ctypes.c_bool
    n_experts, m, k, block_bytes = weights.shape
    n_batch, n_slots = b.shape[:2]
    heads = Head(), Head(), Head()
    a, inputs, result = heads
    a.type, a.data = int(kind), weights.ctypes.data
    a.shape[:] = (k * 256, m, n_experts, 1)
    a.strides[:] = (block_bytes, k * block_bytes, m * k * block_bytes, 0)
    inputs.type = int(Type.F32)
    inputs.shape[:] = (k * 256, n_slots, n_batch, 1)
    result.data = out.ctypes.data
    result.strides[:] = (4, 4 * m, 4 * m * out.shape[1], 0)
    result.operands[:2] = (ctypes.addressof(a), ctypes.addressof(inputs))
    params = (ctypes.c_int64 * 3)(thread | n_threads << 32, 0, b.ctypes.data)
    pointer = ctypes.c_void_p(chosen.ctypes.data)
    sizes = ctypes.c_int64(expert), ctypes.c_int64(len(chosen))
    return bool(ask(params, ctypes.byref(result), *sizes, pointer, None))
