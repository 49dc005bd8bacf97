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

from swarmllm_proto.ipc import FlashAttention, KvType
from swarmllm_workers.kernels.interposing import stand_before_libllama

_library: ctypes.CDLL | None = None


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
