"""At which positions the rows of each sequence stand, where pictures are among them.

Everything but libllama counts rows. A picture's rows may stand on a grid (M-RoPE): all at one time, with line
and column, and what follows stands as many positions further on as the grid's longer side, which are fewer
than its rows. libllama keeps cells by their time, so what is forgotten or shared ends before such a run or
behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np

from swarmllm_proto.picture_runs import PictureRun, has_grid, whole_before

SECTIONS: Final = 4
"""Positions of one row: time, line, column, and one that is always 0."""
Runs = tuple[PictureRun, ...]


def position_of(runs: Sequence[PictureRun], row: int) -> int:
    """The position of a row of text, or of the first row of a run. For a row inside a run on a grid, the
    position of the run."""
    position = row
    for run in runs:
        if row <= run.first_row:
            break
        if run.grid_width:
            position -= min(row, run.end) - run.first_row if row < run.end else run.n_rows - run.n_positions
    return position


def positions_of(runs: Sequence[PictureRun], first: int, n_rows: int) -> np.ndarray:
    """The positions of rows from `first` on, i32 [SECTIONS, n_rows]."""
    rows = np.arange(first, first + n_rows)
    times, lines, columns = rows.copy(), rows.copy(), rows.copy()
    for run in runs:
        if not run.grid_width:
            continue
        behind = rows >= run.end
        for section in (times, lines, columns):
            section[behind] -= run.n_rows - run.n_positions
        inside = (rows >= run.first_row) & ~behind
        if inside.any():
            begins = position_of(runs, run.first_row)
            at = rows[inside] - run.first_row
            times[inside] = begins
            lines[inside], columns[inside] = begins + at // run.grid_width, begins + at % run.grid_width
    return np.stack((times, lines, columns, np.zeros_like(rows))).astype(np.int32)


class SequencePositions:
    """The positions of the rows of each sequence in a segment's KV."""

    def __init__(self, n_sequences: int) -> None:
        self._runs: list[Runs] = [()] * n_sequences
        self.are_plain = True
        """No sequence has a run: each row has its own number for a position, and sees what came before."""

    def __getitem__(self, sequence: int) -> Runs:
        return self._runs[sequence]

    def tell(self, sequence: int, runs: Runs) -> None:
        """Set the runs of a sequence, those of later rows included."""
        if runs != self._runs[sequence]:
            self._runs[sequence] = runs
            self.are_plain = not any(self._runs)

    def share(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` rows of `source`."""
        self.tell(target, tuple(run for run in self._runs[source] if run.first_row < length))

    def of(self, sequence: int, row: int) -> int:
        """The position of a row; see `position_of`."""
        runs = self._runs[sequence]
        return position_of(runs, row) if runs else row

    def whole(self, sequence: int, length: int) -> int:
        """The rows that can be had of the first `length`: those before the run that they end in, where that
        is not divisible."""
        return whole_before(self._runs[sequence], length)

    def has_grid(self, sequence: int, first: int, n_rows: int) -> bool:
        """Whether any of these rows has a position on a grid."""
        return has_grid(self._runs[sequence], first, n_rows)


def sees_later(runs: Sequence[PictureRun], first: int, n_rows: int) -> PictureRun | None:
    """The run whose rows see each other of which some are among these; the first, where there are several."""
    for run in runs:
        if not run.is_causal and run.first_row < first + n_rows and first < run.end:
            return run
    return None


def rows_until_edge(runs: Sequence[PictureRun], first: int, n_rows: int) -> int:
    """Of rows from `first` on, how many may share a batch: up to where a run begins or ends whose rows see
    each other."""
    edges = [edge for run in runs if not run.is_causal for edge in (run.first_row, run.end)]
    at = bisect_left(edges, first + 1)
    return min(n_rows, edges[at] - first) if at < len(edges) else n_rows
