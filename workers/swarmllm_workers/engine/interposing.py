"""Interposes our C functions (`small_batches.c`, `row_attention.c`) before libllama's.

libllama's libraries look for their symbols among the global ones first, so a library that was made global
before libllama was loaded answers in its place. Where no compiler was at hand, or another module had loaded
libllama before, everything is as ggml has it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def find_library(name: str) -> Path | None:
    """NAME.c as it was built beside this file, or None."""
    return next(iter(sorted(Path(__file__).parents[1].glob(f"_{name}*.so"))), None)


def stand_before_libllama(name: str) -> ctypes.CDLL | None:
    """NAME's functions are those that libllama will find. None where that cannot be any more."""
    path = find_library(name)
    if path is None or "llama_cpp" in sys.modules:
        return None
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def mapped_paths(prefix: str) -> list[Path]:
    """The libraries in use whose file is called so. Found by name among the mapped files, as a wheel holds
    each three times, and another copy than the one in use has empty tables."""
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(Path(name) for name in mapped if Path(name).name.startswith(prefix))


def mapped_libraries(prefix: str) -> list[ctypes.CDLL]:
    return [ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW) for path in mapped_paths(prefix)]


def tell_ggmls_own(library: ctypes.CDLL, function: str, variable: str) -> None:
    """After libllama is loaded: the library's `variable` is where ggml's own `function` is."""
    for ggml in mapped_libraries("libggml-cpu"):
        own = getattr(ggml, function, None)
        if own is None:
            continue  # a build without it asks nobody
        ctypes.c_void_p.in_dll(library, variable).value = ctypes.cast(own, ctypes.c_void_p).value
