"""A few rows in one batch: each computed as it would be alone, and faster than ggml would.

ggml computes one row of a batch by taking dot products, and two or more by tiles of four by four
(`llamafile_sgemm`). On a matrix that is in no cache the tiles are slower up to seven rows, and they round
differently, so what a request is told depends on who shares its batch. `small_batches.c` answers in the
tiles' place that up to `ROWS_MAX` rows are none of their business.

Measured with llama-cpp-python 0.3.36 on an EPYC with AVX-512, one thread, a 0.5B model in Q8_0, ms per batch
of 1, 2, 4, 6 and 8 rows: 19, 73, 104, 151, 123 by tiles, and 19, 40, 68, 96, 122 row by row. Of Q8_0 tiles
give the same bits as rows, so there is a third way: a matrix that stays in the cache (the bundled model's) is
left to the tiles, and a larger one is given to them in strips of eight of its rows, the next strip on its
way from memory meanwhile, for 5 to 12 rows of a batch: 82 ms for 6 rows, 90 for 8.

With up to ROWS_MAX rows, logits are those of a single row bit for bit for every type of `tests/workers/
factory.py` but Q2_K and Q4_K, which ggml rearranges when it loads them: those up to three rows. From eight
on ggml has other kernels for most types. What relies on it tries it out first (`speculation.py`).

Alternatives: building ggml without these tiles would slow prompts down, and there is no setting at run time.
Where no compiler was at hand, or another module had loaded libllama before, everything is as ggml has it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

ROWS_MAX: Final = 7
CACHED_BYTES_MAX: Final = 2**20
"""Of one matrix: a core's second-level cache."""

_library: ctypes.CDLL | None = None


def find_library() -> Path | None:
    """small_batches.c as it was built beside this file, or None."""
    return next(iter(sorted(Path(__file__).parent.glob("_small_batches*.so"))), None)


def install() -> None:
    """Before libllama is loaded: its libraries look for their symbols among the global ones first."""
    global _library
    path = find_library()
    if path is None or "llama_cpp" in sys.modules or _library is not None:
        return
    _library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.c_int64.in_dll(_library, "swarmllm_rows_max").value = ROWS_MAX
    ctypes.c_int64.in_dll(_library, "swarmllm_cached_max").value = CACHED_BYTES_MAX


def connect() -> None:
    """After libllama is loaded: where the tiles are. Found by name among the mapped files, as a wheel holds
    the library three times, and another copy than the one in use has empty tables."""
    if _library is None:
        return
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in sorted(name for name in mapped if Path(name).name.startswith("libggml-cpu")):
        tiled = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW).llamafile_sgemm
        address = ctypes.cast(tiled, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(_library, "swarmllm_tiled").value = address


def is_asked() -> bool:
    """Whether ggml has asked here since it was loaded."""
    return _library is not None and ctypes.c_int64.in_dll(_library, "swarmllm_n_asked").value > 0
