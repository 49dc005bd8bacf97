"""Keeps ggml from the processor's matrix unit (AMX), which newer processors of Intel have.

Where ggml was compiled for AMX, as `-march=native` does there, it rearranges matrices of most types for that
unit. Two things speak against it:

- GCC 12 drops most of the settings that ggml writes for the unit: its `_tile_loadconfig` does not say that it
  reads more than eight bytes of them. At -O3, as llama-cpp-python is compiled, the first product of two rows
  then ends the process (a general protection fault, with GCC 12.2 and llama-cpp-python 0.3.36).
- Products for that unit are computed where `small_batches.c` is not asked, and a row of a batch has other
  bits than alone.

So `amx.c` answers in ggml's place that there is no such memory, and a file is loaded as on any other
processor with AVX-512.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Final

from swarmllm_workers.kernels import cpu_variants, interposing

_NAME: Final = b"AMX"
"""As ggml calls the memory in which it rearranges matrices for it."""
_CPU: Final = 0
"""ggml's type of device."""

_library: ctypes.CDLL | None = None


def install() -> None:
    """Before libllama is loaded."""
    global _library
    if _library is None:
        _library = interposing.stand_before_libllama("amx")


@cache
def is_used() -> bool:
    """Whether ggml rearranges matrices for AMX where it may rearrange them: it was compiled for it, and does
    not ask `amx.c`. After libllama is loaded."""
    return _NAME in _memory_for_rearranging()


def _memory_for_rearranging() -> Iterator[bytes]:
    """The names of its kinds."""
    cpu_variants.load()
    registry = next(iter(interposing.mapped_libraries("libggml.so")), None)
    base = next(iter(interposing.mapped_libraries("libggml-base")), None)
    if registry is None or base is None:
        return
    device = _pointer(registry, "ggml_backend_dev_by_type", ctypes.c_int(_CPU))
    of_device = device and _pointer(base, "ggml_backend_dev_backend_reg", device)
    asking = of_device and _pointer(
        base,
        "ggml_backend_reg_get_proc_address",
        of_device,
        ctypes.c_char_p(b"ggml_backend_dev_get_extra_bufts"),
    )
    if asking is None or asking.value is None:
        return
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(asking.value)(device)
    base.ggml_backend_buft_name.restype = ctypes.c_char_p
    for kind in kinds:
        if not kind:
            return
        yield base.ggml_backend_buft_name(ctypes.c_void_p(kind))


def _pointer(library: ctypes.CDLL, function: str, *arguments: object) -> ctypes.c_void_p | None:
    found = getattr(library, function, None)
    if found is None:
        return None
    found.restype = ctypes.c_void_p
    value = found(*arguments)
    return ctypes.c_void_p(value) if value else None
