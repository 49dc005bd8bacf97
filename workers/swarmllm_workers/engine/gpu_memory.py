"""How much memory the GPUs have left that libllama may put layers on."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Final

from llama_cpp import llama_cpp as lib

_GPU: Final = 1
"""GGML_BACKEND_DEVICE_TYPE_GPU: with memory of its own. Integrated ones (2) use the machine's."""


def gpu_free_bytes() -> int:
    """Of all GPUs with memory of their own together; 0 where libllama was built for none or sees none."""
    if not lib.llama_supports_gpu_offload() or (ggml := _ggml()) is None:
        return 0
    total = 0
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(index))
        if ggml.ggml_backend_dev_type(device) == _GPU:
            free, whole = ctypes.c_size_t(), ctypes.c_size_t()
            ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(whole))
            total += free.value
    return total


@cache
def _ggml() -> ctypes.CDLL | None:
    """The copy of ggml's registry of devices that libllama uses: others know of no device."""
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    path = next((name for name in sorted(mapped) if Path(name).name.startswith("libggml.so")), None)
    if path is None:
        return None
    ggml = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = (ctypes.c_size_t,)
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_type.argtypes = (ctypes.c_void_p,)
    ggml.ggml_backend_dev_type.restype = ctypes.c_int
    pointer = ctypes.POINTER(ctypes.c_size_t)
    ggml.ggml_backend_dev_memory.argtypes = (ctypes.c_void_p, pointer, pointer)
    ggml.ggml_backend_dev_memory.restype = None
    return ggml
