"""Decides whether ggml may rearrange the matrices of a file when it loads them ("repacking").

On x86 ggml copies matrices of some types into memory of its own, with the rows of eight next to each other,
because its products with a single row are faster so. They are then computed where `small_batches.c` is not
asked, and four rows of a batch and more have other bits than single rows. For Q4_K, with the kernels of
`k_quants.c` (AVX2 is enough), neither is worth it: the file's pages stay mapped, products with one row are as
fast, with more rows faster, and each row has the bits that it has alone. libllama decides once for a file, so
a file that has other such types too is rearranged as ever (`arranged_weights.py`: once for all of its parts),
and so is one with experts where ggml asks nobody for their products.

With AVX-512 the same goes for Q4_0, IQ4_NL and MXFP4 without experts (`pairs_32.c`). On an Intel Xeon (family
6, model 167), products with 2 to 64 rows took 0.58 to 0.93 of the time of ggml's with rearranged matrices.
With one row they took 0.96 to 1.2 of it where the matrices were in the processor's cache. From memory, their
reading decides, and the file's pages may be huge ones: tokens of a 0.6B model in Q4_0 took 0.66 of the time
of llama-cpp-python's, which had the matrix unit.

Where ggml would rearrange for AMX and cannot be kept from it (`amx.py`), everything stays as it is.

On ARM, ggml rearranges most types where it was compiled for dot products of bytes, and nothing else. Whether
that is faster than the kernels of `neon_blocks_32.c` and `neon_k_quants.c` has not been measured, so it may
(`inference.kernels = "ours"`: it may not).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from gguf.constants import GGMLQuantizationType as Type

from swarmllm_workers.kernels import amx, interposing, small_batches
from swarmllm_workers.kernels.kernel_choice import IS_ARM

REARRANGED: Final = frozenset({Type.Q4_K, Type.Q4_0, Type.Q2_K, Type.IQ4_NL, Type.MXFP4})
"""What ggml rearranges on x86."""
_KEPT: Final = frozenset({Type.Q4_K, Type.Q4_0, Type.IQ4_NL, Type.MXFP4})
"""Of these the ones that ours are as fast with, or faster, in the file's order, with AVX-512."""
_WITHOUT_SVE: Final = frozenset({Type.Q4_0, Type.Q8_0})
"""Ours on ARM have not the bits of a libllama that was compiled for SVE."""
_ON_ARM: Final = frozenset({Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.MXFP4, *_WITHOUT_SVE})
"""What ggml rearranges there, where it was compiled for dot products of bytes."""
_EXPERT_COUNT: Final = b"expert_count"
"""Of the metadata, after the architecture."""
_UNMULTIPLIED: Final = b"token_embd.weight"
"""Looked up, and never rearranged."""


def keeps_rows(paths: Iterable[Path]) -> bool:
    """Whether the files of a model are to be left as they are, by their headers. Every segment that is cut
    from a model gets the answer that the whole gets. False where a file cannot be read: libllama says why."""
    if amx.is_used():
        return True
    if not small_batches.keeps_rows_of_q4_k():
        return False
    types, has_experts = _read(paths)
    if has_experts and not small_batches.multiplies_experts():
        return False
    if IS_ARM:
        has_bits = not (small_batches.ggml_has("sve") and _WITHOUT_SVE.intersection(types))
        return has_bits and bool(_ON_ARM.intersection(types))
    rearranged = REARRANGED.intersection(types)
    kept = _KEPT if small_batches.has_pairs() and not has_experts else {Type.Q4_K}
    return bool(rearranged) and rearranged <= kept


def rearranges(paths: Iterable[Path]) -> bool:
    """Whether ggml may have copies of matrices of these files in another order."""
    paths = tuple(paths)
    return bool(rearranged_types().intersection(_read(paths)[0])) and not keeps_rows(paths)


def rearranged_types() -> frozenset[int]:
    """Types of matrices that ggml rearranges on this processor, if it may."""
    if not IS_ARM:
        return REARRANGED
    return _ON_ARM if small_batches.ggml_has("dot") else frozenset()


def _read(paths: Iterable[Path]) -> tuple[set[int], bool]:
    """The types of the matrices, and whether there are experts."""
    types: set[int] = set()
    has_experts = False
    for path in paths:
        with _Header(path) as header:
            types |= header.types()
            has_experts |= header.has_experts()
    return types, has_experts


_U32: Final = 4
_STRING: Final = 8
"""Types of values of the metadata."""


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _Header:
    """As libllama itself reads it, which takes milliseconds where a vocabulary is large."""

    def __init__(self, path: Path) -> None:
        self._gguf = _gguf()
        self._handle = self._gguf["gguf_init_from_file"](os.fsencode(path), _InitParams(True, None))
        self._count = int(self._gguf["gguf_get_n_tensors"](self._handle)) if self._handle else 0

    def __enter__(self) -> _Header:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle:
            self._gguf["gguf_free"](self._handle)

    def types(self) -> set[int]:
        return {
            int(self._gguf["gguf_get_tensor_type"](self._handle, at))
            for at in range(self._count)
            if self._gguf["gguf_get_tensor_name"](self._handle, at) != _UNMULTIPLIED
        }

    def has_experts(self) -> bool:
        if not self._handle:
            return False
        at = self._gguf["gguf_find_key"](self._handle, b"general.architecture")
        if at < 0 or self._gguf["gguf_get_kv_type"](self._handle, at) != _STRING:
            return False
        architecture = self._gguf["gguf_get_val_str"](self._handle, at)
        at = self._gguf["gguf_find_key"](self._handle, architecture + b"." + _EXPERT_COUNT)
        if at < 0 or self._gguf["gguf_get_kv_type"](self._handle, at) != _U32:
            return False
        return int(self._gguf["gguf_get_val_u32"](self._handle, at)) > 0


_FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "gguf_init_from_file": (ctypes.c_void_p, (ctypes.c_char_p, _InitParams)),
    "gguf_free": (None, (ctypes.c_void_p,)),
    "gguf_get_n_tensors": (ctypes.c_int64, (ctypes.c_void_p,)),
    "gguf_get_tensor_type": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int64)),
    "gguf_get_tensor_name": (ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int64)),
    "gguf_find_key": (ctypes.c_int64, (ctypes.c_void_p, ctypes.c_char_p)),
    "gguf_get_kv_type": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int64)),
    "gguf_get_val_str": (ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int64)),
    "gguf_get_val_u32": (ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_int64)),
}


@cache
def _gguf() -> dict[str, Any]:
    library = interposing.mapped_libraries("libggml-base")[0]
    found = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        found[name] = getattr(library, name)
        found[name].restype, found[name].argtypes = result, arguments
    return found
