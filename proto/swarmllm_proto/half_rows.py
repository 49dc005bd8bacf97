"""Rows of pictures as f16 in a zstd frame: half of the bytes of f32, and a tenth less than that.

A receiver makes f32 of them again, so both ends have the same numbers, which are those of the encoder rounded
to f16.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from swarmllm_proto.byte_planes import pack_planes, unpack_planes
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.frames import Buffer
from swarmllm_proto.limits import IMAGE_ROWS_MAX

HALF_MAX: Final = 65504.0
"""The largest number of f16."""
_FRAME_ROOM: Final = 2**15
"""What a frame of bytes that zstd cannot make smaller has besides them, and more."""


def rows_each(width: int) -> int:
    """In one message; 0: one row is too large for it."""
    return (IMAGE_ROWS_MAX - _FRAME_ROOM) // (2 * width)


def rounded_to_half(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    """f32 [n, width], each number as f16 has it; None where f16 cannot hold one."""
    if not rows.size or not np.abs(rows).max() <= HALF_MAX:
        return None
    half: npt.NDArray[np.float32] = rows.astype("<f2").astype(np.float32)
    return half if np.isfinite(half).all() else None


def pack_half(rows: npt.NDArray[np.float32]) -> bytes:
    """Of f32 [n, width] that `rounded_to_half` has made."""
    return pack_planes(rows.astype("<f2"))


def unpack_half(data: Buffer, *, n_rows: int, width: int, field: str = "rows") -> npt.NDArray[np.float32]:
    """f32 [n_rows, width]. Raises BadTensor naming `field`, before anything is unpacked that is not of this
    size."""
    n_bytes = 2 * n_rows * width
    if not 0 < n_bytes <= IMAGE_ROWS_MAX:
        raise BadTensor(f"{field}.shape", f"{n_bytes} bytes of rows, at most {IMAGE_ROWS_MAX} come packed")
    values = unpack_planes(data, "<f2", n_rows * width, max_window=2 * IMAGE_ROWS_MAX, field=field)
    return values.astype(np.float32).reshape(n_rows, width)
