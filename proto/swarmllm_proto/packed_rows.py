"""Rows of hidden states in fewer bytes than f32, as further dtype tags of the tensor format (see tensors).

Two formats, both of rows `f32 [n, width]`:

- `q8_0` (tag 3): ggml's blocks of 32 values, each an f16 scale and 32 int8; 34 bytes in place of 128. It
  carries only what is such blocks already: `rounded` makes rows so, and a stage that is asked to does that
  before it keeps or sends them. So packing loses nothing, twice rounded is once rounded, and whatever is sent
  again has the bits of the first time.
- `lossless` (tag 4): the first bytes of all values, then the second ones and so on, in one zstd frame. Signs
  and exponents are alike, mantissas are not: it saves a seventh or so.

`pack_rows` falls back to plain f32 where a format cannot carry the rows or saves nothing. `unpack_rows` reads
all three.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import numpy as np

from swarmllm_proto.errors import BadTensor
from swarmllm_proto.frames import Buffer
from swarmllm_proto.ipc_base import RowFormat
from swarmllm_proto.limits import PACKED_ROWS_MAX
from swarmllm_proto.tensors import Tensor, decode_tensor, tensor_bytes

ROW_FORMATS: Final[tuple[RowFormat, ...]] = ("f32", "lossless", "q8_0")
"""What this version can read."""

BLOCK_VALUES: Final = 32
BLOCK_BYTES: Final = 34
Q8_0_TAG: Final = 3
LOSSLESS_TAG: Final = 4
HEAD: Final = Struct("<4I")
_LEVEL: Final = 1
_BLOCK: Final = np.dtype([("scale", "<f2"), ("values", "i1", (BLOCK_VALUES,))])
_F32: Final = np.dtype("<f4")
_compressors: Final[list[Any]] = []
"""Those that nobody uses now."""


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
    planes = np.ascontiguousarray(rows, _F32).reshape(-1).view(np.uint8).reshape(-1, 4).T
    data = _compress(planes.tobytes())
    return HEAD.pack(2, *rows.shape, LOSSLESS_TAG) + data if len(data) < rows.nbytes else None


def _unpack_lossless(data: memoryview, n_rows: int, width: int, field: str) -> Tensor:
    import zstandard

    n_bytes = _F32.itemsize * n_rows * width
    decompressor = zstandard.ZstdDecompressor(max_window_size=PACKED_ROWS_MAX)
    try:
        # What it says first: zstd takes that much memory. Unknown sizes are refused, so that no frame is
        # unpacked to see how large it is.
        declared = zstandard.frame_content_size(data)
        if declared != n_bytes:
            raise BadTensor(f"{field}.data", f"unpacks to {declared} bytes where the shape wants {n_bytes}")
        planes = decompressor.decompress(data, max_output_size=n_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadTensor(f"{field}.data", f"is no zstd frame: {error}") from None
    if len(planes) != n_bytes:
        raise BadTensor(f"{field}.data", f"unpacks to {len(planes)} bytes where the shape wants {n_bytes}")
    values = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(4, -1).T)
    return values.view(_F32).reshape(n_rows, width)


def _compress(data: bytes) -> bytes:
    # Only who packs pays for the import; no two threads may use one of zstd's contexts at the same time.
    import zstandard

    try:
        compressor = _compressors.pop()
    except IndexError:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    packed: bytes = compressor.compress(data)
    _compressors.append(compressor)
    return packed
