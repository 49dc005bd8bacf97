"""How many KV cells a context has in use, where sequences share some of them.

A cell belongs to every sequence that was given it with `share`. libllama does not say how many are in use;
counting each sequence's rows would count a common prompt once per reader and refuse requests for which there
is room. So the rows of each sequence are kept as pieces of *runs*: a run is rows that one sequence computed
one after the other, and others hold the first so many of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class _Run:
    owner: int
    n_rows: int
    """Of all pieces of it the longest: the cells that are in use."""


class Cells:
    """Rows per sequence, and cells in all. Pure bookkeeping: whoever tells libllama tells this, too."""

    def __init__(self, n_sequences: int) -> None:
        self._pieces: list[list[tuple[_Run, int]]] = [[] for _ in range(n_sequences)]
        self.lengths = [0] * n_sequences
        """Rows that each sequence has, shared or not."""
        self.n_used = 0

    def append(self, sequence: int, n_rows: int) -> None:
        """Rows were computed."""
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

    def truncate(self, sequence: int, length: int) -> None:
        """Rows from `length` on are gone."""
        pieces = self._pieces[sequence]
        while self.lengths[sequence] > length:
            run, n = pieces.pop()
            n_left = max(0, n - (self.lengths[sequence] - length))
            self.lengths[sequence] -= n - n_left
            if n_left:
                pieces.append((run, n_left))
            self._shrink(run)

    def share(self, source: int, target: int, length: int) -> None:
        """`target`, which is empty, holds the first `length` rows of `source`, too."""
        left = min(length, self.lengths[source])
        self.lengths[target] = left
        for run, n in self._pieces[source]:
            if left <= 0:
                break
            self._pieces[target].append((run, min(n, left)))
            left -= n

    def n_alone(self, sequence: int) -> int:
        """Cells that become free when the sequence goes."""
        return sum(
            n - max((m for other, m in self._others(sequence) if other is run), default=0)
            for run, n in self._pieces[sequence]
            if n == run.n_rows
        )

    def _others(self, sequence: int) -> list[tuple[_Run, int]]:
        return [piece for i, pieces in enumerate(self._pieces) if i != sequence for piece in pieces]

    def _shrink(self, run: _Run) -> None:
        n_rows = max((n for pieces in self._pieces for other, n in pieces if other is run), default=0)
        self.n_used -= run.n_rows - n_rows
        run.n_rows = n_rows
