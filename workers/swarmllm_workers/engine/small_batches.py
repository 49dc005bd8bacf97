"""A few rows in one batch: each computed as it would be alone, and faster than ggml would.

ggml computes one row of a batch by taking dot products, and two or more by tiles of four by four
(`llamafile_sgemm`). On a matrix that is in no cache the tiles are slower up to seven rows, and for most types
they round differently, so what a request is told depends on who shares its batch. `small_batches.c` answers
in the tiles' place that up to `ROWS_MAX` rows are none of their business.

Products of Q8_0 it computes itself, of any number of rows, with the bits of ggml's dot products (its tiles of
Q8_0 have the same). Measured with llama-cpp-python 0.3.36 on an EPYC with AVX-512, one thread, a 0.5B model,
ms of the processor per batch of 1, 2, 4, 8, 64 and 512 rows: 14, 80, 116, 130, 358 and 2,810 by ggml; 12, 12,
18, 28, 210 and 1,863 here. What makes the difference: the matrix is read once for all rows, in steps of some
rows of it, each of which asks memory for the step after the next; a block's sign, size and scale are taken
once for all rows; and two rows of the matrix share a register of 512 bits. (Row by row in ggml's own dot
products it was 19, 40, 68 and 122 for 1, 2, 4 and 8 rows, when that was measured.)

With up to ROWS_MAX rows, logits are those of a single row bit for bit for every type of `tests/workers/
factory.py` but Q2_K and Q4_K, which ggml rearranges when it loads them: those up to three rows. From eight
on ggml has other kernels for most types. What relies on it tries it out first (`speculation.py`).

Alternatives: building ggml without these tiles would slow prompts down, and there is no setting at run time.
Where no compiler was at hand, or another module had loaded libllama before, everything is as ggml has it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from swarmllm_workers.engine import interposing

ROWS_MAX: Final = 7

_library: ctypes.CDLL | None = None


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
        if has_kernels():
            _library.swarmllm_best_kernel.restype = ctypes.c_int64
            use_kernel(best_kernel())


def has_kernels() -> bool:
    """False where nothing was built, or before there were kernels."""
    return hasattr(_library, "swarmllm_best_kernel")


def best_kernel() -> int:
    """Of those for Q8_0, what this processor can do: 2 (AVX-512), 1 (AVX2) or 0."""
    return int(_library.swarmllm_best_kernel()) if _library is not None and has_kernels() else 0


def use_kernel(kernel: int) -> None:
    """From now on, in every model."""
    if _library is not None and has_kernels():
        ctypes.c_int64.in_dll(_library, "swarmllm_kernel").value = kernel


def connect() -> None:
    """After libllama is loaded: where the tiles are."""
    if _library is not None:
        interposing.tell_ggmls_own(_library, "llamafile_sgemm", "swarmllm_tiled")


def is_asked() -> bool:
    """Whether ggml has asked here since it was loaded."""
    return _library is not None and ctypes.c_int64.in_dll(_library, "swarmllm_n_asked").value > 0
