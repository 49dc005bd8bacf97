"""Parses the bytes of a sequence's KV as libllama writes them.

libllama restores what it is given without looking at the numbers, and of sliding-window layers it writes only
what is inside the window. So before bytes are kept or taken from elsewhere they are read here: is it all
there, does it end where it should, are all numbers finite? Layouts that are not understood to the last byte
(recurrent state, positions in several dimensions, sparse attention's indexes) are refused, and such models
keep no prefixes outside their cells.

After `llama_kv_cache::state_write` of llama.cpp:

    u32 magic, i32 sequence
    per cache:  u32 streams (1), u32 cells, per cell i32 position, u32 1, i32 sequence
                u32 transposed, u32 layers
                per layer  i32 type, u64 bytes per row, K of every cell
                per layer  i32 type, u64 bytes per row, V of every cell
                or, where V is transposed, i32 type, u32 bytes per element, u32 width, V
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct, error
from typing import Any, Final

import numpy as np

_HEAD: Final = Struct("<Ii")
_PAIR: Final = Struct("<II")
_ROW: Final = Struct("<iQ")
_TRANSPOSED: Final = Struct("<iII")
_CELL: Final = np.dtype([("position", "<i4"), ("n_sequences", "<u4"), ("sequence", "<i4")])
_BLOCK_Q8_0: Final = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_F32, _F16, _Q8_0 = 0, 1, 8
"""ggml's types."""
LAYERS_MAX: Final = 65535


class BadState(ValueError):
    """These are not the bytes of a KV that is understood here."""


@dataclass(frozen=True)
class KvState:
    n_rows: int
    """Rows 0 to n_rows - 1 are in the cache that has most of them."""
    n_min: int
    """A beginning of fewer rows cannot be used. 0: every cache has all rows; otherwise one has the window
    before the end only, and it goes on where it ends."""


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    @property
    def n_left(self) -> int:
        return len(self._data) - self.at

    def numbers(self, layout: Struct) -> tuple[Any, ...]:
        try:
            values = layout.unpack_from(self._data, self.at)
        except error:
            raise BadState("the bytes end too early") from None
        self.at += layout.size
        return values

    def array(self, dtype: np.dtype[Any], size_bytes: int) -> np.ndarray:
        if size_bytes > self.n_left or size_bytes % dtype.itemsize:
            raise BadState(f"{size_bytes} bytes are announced where {self.n_left} are left")
        array = np.frombuffer(self._data, dtype, size_bytes // dtype.itemsize, self.at)
        self.at += size_bytes
        return array


def read_state(data: bytes | memoryview) -> KvState:
    """Raises BadState for what is not understood, not complete, or not finite."""
    reader = _Reader(memoryview(data).cast("B"))
    reader.numbers(_HEAD)
    caches = [_read_cache(reader)]
    while reader.n_left:
        caches.append(_read_cache(reader))
    n_rows = max(len(positions) for positions in caches)
    for positions in caches:
        if not _ends(positions, n_rows):
            raise BadState("rows are missing")
    return KvState(n_rows, 0 if all(len(positions) == n_rows for positions in caches) else n_rows)


def _ends(positions: Sequence[int] | np.ndarray, n_rows: int) -> bool:
    """Whether these are the last rows without a gap."""
    return bool(np.array_equal(np.sort(positions), np.arange(n_rows - len(positions), n_rows)))


def _read_cache(reader: _Reader) -> np.ndarray:
    """The positions that it holds."""
    n_streams, n_cells = reader.numbers(_PAIR)
    if n_streams != 1 or not n_cells:
        raise BadState(f"{n_streams} streams of {n_cells} cells")
    cells = reader.array(_CELL, n_cells * _CELL.itemsize)
    if not (cells["n_sequences"] == 1).all():
        raise BadState("a cell has several sequences")
    transposed, n_layers = reader.numbers(_PAIR)
    if transposed > 1 or not 0 < n_layers <= LAYERS_MAX:
        raise BadState(f"{n_layers} layers, transposed {transposed}")
    for _ in range(n_layers):
        _read_rows(reader, n_cells)
    if reader.n_left:  # attention over latent vectors keeps no V
        for _ in range(n_layers):
            if transposed:
                kind, size, width = reader.numbers(_TRANSPOSED)
                if size != {_F32: 4, _F16: 2}.get(kind):
                    raise BadState(f"elements of type {kind} with {size} bytes")
                _check(kind, reader, n_cells * size * width)
            else:
                _read_rows(reader, n_cells)
    return np.asarray(cells["position"])


def _read_rows(reader: _Reader, n_cells: int) -> None:
    kind, size = reader.numbers(_ROW)
    _check(kind, reader, n_cells * size)


def _check(kind: int, reader: _Reader, size_bytes: int) -> None:
    if kind == _Q8_0:
        values = reader.array(_BLOCK_Q8_0, size_bytes)["scale"]
    elif kind in (_F16, _F32):
        values = reader.array(np.dtype("<f2" if kind == _F16 else "<f4"), size_bytes)
    else:
        raise BadState(f"numbers of type {kind}")
    if not np.isfinite(values).all():
        raise BadState("it holds NaN or infinity")
