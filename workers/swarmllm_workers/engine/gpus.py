"""The GPUs that libllama sees, and how many layers of a model fit into their memory.

Where `n_gpu_layers` is "auto", the last layers of a segment go to the GPUs, as many as there is room for.
Only GPUs with memory of their own count for that: integrated ones use the machine's, from which a processor
computes as fast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from llama_cpp import llama_cpp as lib

from swarmllm_workers.kernels.interposing import mapped_libraries

_GPU, _INTEGRATED = 1, 2
"""GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU."""
RESERVE_BYTES: Final = 2**29
"""Left free: what drivers, other programs and the largest graph take beyond what is predicted."""
TEXT_MAX: Final = 128


@dataclass(frozen=True)
class Gpu:
    name: str
    """As ggml calls it, such as CUDA0."""
    description: str
    total_bytes: int
    free_bytes: int
    has_own_memory: bool


def gpus() -> tuple[Gpu, ...]:
    """As they are at this moment; () where libllama was built for none, or sees none."""
    if not lib.llama_supports_gpu_offload() or (ggml := _ggml()) is None:
        return ()
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(index))
        kind = ggml.ggml_backend_dev_type(device)
        if kind not in (_GPU, _INTEGRATED):
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        texts = (ggml.ggml_backend_dev_name(device), ggml.ggml_backend_dev_description(device))
        name, description = ((text or b"").decode("utf-8", "replace")[:TEXT_MAX] for text in texts)
        found.append(Gpu(name, description, total.value, free.value, kind == _GPU))
    return tuple(found)


def free_bytes(seen: Sequence[Gpu]) -> int:
    """Of those with memory of their own together, without what is left free on each."""
    own = (gpu for gpu in seen if gpu.has_own_memory)
    return sum(max(0, gpu.free_bytes - RESERVE_BYTES) for gpu in own)


def n_layers_that_fit(layers_bytes: Sequence[int], head_bytes: int, work_bytes: int, room_bytes: int) -> int:
    """`n_gpu_layers` as libllama counts: the last layers, and the output matrix as one more behind them.

    layers_bytes: weights, keys and values of each layer, from the first to the last. work_bytes: what
    computing takes on a GPU, whatever is there.
    """
    left = room_bytes - work_bytes
    n = 0
    for size in (head_bytes, *reversed(layers_bytes)):
        left -= size
        if left < 0:
            # The output matrix alone is not worth a way to the GPU and back.
            return n if n > 1 else 0
        n += 1
    return n


@cache
def _ggml() -> ctypes.CDLL | None:
    """The copy of ggml's registry of devices that libllama uses: others know of no device."""
    ggml = next(iter(mapped_libraries("libggml.")), None)
    if ggml is None:
        return None
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = (ctypes.c_size_t,)
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_type.argtypes = (ctypes.c_void_p,)
    ggml.ggml_backend_dev_type.restype = ctypes.c_int
    for function in (ggml.ggml_backend_dev_name, ggml.ggml_backend_dev_description):
        function.argtypes = (ctypes.c_void_p,)
        function.restype = ctypes.c_char_p
    pointer = ctypes.POINTER(ctypes.c_size_t)
    ggml.ggml_backend_dev_memory.argtypes = (ctypes.c_void_p, pointer, pointer)
    ggml.ggml_backend_dev_memory.restype = None
    return ggml
