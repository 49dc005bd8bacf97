"""Keeps the rows that a running request sent on, so that the next stage can be rebuilt.

A stage that dies takes its KV along. The node that takes its place needs the rows that the dead one was
given, and this side of the hop still has them: a journal is the float32 rows that left a range of layers, by
position. Only one that begins with the request can build a stage again; one that begins later, because its
first rows were an earlier request's, is there to be checked. One that has gone beyond the bound of all
journals together is none, and the rows are computed again.

Of a request that is over, rows whose KV is kept stay for a while, for requests that go on with that KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_workers.cache.kept_rows import BlockKey, KeptRows
from swarmllm_workers.errors import CallError

BLOCK_ROWS: Final = BLOCK_TOKENS
"""Rows for which memory is taken at a time."""
KEPT_PART: Final = 4
"""Rows of requests that are over take at most a part of the bound of all journals together, and less where
others run."""


class _Journal:
    def __init__(self, first: int) -> None:
        self.first = first
        """Position of the first row."""
        self.n_rows = first
        """Rows below this are here."""
        self.n_bytes = 0
        self._blocks: list[np.ndarray] = []
        self.loose: list[bytes] = []
        """The last rows, which are in no block yet: kept as they came, less work beside a decode step."""
        self.n_before = 0
        """So many values before each of these are none of the row."""

    def write(self, position: int, rows: np.ndarray) -> None:
        """What was at these positions and after them is forgotten."""
        self.bind()
        self._put(position, rows)

    def bind(self) -> None:
        """Put the rows that were appended one by one into blocks."""
        if loose := self.loose:
            whole = b"".join(loose)
            rows = np.frombuffer(whole, np.float32).reshape(len(loose), -1)[:, self.n_before :]
            self.n_bytes -= len(whole)
            self.loose = []
            self._put(self.n_rows - len(rows), rows)

    def _put(self, position: int, rows: np.ndarray) -> None:
        self.n_rows = position + len(rows)
        position -= self.first
        while self.n_rows - self.first > len(self._blocks) * BLOCK_ROWS:
            self._blocks.append(np.empty((BLOCK_ROWS, rows.shape[1]), np.float32))
            self.n_bytes += self._blocks[-1].nbytes
        done = 0
        while done < len(rows):
            block, at = divmod(position + done, BLOCK_ROWS)
            n = min(BLOCK_ROWS - at, len(rows) - done)
            self._blocks[block][at : at + n] = rows[done : done + n]
            done += n

    def whole_blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The complete blocks among the rows that `bind` has put into blocks: (index of the block, counted
        from position 0; its rows)."""
        if self.first % BLOCK_ROWS == 0:
            for index, rows in enumerate(self._blocks[: (self.n_rows - self.first) // BLOCK_ROWS]):
                yield self.first // BLOCK_ROWS + index, rows

    def read(self, position: int, n_rows: int) -> np.ndarray:
        """Of rows that are bound."""
        position -= self.first
        first, last = position // BLOCK_ROWS, (position + n_rows - 1) // BLOCK_ROWS
        start = position - first * BLOCK_ROWS
        return np.concatenate(self._blocks[first : last + 1])[start : start + n_rows]


class Journals:
    """By request and end of the layer range."""

    def __init__(self, max_bytes: int, ttl_s: float = 0.0) -> None:
        """`ttl_s`: so long rows stay whose KV is kept and not used."""
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self.kept = KeptRows(max_bytes // KEPT_PART, ttl_s)
        self._journals: dict[str, dict[int, _Journal]] = {}

    @property
    def n_bytes(self) -> int:
        """Host memory in use, in bytes."""
        return self._n_bytes + self.kept.n_bytes

    def write(self, request_id: str, end: int, position: int, rows: np.ndarray) -> None:
        """Store rows f32 [n, n_embd], from `position` on, that have left the layers before `end`."""
        of_request = self._journals.get(request_id)
        journal = of_request.get(end) if of_request is not None else None
        if journal is not None and not journal.first <= position <= journal.n_rows:
            self._drop(request_id, end)
            return
        if journal is None:
            if not self._max_bytes:
                return
            journal = self._journals.setdefault(request_id, {})[end] = _Journal(position)
        self._n_bytes -= journal.n_bytes
        journal.write(position, rows)
        self._n_bytes += journal.n_bytes
        if self.n_bytes > self._max_bytes:
            self._make_room(request_id, end)

    def append(self, request_id: str, end: int, position: int, row: bytes, n_before: int) -> None:
        """`write` of one row of f32, behind so many other values of 4 bytes. Each decode step waits for it,
        so it calls nothing that it need not."""
        journal = self._journals.get(request_id, {}).get(end)
        if journal is None or journal.n_rows != position:
            self.write(request_id, end, position, np.frombuffer(row, np.float32)[None, n_before:])
            return
        journal.loose.append(row)
        journal.n_before = n_before
        journal.n_rows += 1
        n_bytes = len(row)
        journal.n_bytes += n_bytes
        self._n_bytes += n_bytes
        if len(journal.loose) == BLOCK_ROWS:
            self._n_bytes -= journal.n_bytes
            journal.bind()
            self._n_bytes += journal.n_bytes
        if self._n_bytes + self.kept.n_bytes > self._max_bytes:
            self._make_room(request_id, end)

    def n_rows(self, request_id: str, end: int, keys: Sequence[BlockKey] = ()) -> int:
        """The number of rows that can be read, from position 0 on. `keys`: of the request's blocks."""
        journal = self._journals.get(request_id, {}).get(end)
        if journal is None:
            return 0
        return journal.n_rows if self.kept.has(end, keys, journal.first) else 0

    def has(self, request_id: str, end: int) -> bool:
        """Whether any rows can be read."""
        return end in self._journals.get(request_id, {})

    def read(
        self, request_id: str, end: int, position: int, n_rows: int, keys: Sequence[BlockKey] = ()
    ) -> np.ndarray:
        """The rows, f32 [n_rows, n_embd]. `keys`: of the request's blocks. Raises CallError position_gap."""
        journal = self._journals.get(request_id, {}).get(end)
        if journal is not None and position < journal.first:
            n_before = min(n_rows, journal.first - position)
            before = self.kept.read(end, keys, position, n_before)
            if before is not None and n_before == n_rows:
                return before
            if before is not None:
                own = self.read(request_id, end, journal.first, n_rows - n_before)
                return np.concatenate((before, own))
        first, n_known = (journal.first, journal.n_rows) if journal is not None else (0, 0)
        if journal is None or not first <= position <= position + n_rows <= n_known:
            raise CallError(
                "position_gap",
                f"rows {position}:{position + n_rows} of a journal that has {first}:{n_known}",
                "position",
            )
        self._n_bytes -= journal.n_bytes
        journal.bind()
        self._n_bytes += journal.n_bytes
        return journal.read(position, n_rows)

    def rename(self, request_id: str, new_id: str) -> None:
        if (journals := self._journals.pop(request_id, None)) is not None:
            self._journals[new_id] = journals

    def keep(self, request_id: str, end: int, keys: Sequence[BlockKey]) -> None:
        """End the journal of a request that is over, but keep the rows of these blocks, whose KV is kept."""
        journal = self._journals.get(request_id, {}).get(end)
        if journal is None:
            return
        for key in keys[: journal.first // BLOCK_ROWS]:
            self.kept.touch(end, key)
        self._n_bytes -= journal.n_bytes
        journal.bind()
        self._n_bytes += journal.n_bytes
        for index, rows in journal.whole_blocks():
            if index < len(keys):
                self.kept.put(end, keys[index], rows)

    def forget(self, request_id: str) -> None:
        """Remove the journal of a request that is over."""
        for journal in self._journals.pop(request_id, {}).values():
            self._n_bytes -= journal.n_bytes

    def _make_room(self, request_id: str, end: int) -> None:
        self.kept.shrink(max(0, self._max_bytes - self._n_bytes))
        if self._n_bytes > self._max_bytes:
            self._drop(request_id, end)

    def _drop(self, request_id: str, end: int) -> None:
        self._n_bytes -= self._journals[request_id].pop(end).n_bytes
