"""Tensors as bytes: `[u32 ndim][u32 x ndim shape][u32 dtype tag][data, row-major]`, little-endian.

Not npy: its header is a Python literal that a hostile peer would have us parse, and its length varies. Not
MessagePack: the data must stay where it was received. With two dimensions the data begins 16 bytes in, so a
decoded view is aligned for SIMD.

Rows of hidden states may travel in fewer bytes than f32, under further dtype tags. Two formats, both of rows
`f32 [n, width]`:

- `q8_0` (tag 3): ggml's blocks of 32 values, each an f16 scale and 32 int8; 34 bytes in place of 128. It
  carries only what is such blocks already: `rounded` makes rows so, and a stage that is asked to does that
  before it keeps or sends them. So packing loses nothing, rows rounded twice are as rounded once, and what is
  sent again has the bits of the first time.
- `lossless` (tag 4): the first bytes of all values, then the second ones and so on, in one zstd frame. Signs
  and exponents are alike, mantissas are not: it saves a seventh or so.

`pack_rows` falls back to plain f32 where a format cannot carry the rows or saves nothing. `unpack_rows` reads
all three.
"""

from __future__ import annotations

from math import prod
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmllm_proto.byte_planes import pack_planes, unpack_planes
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.frames import Buffer, Pieces
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.limits import PACKED_ROWS_MAX, TENSOR_MAX_ELEMENTS, TENSOR_MAX_NDIM

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
ROW_FORMATS: Final[tuple[RowFormat, ...]] = ("f32", "lossless", "q8_0")
"""What this version can read."""
BLOCK_VALUES: Final = 32
BLOCK_BYTES: Final = 34
Q8_0_TAG: Final = 3
LOSSLESS_TAG: Final = 4
HEAD: Final = Struct("<4I")
_BLOCK: Final = np.dtype([("scale", "<f2"), ("values", "i1", (BLOCK_VALUES,))])


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


def pack_rows(rows: Tensor, row_format: RowFormat) -> bytes:
    """The encoded tensor of f32 [n, width]: in this format where it carries these very bits in fewer bytes
    than f32."""
    packed: bytes | None = None
    if row_format != "f32" and rows.ndim == 2 and rows.dtype == _F32 and 0 < rows.nbytes <= PACKED_ROWS_MAX:
        packed = _pack_q8_0(rows) if row_format == "q8_0" else None
        packed = packed or _pack_lossless(rows)
    return packed or tensor_bytes(rows)


def is_packed(buffer: Buffer) -> bool:
    """Whether `unpack_rows` takes memory that the bytes do not have."""
    view = memoryview(buffer)
    return len(view) >= HEAD.size and HEAD.unpack_from(view)[3] in (Q8_0_TAG, LOSSLESS_TAG)


def unpack_rows(buffer: Buffer, *, n_rows: int, width: int, field: str = "tensor") -> Tensor:
    """f32 [n_rows, width] where the bytes are packed, else what `decode_tensor` makes of them. Read-only, as
    there.

    Raises BadTensor with `field` as the first part of its name, before anything is unpacked that is not of
    this size.
    """
    if not is_packed(buffer):
        return decode_tensor(buffer, field=field)
    view = memoryview(buffer).cast("B")
    n_axes, *shape, tag = HEAD.unpack_from(view)
    n_bytes = _F32.itemsize * n_rows * width
    if n_axes != 2 or shape != [n_rows, width]:
        raise BadTensor(f"{field}.shape", f"{n_axes} axes, {shape} where [{n_rows}, {width}] is due")
    if not 0 < n_bytes <= PACKED_ROWS_MAX:
        raise BadTensor(f"{field}.shape", f"{n_bytes} bytes of rows, at most {PACKED_ROWS_MAX} come packed")
    data = view[HEAD.size :]
    rows = (
        _unpack_q8_0(data, n_rows, width, field)
        if tag == Q8_0_TAG
        else _unpack_lossless(data, n_rows, width, field)
    )
    rows.flags.writeable = False
    return rows


def rounded(rows: Tensor) -> Tensor:
    """f32 [n, width], each block of 32 values as q8_0 has it; the rows themselves where they are not finite,
    too large for the scales (8.3e6), or of another width than whole blocks."""
    blocks = _blocks_of(rows)
    return rows if blocks is None else _values_of(blocks).reshape(rows.shape)


def _blocks_of(rows: Tensor) -> Tensor | None:
    """Structured [n_blocks], or None where q8_0 cannot hold the rows."""
    if rows.shape[-1] % BLOCK_VALUES or not rows.size:
        return None
    values = rows.reshape(-1, BLOCK_VALUES)
    with np.errstate(all="ignore"):
        exact = np.abs(values).max(axis=1) / np.float32(127)
        scales = exact.astype("<f2")
        if not np.isfinite(scales).all():
            return None
        # A scale that is too small for f16 is zero, and so is its block.
        inverse = np.where(scales > 0, np.float32(1) / exact, np.float32(0))
        codes = np.where(scales[:, None] > 0, values * inverse[:, None], np.float32(0))
    blocks = np.empty(len(values), _BLOCK)
    blocks["scale"] = scales
    blocks["values"] = np.rint(codes)
    return blocks


def _values_of(blocks: Tensor) -> Tensor:
    """f32 [n_blocks, 32]."""
    values: Tensor = blocks["values"].astype(np.float32)
    values *= blocks["scale"].astype(np.float32)[:, None]
    # A negative code under a zero scale is a zero, not a negative one.
    values += np.float32(0)
    return values


def _pack_q8_0(rows: Tensor) -> bytes | None:
    blocks = _blocks_of(rows)
    if blocks is None or _values_of(blocks).tobytes() != rows.tobytes():
        return None
    return HEAD.pack(2, *rows.shape, Q8_0_TAG) + blocks.tobytes()


def _unpack_q8_0(data: memoryview, n_rows: int, width: int, field: str) -> Tensor:
    if width % BLOCK_VALUES:
        raise BadTensor(f"{field}.shape", f"rows of {width} values are no blocks of {BLOCK_VALUES}")
    expected = n_rows * width // BLOCK_VALUES * BLOCK_BYTES
    if len(data) != expected:
        raise BadTensor(f"{field}.data", f"{len(data)} bytes where the shape wants {expected}")
    blocks = np.frombuffer(data, _BLOCK)
    if not np.isfinite(blocks["scale"]).all():
        raise BadTensor(f"{field}.scale", "a scale that is not finite")
    return _values_of(blocks).reshape(n_rows, width)


def _pack_lossless(rows: Tensor) -> bytes | None:
    data = pack_planes(np.asarray(rows, _F32))
    return HEAD.pack(2, *rows.shape, LOSSLESS_TAG) + data if len(data) < rows.nbytes else None


def _unpack_lossless(data: memoryview, n_rows: int, width: int, field: str) -> Tensor:
    values = unpack_planes(data, _F32, n_rows * width, max_window=PACKED_ROWS_MAX, field=field)
    return values.reshape(n_rows, width)
