"""Fused attention ("flash attention") whose rows have the same bits in every batch and on every machine.

ggml's fused attention skips cells of other requests, where the plain one multiplies with all cells up to the
last that is in use and masks what is not the request's own. Measured with llama-cpp-python 0.3.36 on an
EPYC, one thread, a 0.5B model in Q8_0, ms of the processor per step of 1, 4 and 16 streams: 23, 34 and 103
plain, 21, 27 and 94 fused; while 3,584 more cells hold what earlier requests left, 32, 73 and 179 plain, 21,
30 and 109 fused (`python -m bench.attention`).

But from 512 cells on it cuts the work of a single row into one part per thread, each summed up by itself, so
its bits depend on the number of threads, and differ from those that the row gets in a batch of two. Two
stages with other numbers of threads would not make the text of one node, and checking guesses in a batch
(`speculation.py`) not that of steps. `row_attention.c` has single rows taken through their cells in order, as
in any batch of less than 64 rows; threads share the heads then. Where it was not built, `auto` means plain
attention.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final, NamedTuple

from swarmllm_proto.ipc import FlashAttention, KvType
from swarmllm_workers.kernels.interposing import mapped_libraries, stand_before_libllama

_SHAPES_MAX: Final = 64
"""As row_attention.c has it."""

_library: ctypes.CDLL | None = None


class HeadShape(NamedTuple):
    """What `row_attention_avx2.c` is chosen by."""

    key: int
    """Numbers of a key."""
    value: int
    """Of a value."""
    group: int
    """Heads of queries for each head of keys."""


class RowChoices(NamedTuple):
    """Whether ours computes it."""

    single: bool
    """A row that is alone in its batch."""
    several: bool
    """Batches of 2 to 63 rows."""
    order: int = 0
    """Of sums, as `row_attention_avx2.h` numbers them."""


class _Shape(ctypes.Structure):
    _fields_ = (
        ("key", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("is_ours", ctypes.c_int64 * 2),
        ("order", ctypes.c_int64),
    )


def install() -> None:
    """Before libllama is loaded."""
    global _library
    if _library is None:
        _library = stand_before_libllama("row_attention")


def is_installed() -> bool:
    return _library is not None


def leave_out() -> None:
    """This build of libllama never asks here."""
    global _library
    _library = None


def chosen(setting: FlashAttention, kv_type: KvType) -> FlashAttention:
    """Fused attention is not taken by itself where it would give a row other bits alone than in a batch."""
    return "off" if setting == "auto" and kv_type == "f16" and not is_installed() else setting


def is_asked() -> bool:
    """Whether ggml has asked here since it was loaded."""
    return _library is not None and ctypes.c_int64.in_dll(_library, "swarmllm_n_attended").value > 0


def computes_rows(shape: HeadShape) -> bool:
    """Whether ours can compute it on this processor at all, after libllama was loaded. False of an earlier
    state of the C files."""
    if _library is None or not hasattr(_library, "swarmllm_last_order"):
        return False
    _library.swarmllm_attention_bytes.restype = ctypes.c_size_t
    sizes = ctypes.c_int64(shape.key), ctypes.c_int64(shape.value)
    is_whole = all(0 < size <= 256 and size % head_step() == 0 for size in shape[:2])
    return is_whole and bool(_library.swarmllm_attention_bytes(*sizes))


def head_step() -> int:
    """Ours computes heads of a multiple of so many numbers."""
    return 64 if _has_wider_sums() else 32


def orders() -> tuple[int, ...]:
    """The orders in which ggml may make its sums here, the likeliest last."""
    if _library is None or not hasattr(_library, "swarmllm_last_order") or not _has_wider_sums():
        return (0,)
    _library.swarmllm_last_order.restype = ctypes.c_int64
    return tuple(range(1, _library.swarmllm_last_order() + 1)) or (0,)


def _has_wider_sums() -> bool:
    libraries = mapped_libraries("libggml-cpu")
    return any(hasattr(ggml, "ggml_cpu_has_avx512") and ggml.ggml_cpu_has_avx512() for ggml in libraries)


def fill_table(table: Mapping[HeadShape, RowChoices]) -> None:
    """What ours computes; all else is ggml's. Between two batches only."""
    if _library is None or not hasattr(_library, "swarmllm_attention_bytes"):
        return
    shapes = (_Shape * _SHAPES_MAX).in_dll(_library, "swarmllm_attention_shapes")
    n_shapes = min(len(table), _SHAPES_MAX)
    for each, (shape, choices) in zip(shapes, table.items(), strict=False):
        each.key, each.value, each.group = shape
        each.is_ours[0], each.is_ours[1], each.order = choices
    ctypes.c_int64.in_dll(_library, "swarmllm_n_attention_shapes").value = n_shapes


def force(is_ours: bool | None, order: int | None = None) -> None:
    """From now on ours computes every row that it can, or none; None: the table counts again. `order`: of its
    sums; None: the likeliest."""
    if _library is not None and hasattr(_library, "swarmllm_attention_bytes"):
        forced = ctypes.c_int64.in_dll(_library, "swarmllm_attention_forced")
        order = orders()[-1] if order is None else order
        forced.value = -1 if is_ours is None else 1 + order if is_ours else 0


def has_computed() -> bool:
    """Whether ours has computed anything since this was asked last."""
    if _library is None or not hasattr(_library, "swarmllm_n_ours"):
        return False
    n_ours = ctypes.c_int64.in_dll(_library, "swarmllm_n_ours")
    found, n_ours.value = n_ours.value > 0, 0
    return found
