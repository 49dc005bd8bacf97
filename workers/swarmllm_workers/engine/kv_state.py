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
from dataclasses import dataclass, field
from struct import Struct, error
from typing import Any, Final

import numpy as np

from swarmllm_workers.engine.kv_layout import KvLayout, turned
from swarmllm_workers.kernels.row_codec import q8_0_blocks

_HEAD: Final = Struct("<Ii")
_PAIR: Final = Struct("<II")
_ROW: Final = Struct("<iQ")
_TRANSPOSED: Final = Struct("<iII")
_CELL: Final = np.dtype([("position", "<i4"), ("n_sequences", "<u4"), ("sequence", "<i4")])
_BLOCK_Q8_0: Final = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_BLOCK_VALUES: Final = 32
_F32, _F16, _Q8_0 = 0, 1, 8
"""ggml's types."""
_F16_EXPONENT: Final = np.uint16(0x7C00)
"""All of its bits are set in NaN and infinity, and in no other number."""
LAYERS_MAX: Final = 65535
_WORST_ROW: Final = 2.0
_TINY: Final = 1e-12


class BadState(ValueError):
    """The bytes are not a KV that this module understands."""


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


@dataclass(frozen=True)
class _Values:
    """K or V of one layer."""

    kind: int
    head: bytes
    """As it stands before the values: their type and size."""
    raw: np.ndarray
    """Bytes, u8 [n_cells, size of a row]; where they are transposed, [width, n_cells, size of an element]."""
    is_transposed: bool = False

    @property
    def cells_axis(self) -> int:
        return 1 if self.is_transposed else 0

    def ordered(self, order: np.ndarray) -> np.ndarray:
        """The same state with its cells in this order."""
        return np.take(self.raw, order, axis=self.cells_axis)

    def numbers(self, order: np.ndarray) -> np.ndarray:
        """f32 [n_cells, n], the cells in this order."""
        raw = self.ordered(order)
        if self.is_transposed:
            raw = np.ascontiguousarray(raw.transpose(1, 0, 2)).reshape(len(order), -1)
        raw = np.ascontiguousarray(raw)
        if self.kind == _Q8_0:
            blocks = raw.view(_BLOCK_Q8_0)
            scaled = blocks["scale"].astype(np.float32)[..., None] * blocks["values"]
            return np.asarray(scaled.reshape(len(order), -1))
        return raw.view("<f2" if self.kind == _F16 else "<f4").astype(np.float32)

    def converted(self, kind: int, *, is_transposed: bool, turned_by: int) -> bytes:
        """The same numbers in another layout, rounded to it, and before them their type and size.
        `turned_by`: see KvLayout. Raises BadState for numbers that it cannot hold."""
        if (kind, is_transposed) == (self.kind, self.is_transposed):
            return self.head + self.raw.tobytes()
        numbers = self.numbers(np.arange(self.raw.shape[self.cells_axis]))
        width = numbers.shape[1]
        if turned_by and kind != self.kind:
            if width % turned_by:
                raise BadState(f"{width} numbers a row are not of whole {turned_by}s")
            numbers = turned(numbers, turned_by)
        if kind == _Q8_0:
            if is_transposed or width % _BLOCK_VALUES:
                raise BadState(f"{width} numbers a row cannot be held as q8_0")
            packed = q8_0_blocks(numbers)
            if packed is None:
                raise BadState("it holds numbers that q8_0 cannot")
            return _ROW.pack(kind, width // _BLOCK_VALUES * _BLOCK_Q8_0.itemsize) + packed
        with np.errstate(over="ignore"):
            halves = numbers.astype("<f2")
        if not np.isfinite(halves).all():
            raise BadState("it holds numbers that f16 cannot")
        if is_transposed:
            return _TRANSPOSED.pack(kind, halves.itemsize, width) + halves.T.tobytes()
        return _ROW.pack(kind, width * halves.itemsize) + halves.tobytes()


@dataclass(frozen=True)
class _Cache:
    positions: np.ndarray
    transposed: int
    n_layers: int
    values: list[_Values] = field(default_factory=list)
    """K of every layer, then V of every layer where there is V."""

    @property
    def layout(self) -> tuple[object, ...]:
        return self.transposed, self.n_layers, tuple(each.head for each in self.values)


def read_state(data: bytes | memoryview) -> KvState:
    """Parse the bytes. Raises BadState if they are not understood, not complete, or not finite."""
    caches = [cache.positions for cache in _read_caches(data)]
    n_rows = max(len(positions) for positions in caches)
    for positions in caches:
        if not _ends(positions, n_rows):
            raise BadState("rows are missing")
    return KvState(n_rows, 0 if all(len(positions) == n_rows for positions in caches) else n_rows)


def rows_in_order(parts: Sequence[bytes | memoryview]) -> list[int]:
    """How many rows each part has; they follow each other from row 0 on. Raises BadState as `read_state`
    does, for layers with a window, and for parts of different layouts, or with other rows than those that
    come next."""
    layout, n_rows, found = None, 0, list[int]()
    for part in parts:
        cache = _only_cache(part)
        layout, n = layout or cache.layout, len(cache.positions)
        if cache.layout != layout:
            raise BadState("the parts have different layouts")
        if not np.array_equal(np.sort(cache.positions), np.arange(n_rows, n_rows + n)):
            raise BadState("the parts do not follow each other")
        n_rows += n
        found.append(n)
    return found


def layers_of(data: bytes | memoryview, n_layers: int, first: int, end: int) -> bytes:
    """The same rows in layers [first, end) of the `n_layers` of the state, counted from its first one. Raises
    BadState as `read_state` does, and where not every layer has KV of its own."""
    cache = _only_cache(data)
    if cache.n_layers != n_layers:
        raise BadState(f"{cache.n_layers} of {n_layers} layers have KV")
    cells_end = _HEAD.size + _PAIR.size + len(cache.positions) * _CELL.itemsize
    pieces = [bytes(memoryview(data).cast("B")[:cells_end]), _PAIR.pack(cache.transposed, end - first)]
    for begin in range(0, len(cache.values), cache.n_layers):  # K, then V
        for values in cache.values[begin + first : begin + end]:
            pieces += [values.head, values.raw.tobytes()]
    return b"".join(pieces)


def converted(data: bytes | memoryview, layout: KvLayout) -> bytes | memoryview:
    """The same rows in this layout, rounded to it where they are of another type. Raises BadState as
    `read_state` does, for layers with a window, and for numbers that the layout cannot hold."""
    cache = _only_cache(data)
    n_k = cache.n_layers
    kind = _Q8_0 if layout.is_q8_0 else _F16
    wanted = [(kind, i >= n_k and layout.is_transposed) for i in range(len(cache.values))]
    if [(values.kind, values.is_transposed) for values in cache.values] == wanted:
        return data
    cells_end = _HEAD.size + _PAIR.size + len(cache.positions) * _CELL.itemsize
    head = bytes(memoryview(data).cast("B")[:cells_end]), _PAIR.pack(layout.is_transposed, n_k)
    pieces = (
        values.converted(
            kind,
            is_transposed=i >= n_k and layout.is_transposed,
            turned_by=layout.k_turned if i < n_k else layout.v_turned,
        )
        for i, values in enumerate(cache.values)
    )
    return b"".join((*head, *pieces))


def rows_apart(data: bytes | memoryview, other: bytes | memoryview) -> float:
    """How far the same rows of two states are from each other: the largest mean, over K or V of a layer, of
    length of the difference / length; 0: equal bits. Raises BadState where they are not the same rows."""
    left, right = _only_cache(data), _only_cache(other)
    orders = np.argsort(left.positions), np.argsort(right.positions)
    if left.layout != right.layout or not np.array_equal(
        left.positions[orders[0]], right.positions[orders[1]]
    ):
        raise BadState("these are other rows")
    worst = 0.0
    for a, b in zip(left.values, right.values, strict=True):
        if np.array_equal(a.ordered(orders[0]), b.ordered(orders[1])):
            continue
        ours, theirs = a.numbers(orders[0]).astype(np.float64), b.numbers(orders[1]).astype(np.float64)
        off, length = np.linalg.norm(ours - theirs, axis=1), np.linalg.norm(ours, axis=1)
        parts = np.where(off == 0, 0.0, off / np.maximum(length, _TINY))
        worst = max(worst, float(np.mean(np.minimum(parts, _WORST_ROW))), _TINY)
    return worst


def _ends(positions: Sequence[int] | np.ndarray, n_rows: int) -> bool:
    """Whether these are the last rows without a gap."""
    return bool(np.array_equal(np.sort(positions), np.arange(n_rows - len(positions), n_rows)))


def _only_cache(data: bytes | memoryview) -> _Cache:
    caches = _read_caches(data)
    if len(caches) != 1:
        raise BadState("layers with a window have caches of their own")
    return caches[0]


def _read_caches(data: bytes | memoryview) -> list[_Cache]:
    reader = _Reader(memoryview(data).cast("B"))
    reader.numbers(_HEAD)
    caches = [_read_cache(reader)]
    while reader.n_left:
        caches.append(_read_cache(reader))
    return caches


def _read_cache(reader: _Reader) -> _Cache:
    n_streams, n_cells = reader.numbers(_PAIR)
    if n_streams != 1 or not n_cells:
        raise BadState(f"{n_streams} streams of {n_cells} cells")
    cells = reader.array(_CELL, n_cells * _CELL.itemsize)
    if not (cells["n_sequences"] == 1).all():
        raise BadState("a cell has several sequences")
    transposed, n_layers = reader.numbers(_PAIR)
    if transposed > 1 or not 0 < n_layers <= LAYERS_MAX:
        raise BadState(f"{n_layers} layers, transposed {transposed}")
    cache = _Cache(np.asarray(cells["position"]), transposed, n_layers)
    for _ in range(n_layers):
        cache.values.append(_read_rows(reader, n_cells))
    if reader.n_left:  # attention over latent vectors keeps no V
        for _ in range(n_layers):
            cache.values.append(
                _read_transposed(reader, n_cells) if transposed else _read_rows(reader, n_cells)
            )
    return cache


def _read_transposed(reader: _Reader, n_cells: int) -> _Values:
    kind, size, width = reader.numbers(_TRANSPOSED)
    if size != {_F32: 4, _F16: 2}.get(kind):
        raise BadState(f"elements of type {kind} with {size} bytes")
    raw = _read_values(kind, reader, n_cells * size * width)
    return _Values(kind, _TRANSPOSED.pack(kind, size, width), raw.reshape(width, n_cells, size), True)


def _read_rows(reader: _Reader, n_cells: int) -> _Values:
    kind, size = reader.numbers(_ROW)
    return _Values(
        kind, _ROW.pack(kind, size), _read_values(kind, reader, n_cells * size).reshape(n_cells, size)
    )


def _read_values(kind: int, reader: _Reader, size_bytes: int) -> np.ndarray:
    """As bytes."""
    if kind == _Q8_0:
        array = reader.array(_BLOCK_Q8_0, size_bytes)
        values = array["scale"]
    elif kind in (_F16, _F32):
        array = values = reader.array(np.dtype("<f2" if kind == _F16 else "<f4"), size_bytes)
    else:
        raise BadState(f"numbers of type {kind}")
    if not _are_finite(values):
        raise BadState("it holds NaN or infinity")
    return array.view(np.uint8)


def _are_finite(values: np.ndarray) -> bool:
    if values.dtype.itemsize != _F16_EXPONENT.itemsize:
        return bool(np.isfinite(values).all())
    # numpy widens f16 first, one number at a time.
    exponents = values.view("<u2") & _F16_EXPONENT
    return not (exponents == _F16_EXPONENT).any()
