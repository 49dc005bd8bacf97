"""Runs of picture rows in a prompt: rows whose positions are not consecutive, or that attend to later rows.

A request counts rows, everywhere. What libllama calls positions is another thing where a model rotates by
line and column (M-RoPE): the rows of such a picture stand at one time, on a grid, and take as many positions
as its longer side. Every stage derives them from these runs, for whichever rows it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from swarmllm_proto.ipc.base import Position, TokenCount

PICTURE_RUNS_MAX: Final = 1024
"""In one prompt."""
WHOLE_RUN_ROWS_MAX: Final = 512
"""Rows that may see all others of their run: as many as one batch has."""


class PictureRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows [first_row, first_row + n_rows) of a prompt; travels as an array of its fields in this order."""

    first_row: Position
    n_rows: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    grid_width: TokenCount = 0
    """Columns of the grid on which the rows stand, line by line; 0: they stand one after the other."""
    is_causal: bool = True
    """False: each row sees all rows of the run, so that all of them run in one batch."""

    def __post_init__(self) -> None:
        if self.grid_width and self.n_rows % self.grid_width:
            raise ValueError(f"field `grid_width`: {self.n_rows} rows on lines of {self.grid_width}")
        if not self.is_causal and self.n_rows > WHOLE_RUN_ROWS_MAX:
            limit = f"above the limit of {WHOLE_RUN_ROWS_MAX}"
            raise ValueError(f"field `n_rows`: {self.n_rows} rows that see each other, {limit}")

    @property
    def end(self) -> int:
        return self.first_row + self.n_rows

    @property
    def n_positions(self) -> int:
        """That it takes: what follows stands so much further on."""
        if not self.grid_width:
            return self.n_rows
        return max(self.grid_width, self.n_rows // self.grid_width)

    @property
    def is_divisible(self) -> bool:
        """Whether rows in the middle of it can be forgotten and computed again without those before."""
        return self.is_causal and not self.grid_width


PictureRuns = Annotated[tuple[PictureRun, ...], Meta(max_length=PICTURE_RUNS_MAX)]


def require_order(runs: Sequence[PictureRun], n_rows: int) -> None:
    """That they follow each other within a prompt of so many rows. Raises ValueError."""
    end = 0
    for index, run in enumerate(runs):
        if not end <= run.first_row < run.end <= n_rows:
            raise ValueError(
                f"field `picture_runs[{index}]`: rows {run.first_row}:{run.end} after {end}, of {n_rows}"
            )
        end = run.end


def has_grid(runs: Sequence[PictureRun], first: int, n_rows: int) -> bool:
    """Whether any of these rows stands on a grid."""
    return any(run.grid_width and run.first_row < first + n_rows and first < run.end for run in runs)


def whole_before(runs: Sequence[PictureRun], row: int) -> int:
    """The last row up to `row` at which a request can go on: `row`, or where the run begins that it is in."""
    for run in runs:
        if run.first_row < row < run.end and not run.is_divisible:
            return run.first_row
    return row
