"""Functions of the ggml that libllama uses, for graphs of our own: a few operations without a model."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

from swarmllm_workers.kernels import cpu_variants, interposing

F32: Final = 0
F16: Final = 1
Q8_0: Final = 8
"""ggml's types."""


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


_FUNCTIONS: Final[dict[str, tuple[str, Any, tuple[Any, ...]]]] = {
    "ggml_init": ("libggml-base", ctypes.c_void_p, (InitParams,)),
    "ggml_free": ("libggml-base", None, (ctypes.c_void_p,)),
    "ggml_new_tensor_2d": (
        "libggml-base",
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
    ),
    "ggml_new_tensor_4d": (
        "libggml-base",
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 4),
    ),
    "ggml_scale": ("libggml-base", ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float)),
    "ggml_flash_attn_ext": (
        "libggml-base",
        ctypes.c_void_p,
        (*[ctypes.c_void_p] * 5, *[ctypes.c_float] * 3),
    ),
    "ggml_permute": ("libggml-base", ctypes.c_void_p, (*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 4)),
    "ggml_mul_mat": ("libggml-base", ctypes.c_void_p, (ctypes.c_void_p,) * 3),
    "ggml_rms_norm": ("libggml-base", ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float)),
    "ggml_soft_max": ("libggml-base", ctypes.c_void_p, (ctypes.c_void_p,) * 2),
    "ggml_silu": ("libggml-base", ctypes.c_void_p, (ctypes.c_void_p,) * 2),
    "ggml_gelu": ("libggml-base", ctypes.c_void_p, (ctypes.c_void_p,) * 2),
    "ggml_get_data": ("libggml-base", ctypes.c_void_p, (ctypes.c_void_p,)),
    "ggml_new_graph_custom": (
        "libggml-base",
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool),
    ),
    "ggml_build_forward_expand": ("libggml-base", None, (ctypes.c_void_p, ctypes.c_void_p)),
    "ggml_backend_graph_compute": ("libggml-base", ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p)),
    "ggml_backend_tensor_alloc": ("libggml-base", ctypes.c_int, (ctypes.c_void_p,) * 3),
    "ggml_backend_cpu_buffer_from_ptr": (
        "libggml-base",
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_size_t),
    ),
    "ggml_backend_buffer_free": ("libggml-base", None, (ctypes.c_void_p,)),
    "ggml_backend_free": ("libggml-base", None, (ctypes.c_void_p,)),
    "ggml_backend_cpu_init": ("libggml-cpu", ctypes.c_void_p, ()),
    "ggml_backend_cpu_set_n_threads": ("libggml-cpu", None, (ctypes.c_void_p, ctypes.c_int)),
}


@cache
def functions() -> dict[str, Any]:
    """Functions of the ggml that libllama uses, by name. Raises LookupError where one is missing."""
    cpu_variants.load()
    libraries: dict[str, ctypes.CDLL] = {}
    found = {}
    for name, (library, result, arguments) in _FUNCTIONS.items():
        if library not in libraries:
            libraries[library] = next(iter(interposing.mapped_libraries(library)), None) or _missing(library)
        function = getattr(libraries[library], name, None) or _missing(name)
        function.restype, function.argtypes = result, arguments
        found[name] = function
    return found


def _missing(what: str) -> Any:
    raise LookupError(f"{what} is not in this build of libllama")


def no_memory() -> Any:
    raise MemoryError("ggml gave no memory")
