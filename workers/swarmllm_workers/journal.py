"""What a running request has sent on, row by row, so that the stage after this one can be built again.

A stage that dies takes its KV along. Whoever takes its place needs the rows that the dead one was given, and
this side of the hop still has them: a journal is the float32 rows that left a range of layers, by position.
It begins with the request; one that would begin later (its first rows were somebody else's), or that has
gone beyond the bound of all journals together, is none, and the rows are computed again.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from swarmllm_workers.errors import CallError

BLOCK_ROWS: Final = 64
"""Rows for which memory is taken at a time."""


class _Journal:
    def __init__(self) -> None:
        self.n_rows = 0
        self.n_bytes = 0
        self._blocks: list[np.ndarray] = []

    def write(self, position: int, rows: np.ndarray) -> int:
        """What was at these positions and after them is forgotten. How many bytes of memory it takes
        more."""
        self.n_rows = position + len(rows)
        before = self.n_bytes
        while self.n_rows > len(self._blocks) * BLOCK_ROWS:
            self._blocks.append(np.empty((BLOCK_ROWS, rows.shape[1]), np.float32))
            self.n_bytes += self._blocks[-1].nbytes
        done = 0
        while done < len(rows):
            block, at = divmod(position + done, BLOCK_ROWS)
            n = min(BLOCK_ROWS - at, len(rows) - done)
            self._blocks[block][at : at + n] = rows[done : done + n]
            done += n
        return self.n_bytes - before

    def read(self, position: int, n_rows: int) -> np.ndarray:
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
        if journal is None:
            if position or not self._max_bytes:
                return
            journal = self._journals.setdefault(request_id, {})[end] = _Journal()
        elif position > journal.n_rows:
            self._drop(request_id, end)
            return
        self._n_bytes += journal.write(position, rows)
        if self._n_bytes > self._max_bytes:
            self._drop(request_id, end)

    def n_rows(self, request_id: str, end: int) -> int:
        """How many can be read, from position 0 on."""
        journal = self._journals.get(request_id, {}).get(end)
        return journal.n_rows if journal is not None else 0

    def read(self, request_id: str, end: int, position: int, n_rows: int) -> np.ndarray:
        """f32 [n_rows, n_embd]. Raises CallError position_gap."""
        n_known = self.n_rows(request_id, end)
        if position + n_rows > n_known:
            raise CallError(
                "position_gap",
                f"rows {position}:{position + n_rows} of a journal that has {n_known}",
                "position",
            )
        return self._journals[request_id][end].read(position, n_rows)

    def rename(self, request_id: str, new_id: str) -> None:
        if (journals := self._journals.pop(request_id, None)) is not None:
            self._journals[new_id] = journals

    def forget(self, request_id: str) -> None:
        """The request is over."""
        for journal in self._journals.pop(request_id, {}).values():
            self._n_bytes -= journal.n_bytes

    def _drop(self, request_id: str, end: int) -> None:
        self._n_bytes -= self._journals[request_id].pop(end).n_bytes
