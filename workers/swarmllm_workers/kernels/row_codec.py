"""Packs and unpacks rows of hidden states for their way between stages, with `row_codec.c` where it was
built.

Without it `swarmllm_proto.tensors` does the same. Both ways have the same bits. After a step that has read
every weight, each call of numpy costs as much as all that the C does.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.tensors import BLOCK_BYTES, BLOCK_VALUES, HEAD, Q8_0_TAG, pack_rows, rounded
from swarmllm_workers.kernels.interposing import find_library


def round_rows(rows: np.ndarray) -> np.ndarray:
    """`tensors.rounded`."""
    packed = _native_q8_0(rows)
    return rounded(rows) if packed is None else packed[1]


def pack(rows: np.ndarray, row_format: RowFormat) -> bytes:
    """`tensors.pack_rows`."""
    packed = _pack_rounded(rows) if row_format == "q8_0" else None
    return packed or pack_rows(rows, row_format)


def round_and_pack(rows: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Rows as `round_rows` makes them, and how they are sent as "q8_0"."""
    native = _native_q8_0(rows)
    if native is None:
        rows = rounded(rows)
        return rows, pack_rows(rows, "q8_0")
    return native[1], native[0]


def q8_0_blocks(rows: np.ndarray) -> bytes | None:
    """f32 [n, width] as blocks of 32 values, each an f16 scale and 32 int8, without a head. None where q8_0
    cannot hold them: their width is no multiple of 32, or a value is too large or not finite."""
    packed = round_and_pack(rows)[1]
    return packed[HEAD.size :] if HEAD.unpack_from(packed)[3] == Q8_0_TAG else None


def _pack_rounded(rows: np.ndarray) -> bytes | None:
    """None where they are not rounded, or there is no C to see it."""
    native = _native_q8_0(rows)
    if native is None or native[1].tobytes() != rows.tobytes():
        return None
    return native[0]


def _native_q8_0(rows: np.ndarray) -> tuple[bytes, np.ndarray] | None:
    """Encoded tensor, and the rows that it says. None where q8_0 cannot hold them, or there is no C."""
    library = _library()
    n_rows, width = rows.shape
    if library is None or width % BLOCK_VALUES or not rows.size:
        return None
    rows = np.ascontiguousarray(rows, np.float32)
    n_blocks = rows.size // BLOCK_VALUES
    packed = bytearray(HEAD.size + n_blocks * BLOCK_BYTES)
    HEAD.pack_into(packed, 0, 2, n_rows, width, Q8_0_TAG)
    out = np.empty_like(rows)
    data = ctypes.addressof(ctypes.c_char.from_buffer(packed, HEAD.size))
    if not library.swarmllm_pack_q8_0(rows.ctypes.data, n_blocks, data, out.ctypes.data):
        return None
    return bytes(packed), out


class RowTaker:
    """Takes single rows of this width that came as "q8_0"."""

    def __init__(self, width: int, fed_address: int) -> None:
        """`fed_address`: where f32 [width] goes to."""
        self._head = HEAD.pack(2, 1, width, Q8_0_TAG)
        self._n_blocks = width // BLOCK_VALUES
        self._n_bytes = HEAD.size + self._n_blocks * BLOCK_BYTES
        self._fed_address = fed_address
        self._library = _library() if width % BLOCK_VALUES == 0 else None

    def take(self, payload: memoryview) -> bool:
        """False: it is no such row, or there is no C."""
        whole = payload.obj
        if self._library is None or len(payload) != self._n_bytes or not isinstance(whole, bytes):
            return False
        taken: bool = self._library.swarmllm_take_q8_0(
            whole, len(whole) - len(payload), self._head, HEAD.size, self._fed_address, self._n_blocks
        )
        return taken


@cache
def _library() -> Any:
    path = find_library("row_codec")
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    pack_q8_0, take_q8_0 = library.swarmllm_pack_q8_0, library.swarmllm_take_q8_0
    pack_q8_0.restype = take_q8_0.restype = ctypes.c_bool
    pack_q8_0.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    take_q8_0.argtypes = (
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    return library
