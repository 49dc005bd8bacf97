"""Keeps the rows that a running request sent on, so that the next stage can be rebuilt.

A stage that dies takes its KV along. The node that takes its place needs the rows that the dead one was
given, and this side of the hop still has them: a journal is the float32 rows that left a range of layers, by
position. Only one that begins with the request can build a stage again; one that begins later, because its
first rows were an earlier request's, is there to be checked. One that has gone beyond the bound of all
journals together is none, and the rows are computed again.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from swarmllm_workers.errors import CallError

BLOCK_ROWS: Final = 64
"""Rows for which memory is taken at a time."""


class _Journal:
    def __init__(self, first: int) -> None:
        self.first = first
        """Position of the first row."""
        self.n_rows = first
        """Rows below this are here."""
        self.n_bytes = 0
        self._blocks: list[np.ndarray] = []
        self._loose: list[bytes] = []
        """The last rows, which are in no block yet."""
        self._n_skipped = 0

    def write(self, position: int, rows: np.ndarray) -> None:
        """What was at these positions and after them is forgotten."""
        self.bind()
        self._put(position, rows)

    def append(self, row: bytes, n_skipped: int) -> None:
        """The next row, behind so many bytes that are none of it. Kept as it is for a while: less work
        beside a decode step."""
        self._loose.append(row)
        self._n_skipped = n_skipped
        self.n_rows += 1
        self.n_bytes += len(row)
        if len(self._loose) == BLOCK_ROWS:
            self.bind()

    def bind(self) -> None:
        """Put loose rows into blocks."""
        if loose := self._loose:
            rows = np.stack([np.frombuffer(row, np.float32, offset=self._n_skipped) for row in loose])
            self.n_bytes -= sum(map(len, loose))
            self._loose = []
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

    def read(self, position: int, n_rows: int) -> np.ndarray:
        """Of rows that are bound."""
        position -= self.first
        first, last = position // BLOCK_ROWS, (position + n_rows - 1) // BLOCK_ROWS
        start = position - first * BLOCK_ROWS
        return np.concatenate(self._blocks[first : last + 1])[start : start + n_rows]


class Journals:
    """By request and end of the layer range."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._journals: dict[str, dict[int, _Journal]] = {}

    @property
    def n_bytes(self) -> int:
        """Host memory in use."""
        return self._n_bytes

    def write(self, request_id: str, end: int, position: int, rows: np.ndarray) -> None:
        """Rows f32 [n, n_embd] from `position` on have left the layers before `end`."""
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
        if self._n_bytes > self._max_bytes:
            self._drop(request_id, end)

    def append(self, request_id: str, end: int, position: int, row: bytes, n_skipped: int) -> None:
        """`write` of one row of f32, behind so many other bytes."""
        journal = self._journals.get(request_id, {}).get(end)
        if journal is None or journal.n_rows != position:
            self.write(request_id, end, position, np.frombuffer(row, np.float32, offset=n_skipped)[None])
            return
        self._n_bytes -= journal.n_bytes
        journal.append(row, n_skipped)
        self._n_bytes += journal.n_bytes
        if self._n_bytes > self._max_bytes:
            self._drop(request_id, end)

    def n_rows(self, request_id: str, end: int) -> int:
        """How many can be read, from position 0 on."""
        journal = self._journals.get(request_id, {}).get(end)
        return journal.n_rows if journal is not None and not journal.first else 0

    def has(self, request_id: str, end: int) -> bool:
        """Whether any can be read."""
        return end in self._journals.get(request_id, {})

    def read(self, request_id: str, end: int, position: int, n_rows: int) -> np.ndarray:
        """f32 [n_rows, n_embd]. Raises CallError position_gap."""
        journal = self._journals.get(request_id, {}).get(end)
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

    def forget(self, request_id: str) -> None:
        """The request is over."""
        for journal in self._journals.pop(request_id, {}).values():
            self._n_bytes -= journal.n_bytes

    def _drop(self, request_id: str, end: int) -> None:
        self._n_bytes -= self._journals[request_id].pop(end).n_bytes
