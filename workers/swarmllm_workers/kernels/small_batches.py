"""Computes a few rows in one batch with the bits that each has alone, faster than ggml.

ggml computes one row of a batch by taking dot products, and two or more by tiles of four by four
(`llamafile_sgemm`). On a matrix that is in no cache the tiles are slower up to seven rows, and for most types
they round differently, so what a request is told depends on who shares its batch. `small_batches.c` answers
in the tiles' place that up to `ROWS_MAX` rows are none of their business.

Products of Q8_0 it can compute itself, of any number of rows, with the bits of ggml's dot products (its
tiles of Q8_0 have the same). The matrix is read once for all rows, and a block's sign, size and scale are
taken once. Whether that is faster than ggml depends on the processor. With one row and the same kernel
(BITS_512), a step of a 0.5B model took 12 ms instead of ggml's 14 on an EPYC with Zen 5, and 50 instead of 27
on one with Zen 4, where asking memory for rows ahead is slower than the processor's own prefetching. Without
AVX-512, one row of the matrix after the other with memory asked for 8 KiB ahead (STREAMED) took 50 ms on a
Zen 3 instead of ggml's 67. So there are four kernels, and which of them, or of ggml's two ways, computes a
product is measured on the machine (`kernel_tuning.py`) for each row length and number of rows. Ties go to
ggml. Figures: docs/benchmarks.md.

Products of Q4_K, Q5_K, Q6_K and IQ4_XS (`k_quants.c`) likewise, with the bits of ggml's dot products for any
number of rows: ggml unpacks a block's weights and scales again for each row, here they are unpacked once. One
step of a 0.6B model in Q4_K_M took 69 ms for eight rows instead of ggml's 193 on a Zen 4. From eight rows on
ggml has tiles for these types (`ggml_compute_forward_mul_mat_tiled`, before which `small_batches.c` stands
too), with other bits: they are taken where they are faster. For Q4_K see also `repacking.py`.

Batches of 64 rows and more, where nobody is promised the bits of single rows, may go other ways (`panels.c`):
some rows of the matrix are unpacked once for all of them. With AVX-512 VNNI and the matrix unit (AMX) numbers
are made of them that need no scale for each group of 32. With AVX2, K-quants only, products are added up in
16 bits for as long as they fit. All three have the same bits. Where there is the matrix unit, products of
Q4_0 come from panels in batches of every size (`panels_few.c`), so that a row has these bits in all of them:
sums of whole blocks take half of the operations that ggml's dot products take, whose eight parts of a block
are added up by themselves. On an Intel Xeon (family 6, model 167), eight rows took 0.57 of the time of
`pairs_32.c`, one row 0.78. Exact requests go on with the bits of dot products.

Products of experts in these types (`experts.c`) likewise: ggml asks for one expert after the other
(`ggml_compute_forward_mul_mat_id_tiled`), with the columns of the batch that chose it.

Products of Q5_0, which files in Q4_K_M have in the place of Q4_K where rows are no multiple of 256, and of
Q4_0, IQ4_NL and MXFP4 where ggml has not rearranged them, likewise (`blocks_32.c`). On an EPYC of family 25
without AVX-512, a product of Q5_0 took 0.63 of the time of ggml's faster way for four rows, 0.74 for eight,
0.75 for 64. With AVX-512, two rows of the matrix go side by side in a register (`pairs_32.c`), of Q8_0 too:
eight rows took 0.54 to 0.64 of the time of ggml's tiles on an Intel Xeon (family 6, model 167).

With up to ROWS_MAX rows, logits are those of a single row bit for bit for every type of `tests/workers/
factory.py` but Q2_K and, where ggml rearranges it when it loads it, Q4_K: those up to three rows. From eight
on ggml has other kernels for most types. What relies on it tries it out first (`speculation.py`).

On 64-bit ARM all of these types have kernels with NEON (`neon_blocks_32.c`, `neon_k_quants.c`), compared with
ggml's by emulation and never timed (docs/exactness.md).

Alternatives: building ggml without these tiles would slow prompts down, and there is no setting at run time.
Where no compiler was at hand, or another module had loaded libllama before, everything is as ggml has it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from swarmllm_proto.ipc.base import KernelMode
from swarmllm_workers.kernels import interposing
from swarmllm_workers.kernels.kernel_choice import ROW_CLASSES, MatrixType, Way
from swarmllm_workers.kernels.kernel_choice import ROWS_MAX as ROWS_MAX

_SHAPES_MAX: Final = 64
_WAYS: Final = 16
"""As small_batches.c has them."""

_K_ROWS_MAX: Final = 16
"""Rows up to which ours are taken for K-quants before anything was measured."""
_K_TILES: Final = "ggml_compute_forward_mul_mat_tiled"
_EXPERT_TILES: Final = "ggml_compute_forward_mul_mat_id_tiled"

_library: ctypes.CDLL | None = None
_mode: KernelMode = "auto"


class _Block(NamedTuple):
    size: int
    """Numbers."""
    n_bytes: int


_Q8_K: Final = _Block(256, 292)
_N_TRIED: Final = 16 * _Q8_K.size


class _Shape(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int64), ("k", ctypes.c_int64), ("ways", ctypes.c_uint8 * _WAYS))


def find_library() -> Path | None:
    """small_batches.c as it was built beside this file, or None."""
    return interposing.find_library("small_batches")


def install() -> None:
    """Before libllama is loaded."""
    global _library
    if _library is not None:
        return
    _library = interposing.stand_before_libllama("small_batches")
    if _library is not None:
        ctypes.c_int64.in_dll(_library, "swarmllm_rows_max").value = ROWS_MAX
        if has_ways():
            _library.swarmllm_last_way.restype = ctypes.c_int64
            use("auto")


def has_ways() -> bool:
    """False where nothing was built, or an earlier state of the C files."""
    return hasattr(_library, _EXPERT_TILES)


def last_way() -> Way:
    """The last of the ways to compute a product that this processor can go; it can go all before."""
    return Way(_library.swarmllm_last_way()) if _library is not None and has_ways() else Way.TILES


def panel_units() -> int:
    """How many of the units that panels.h names this processor has."""
    if _library is None or not hasattr(_library, "swarmllm_panels"):
        return 0
    _library.swarmllm_panels.restype = ctypes.c_int64
    return int(_library.swarmllm_panels())


def ways_of_panels() -> tuple[Way, ...]:
    """Those that are tried on this processor. AVX2 is not, where there is VNNI: Q6_K takes a fifth longer so
    than in `k_quants.c`, which is too near for a choice that should be the same every time. PANELS_FEW
    is only where there is the matrix unit: elsewhere, ggml has the bits of its dot products for one row."""
    possible = (Way.PANELS_AVX2, Way.PANELS_VNNI, Way.PANELS_AMX)[: panel_units()]
    if Way.PANELS_AMX in possible:
        possible += (Way.PANELS_FEW,)
    return possible if possible == (Way.PANELS_AVX2,) else possible[1:]


def has_pairs() -> bool:
    """Whether types in blocks of 32 have kernels with AVX-512 here."""
    return last_way() == Way.PAIRS


def use(mode: KernelMode) -> None:
    """Forget the table. "auto": until it is filled, and for what is not in it, single rows are ggml's, which
    nothing is known to be slower than, and others ours."""
    global _mode
    if _library is None or not has_ways():
        return
    _mode = mode
    ctypes.c_int64.in_dll(_library, "swarmllm_n_shapes").value = 0
    unmeasured = (ctypes.c_uint8 * _WAYS).in_dll(_library, "swarmllm_unmeasured")
    unmeasured_k = (ctypes.c_uint8 * _WAYS).in_dll(_library, "swarmllm_unmeasured_k")
    unmeasured_32 = (ctypes.c_uint8 * _WAYS).in_dll(_library, "swarmllm_unmeasured_32")
    for at, rows in enumerate(ROW_CLASSES):
        unmeasured_32[at] = _up_to(Way.AVX2_STREAMED, _unmeasured_k(mode, rows.first))
        unmeasured[at] = _unmeasured(mode, rows.first)
        unmeasured_k[at] = _unmeasured_k(mode, rows.first)


def _unmeasured(mode: KernelMode, n_rows: int) -> Way:
    if mode == "ggml" or (mode == "auto" and n_rows == 1) or last_way() <= Way.TILES:
        return Way.DOTS if n_rows <= ROWS_MAX else Way.TILES
    return _up_to(Way.IN_ORDER if n_rows <= 2 else Way.AVX512, last_way())


def _up_to(last: Way, way: Way) -> Way:
    """The earlier one; but ARM has one way of ours."""
    return way if way == Way.NEON else min(last, way)


def _unmeasured_k(mode: KernelMode, n_rows: int) -> Way:
    is_ours = mode == "ours" or (mode == "auto" and 1 < n_rows <= _K_ROWS_MAX)
    if not is_ours or last_way() <= Way.TILES:
        return Way.DOTS if n_rows <= ROWS_MAX else Way.TILES
    return _up_to(Way.IN_ORDER if n_rows <= 4 else Way.AVX512, last_way())


def keeps_rows_of_q4_k() -> bool:
    """Whether products of Q4_K are as fast here with rows as a file has them as ggml's are with rearranged
    ones. On ARM nobody has measured it: they are kept there for who asks for our kernels."""
    return last_way() > Way.TILES and _mode != "ggml" and (_mode == "ours" or last_way() != Way.NEON)


def fill_table(table: Mapping[tuple[MatrixType, int], Sequence[Way]]) -> None:
    """For each type and row length, in numbers, the way of each of ROW_CLASSES. Between two batches only."""
    if _library is None or not has_ways():
        return
    shapes = (_Shape * _SHAPES_MAX).in_dll(_library, "swarmllm_shapes")
    n_shapes = min(len(table), _SHAPES_MAX)
    for shape, ((kind, k), ways) in zip(shapes, table.items(), strict=False):
        shape.type, shape.k = kind, k // GGML_QUANT_SIZES[GGMLQuantizationType(kind)][0]
        for at, way in enumerate(ways):
            shape.ways[at] = way
    ctypes.c_int64.in_dll(_library, "swarmllm_n_shapes").value = n_shapes


def force(way: Way | None) -> None:
    """From now on every product, whatever the table says; None: the table counts again."""
    if _library is not None and has_ways():
        ctypes.c_int64.in_dll(_library, "swarmllm_forced").value = -1 if way is None else way


@contextmanager
def alike() -> Iterator[None]:
    """Within, the way of a product depends on neither the number of rows nor what was measured: dot products,
    or ours with their bits."""
    if _library is None or not has_ways():
        yield
        return
    forced = ctypes.c_int64.in_dll(_library, "swarmllm_forced")
    before, forced.value = forced.value, last_way() if last_way() > Way.TILES else Way.DOTS
    try:
        yield
    finally:
        forced.value = before


def connect() -> None:
    """After libllama is loaded: where the tiles are."""
    if _library is not None:
        if hasattr(_library, "swarmllm_leave"):
            interposing.tell_ggmls_own(
                _library, "ggml_backend_tensor_set", "swarmllm_tensor_set", in_library="libggml-base"
            )
        interposing.tell_ggmls_own(_library, "llamafile_sgemm", "swarmllm_tiled")
        if has_ways():
            for feature in ("dot", "sve") if last_way() == Way.NEON else ():
                ctypes.c_int64.in_dll(_library, f"swarmllm_ggml_has_{feature}").value = ggml_has(feature)
            _try_to_quantise(_library)
            interposing.tell_ggmls_own(_library, _K_TILES, "swarmllm_k_tiled")
            interposing.tell_ggmls_own(_library, _EXPERT_TILES, "swarmllm_expert_tiled")


def _try_to_quantise(library: ctypes.CDLL) -> None:
    """Columns of Q8_K are rounded by `quantise.c` if it makes of some numbers what ggml makes of them."""
    if not hasattr(library, "swarmllm_try_to_quantise"):
        return
    numbers = array("f")
    for at in range(_N_TRIED // 2):  # in the middle between two whole numbers, or nearly, of either sign
        numbers.extend(((at % 255 - 127) / 2, (at * 7919 % 25500 - 12750) / 200))
    numbers[_Q8_K.size * 2 : _Q8_K.size * 3] = array("f", bytes(4 * _Q8_K.size))
    blocks = [ctypes.create_string_buffer(len(numbers) // _Q8_K.size * _Q8_K.n_bytes) for _ in range(2)]
    library.swarmllm_try_to_quantise.argtypes = (*[ctypes.c_void_p] * 3, ctypes.c_int64)
    library.swarmllm_try_to_quantise(numbers.buffer_info()[0], *blocks, len(numbers))


def ggml_has(feature: str) -> bool:
    """Whether the libllama in use was compiled for it: it has other bits then."""
    name = {"dot": "ggml_cpu_has_dotprod", "sve": "ggml_cpu_has_sve"}[feature]
    return any(bool(getattr(ggml, name)()) for ggml in interposing.mapped_libraries("libggml-cpu"))


def joins_products() -> bool | None:
    """Whether our kernels on ARM were compiled with a product and a sum in one operation, which decides their
    bits; None on other processors."""
    if _library is None or not hasattr(_library, "swarmllm_joins_products"):
        return None
    _library.swarmllm_joins_products.restype = ctypes.c_int64
    return bool(_library.swarmllm_joins_products())


def multiplies_experts() -> bool:
    """Whether ggml asks here for the products of experts in K-quants, too."""
    return _has_ggmls_own("swarmllm_expert_tiled")


def has_k_tiles() -> bool:
    """Whether ggml has tiles of its own for K-quants. Before llama-cpp-python 0.3.36 it takes dot products of
    any number of rows."""
    return _has_ggmls_own("swarmllm_k_tiled")


def _has_ggmls_own(variable: str) -> bool:
    return _library is not None and has_ways() and bool(ctypes.c_void_p.in_dll(_library, variable).value)


def leaves_weights() -> bool:
    """Whether `leave_weights` does what it says."""
    return (
        _library is not None
        and hasattr(_library, "swarmllm_leave")
        and bool(ctypes.c_void_p.in_dll(_library, "swarmllm_tensor_set").value)
    )


def leave_weights(start: int, end: int) -> None:
    """In this thread, libllama fills no tensor with what lies at these addresses (`left_weights.c`)."""
    if _library is not None and hasattr(_library, "swarmllm_leave"):
        _library.swarmllm_leave(ctypes.c_void_p(start), ctypes.c_void_p(end))


def is_asked() -> bool:
    """Whether ggml has asked here since it was loaded."""
    return _library is not None and ctypes.c_int64.in_dll(_library, "swarmllm_n_asked").value > 0
