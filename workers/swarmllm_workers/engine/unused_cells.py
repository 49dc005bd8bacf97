"""Leaves cells taken whose rows nobody has any more, while other requests have rows.

Attention sums in the order of the cells, and libllama puts the next rows of whoever computes into the first
cells that are free. Where those are before the cells of its other rows, all its sums from then on have
another order, and other bits than if nobody had ended meanwhile. So such cells stay taken, under a sequence
of their own, until no request has rows, or until somebody needs them. To everybody else they are free.
"""

from __future__ import annotations

from typing import Final

from swarmllm_workers.engine.libllama import Context

N_CELLS_MIN: Final = 1024
"""So many may stay taken in any case, beyond that as many as are in use: attention passes over all of them
with every row."""


class UnusedCells:
    def __init__(self, context: Context, sequence: int | None) -> None:
        """`sequence`: which nobody else uses; None: nothing stays taken."""
        self._context = context
        self._sequence = sequence
        self.n_cells = 0

    def take(self, source: int, first: int, end: int, n_cells: int, n_used: int) -> None:
        """Have the cells of `n_cells` rows of `source` at positions [first, end), which no other sequence
        has, stay taken when `source` forgets them. `n_used`: cells that are in use then."""
        if self._sequence is None:
            return
        self._context.share_rows(source, self._sequence, first, end)
        self.n_cells += n_cells
        if self.n_cells > max(N_CELLS_MIN, n_used):
            self.free()

    def free(self) -> bool:
        """Whether there were any."""
        if self._sequence is None or not self.n_cells:
            return False
        self._context.truncate(self._sequence, 0)
        self.n_cells = 0
        return True
