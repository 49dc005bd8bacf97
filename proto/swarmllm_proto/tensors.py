"""Tensors as bytes: `[u32 ndim][u32 x ndim shape][u32 dtype tag][data, row-major]`, little-endian.

Not npy: its header is a Python literal that a hostile peer would have us parse, and its length varies. Not
MessagePack: the data must stay where it was received. With two dimensions the data begins 16 bytes in, so a
decoded view is aligned for SIMD.
"""

from __future__ import annotations

from math import prod
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmllm_proto.errors import BadTensor
from swarmllm_proto.frames import Buffer, Pieces
from swarmllm_proto.limits import TENSOR_MAX_ELEMENTS, TENSOR_MAX_NDIM

Tensor: TypeAlias = npt.NDArray[Any]

DTYPE_TAGS: Final[dict[np.dtype[Any], int]] = {
    np.dtype("<f4"): 0,
    np.dtype("<f2"): 1,
    np.dtype("<i4"): 2,
}
_DTYPES: Final = {tag: dtype for dtype, tag in DTYPE_TAGS.items()}
_U32: Final = Struct("<I")
_HEADS: Final = tuple(Struct(f"<{ndim + 2}I") for ndim in range(TENSOR_MAX_NDIM + 1))
_ROWS_HEAD: Final = _HEADS[2]
_F32: Final = np.dtype("<f4")


def encode_tensor(array: Tensor) -> Pieces:
    """Head and data, to be written in order. The data is a view of the array where it is C-contiguous.

    Raises BadTensor for a dtype or number of dimensions that the format does not carry.
    """
    tag = DTYPE_TAGS.get(array.dtype)
    if tag is None:
        raise BadTensor("tensor.dtype", f"{array.dtype} cannot be sent (float32, float16 and int32 can)")
    if not 1 <= array.ndim <= TENSOR_MAX_NDIM:
        raise BadTensor("tensor.ndim", f"{array.ndim} dimensions (1 to {TENSOR_MAX_NDIM} can be sent)")
    head = _HEADS[array.ndim].pack(array.ndim, *array.shape, tag)
    if array.size == 0:
        return [head]
    return [head, np.ascontiguousarray(array).data.cast("B")]


def tensor_bytes(array: Tensor) -> bytes:
    """The encoded tensor in one piece, for transports that take no list (one copy)."""
    if array.dtype is _F32 and array.ndim == 2 and array.size:
        # What a decode step sends: what is done below, in fewer lines of code.
        return b"".join((_ROWS_HEAD.pack(2, *array.shape, 0), np.ascontiguousarray(array).data))
    return b"".join(encode_tensor(array))


def decode_tensor(
    buffer: Buffer, *, max_elements: int = TENSOR_MAX_ELEMENTS, field: str = "tensor"
) -> Tensor:
    """A read-only view of `buffer`, which it keeps alive. Raises BadTensor with `field` as the first part of
    its name."""
    view = memoryview(buffer)
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    n_bytes = len(view)
    if n_bytes > _ROWS_HEAD.size:
        # Rows of f32, which a decode step waits for: what is found below, in fewer lines of code.
        n_axes, n_rows, width, kind = _ROWS_HEAD.unpack_from(view)
        n_elements = n_rows * width
        if (
            (n_axes, kind) == (2, 0)
            and n_elements <= max_elements
            and n_bytes == _ROWS_HEAD.size + 4 * n_elements
        ):
            return np.ndarray((n_rows, width), _F32, view.toreadonly(), _ROWS_HEAD.size)
    if n_bytes < _U32.size:
        raise BadTensor(f"{field}.ndim", "the tensor is truncated")
    ndim: int = _U32.unpack_from(view)[0]
    if not 1 <= ndim <= TENSOR_MAX_NDIM:
        raise BadTensor(f"{field}.ndim", f"{ndim} dimensions (1 to {TENSOR_MAX_NDIM} are allowed)")
    head = _HEADS[ndim]
    if n_bytes < head.size:
        raise BadTensor(f"{field}.shape", "the tensor is truncated")
    _, *shape, tag = head.unpack_from(view)
    dtype = _DTYPES.get(tag)
    if dtype is None:
        raise BadTensor(f"{field}.dtype", f"unknown type tag {tag}")
    # Zeros are left out of the product so that (0, 2**32 - 1, 2**32 - 1) is refused as well: numpy would
    # raise on it.
    if prod(size for size in shape if size) > max_elements:
        raise BadTensor(f"{field}.shape", f"{tuple(shape)} has more than {max_elements} elements")
    expected = head.size + prod(shape) * dtype.itemsize
    if n_bytes != expected:
        raise BadTensor(
            f"{field}.data", f"{n_bytes - head.size} bytes where the shape wants {expected - head.size}"
        )
    array: Tensor = np.ndarray(shape, dtype, view, head.size)
    array.flags.writeable = False
    return array
