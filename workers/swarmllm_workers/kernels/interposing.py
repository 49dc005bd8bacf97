"""Interposes our C functions (`small_batches.c`, `row_attention.c`, `memory_calls.c`) before libllama's.

libllama's libraries look for their symbols among the global ones first, so a library that was made global
before libllama was loaded answers in its place. Where no compiler was at hand, or another module had loaded
libllama before, everything is as ggml has it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from swarmllm_workers import operating_system


def find_library(name: str) -> Path | None:
    """NAME.c as it was built beside this file, or None."""
    return next(iter(sorted(Path(__file__).parents[1].glob(f"_{name}*.so"))), None)


def stand_before_libllama(name: str) -> ctypes.CDLL | None:
    """NAME's functions are those that libllama will find. None where that cannot be any more."""
    path = find_library(name)
    if path is None or "llama_cpp.llama_cpp" in sys.modules:
        return None
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def mapped_paths(prefix: str) -> list[Path]:
    """The libraries in use whose file is called so. Found by name among the mapped files, as a wheel holds
    each three times, and another copy than the one in use has empty tables. Where nobody tells what is
    mapped, those of libllama's folder are tried."""
    mapped = operating_system.mapped_files()
    if mapped is None:
        mapped = {path for path in _beside_libllama(prefix) if _is_loaded(path)}
    return sorted(path for path in mapped if path.name.startswith(prefix))


def _beside_libllama(prefix: str) -> Iterator[Path]:
    package = sys.modules.get("llama_cpp")
    if package is not None and package.__file__ is not None:
        yield from (Path(package.__file__).parent / "lib").glob(f"{prefix}*")


def _is_loaded(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def mapped_libraries(prefix: str) -> list[ctypes.CDLL]:
    return [ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW) for path in mapped_paths(prefix)]


def tell_ggmls_own(
    library: ctypes.CDLL, function: str, variable: str, *, in_library: str = "libggml-cpu"
) -> None:
    """After libllama is loaded: the library's `variable` is where ggml's own `function` is."""
    for ggml in mapped_libraries(in_library):
        own = getattr(ggml, function, None)
        if own is None:
            continue  # a build without it asks nobody
        ctypes.c_void_p.in_dll(library, variable).value = ctypes.cast(own, ctypes.c_void_p).value
