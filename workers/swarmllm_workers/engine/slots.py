"""Assigns sequences of the KV caches to requests, and counts the cells in use. Pure bookkeeping, but for
the clock of requests that are held.

A *slot* is a sequence number that a request has while it runs (`Slots`). A request that nobody runs any more
and somebody may go on with, because its pipeline broke elsewhere, keeps slot, rows and journal for a while,
the oldest first in line when somebody else needs the room (`HeldRequests`).

A *cell* belongs to every sequence that was given it with `share` (`Cells`). libllama does not say how many
are in use; counting each sequence's rows would count a common prompt once per reader and refuse requests for
which there is room. So the rows of each sequence are kept as pieces of *runs*: a run is rows that one
sequence computed one after the other, and others hold the first so many of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swarmllm_workers.errors import CallError


class Slots:
    """`n_slots` sequence numbers, handed to request ids. The smallest free number is taken first, so that a
    lone request always finds its rows at the start of the cache."""

    def __init__(self, n_slots: int) -> None:
        self._free = list(range(n_slots))
        self._slots: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        return not self._free

    def get(self, request_id: str) -> int | None:
        return self._slots.get(request_id)

    def take(self, request_id: str) -> int:
        """The request's slot; a new one if it has none. Raises CallError no_slot."""
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                raise CallError(
                    "no_slot", f"all {len(self._slots)} slots are taken by other requests", "request_id"
                )
            slot = self._slots[request_id] = self._free.pop(0)
        return slot

    def rename(self, request_id: str, new_id: str) -> None:
        """Give the slot, if there is one, to another request."""
        if (slot := self._slots.pop(request_id, None)) is not None:
            self._slots[new_id] = slot

    def release(self, request_id: str) -> int | None:
        """Free the slot and return it. None: the request had none."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._free.sort()
        return slot


class HeldRequests:
    """When each request may be let go of, in the order in which they were held. `release` frees one, and
    discards it here."""

    def __init__(self, release: Callable[[str], None]) -> None:
        self._release = release
        self._until_s: dict[str, float] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._until_s

    def add(self, request_id: str, hold_s: float) -> None:
        self._until_s.pop(request_id, None)
        self._until_s[request_id] = time.monotonic() + hold_s

    def discard(self, request_id: str) -> None:
        self._until_s.pop(request_id, None)

    def let_go(self) -> bool:
        """Release the request that has been held longest. False: none is held."""
        oldest = next(iter(self._until_s), None)
        if oldest is not None:
            self._release(oldest)
        return oldest is not None

    def expire(self) -> None:
        now = time.monotonic()
        for request_id in [request_id for request_id, until_s in self._until_s.items() if until_s <= now]:
            self._release(request_id)

    def next_expiry_s(self) -> float | None:
        """The seconds until a held request expires. None: none is held."""
        until_s = min(self._until_s.values(), default=None)
        return None if until_s is None else max(0.0, until_s - time.monotonic())


@dataclass(eq=False)
class _Run:
    owner: int
    n_rows: int
    """Of all pieces of it the longest: the cells that are in use."""


class Cells:
    """Rows per sequence, and cells in all. Pure bookkeeping: code that tells libllama tells this, too."""

    def __init__(self, n_sequences: int) -> None:
        self._pieces: list[list[tuple[_Run, int]]] = [[] for _ in range(n_sequences)]
        self.lengths = [0] * n_sequences
        """Rows that each sequence has, shared or not."""
        self.n_used = 0

    def append(self, sequence: int, n_rows: int) -> None:
        """Add rows that were computed."""
        if not n_rows:
            return
        pieces = self._pieces[sequence]
        self.lengths[sequence] += n_rows
        self.n_used += n_rows
        if pieces:
            run, n = pieces[-1]
            if run.owner == sequence and n == run.n_rows:
                run.n_rows += n_rows
                pieces[-1] = run, run.n_rows
                return
        pieces.append((_Run(sequence, n_rows), n_rows))

    def truncate(self, sequence: int, length: int) -> list[tuple[int, int]]:
        """Remove the rows from `length` on. Returns those which no other sequence has, as ranges
        [first, end) of the sequence's rows."""
        pieces, unused = self._pieces[sequence], []
        while self.lengths[sequence] > length:
            run, n = pieces.pop()
            n_left = max(0, n - (self.lengths[sequence] - length))
            end = self.lengths[sequence]
            self.lengths[sequence] -= n - n_left
            if n_left:
                pieces.append((run, n_left))
            if n_unused := self._shrink(run):
                unused.append((end - n_unused, end))
        return unused

    def share(self, source: int, target: int, length: int) -> None:
        """Give `target`, which is empty, the first `length` rows of `source`."""
        left = min(length, self.lengths[source])
        self.lengths[target] = left
        for run, n in self._pieces[source]:
            if left <= 0:
                break
            self._pieces[target].append((run, min(n, left)))
            left -= n

    def n_alone(self, sequence: int) -> int:
        """The number of cells that become free when the sequence is emptied."""
        return sum(
            n - max((m for other, m in self._others(sequence) if other is run), default=0)
            for run, n in self._pieces[sequence]
            if n == run.n_rows
        )

    def _others(self, sequence: int) -> list[tuple[_Run, int]]:
        return [piece for i, pieces in enumerate(self._pieces) if i != sequence for piece in pieces]

    def _shrink(self, run: _Run) -> int:
        """Count a run as long as its longest piece is now. Returns by how many cells it is shorter."""
        n_rows = max((n for pieces in self._pieces for other, n in pieces if other is run), default=0)
        n_unused, run.n_rows = run.n_rows - n_rows, n_rows
        self.n_used -= n_unused
        return n_unused
