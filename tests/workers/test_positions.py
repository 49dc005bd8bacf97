"""At which positions rows of pictures stand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.picture_runs import PictureRun, whole_before
from swarmllm_workers.engine.positions import (
    SequencePositions,
    position_of,
    positions_of,
    rows_until_edge,
    sees_later,
)

GRID = PictureRun(2, 6, 3)
"""Two lines of three."""
SQUARE = PictureRun(10, 4, is_causal=False)


def test_rows_of_a_grid_stand_at_one_time_and_what_follows_behind_its_longer_side() -> None:
    found = positions_of((GRID,), 0, 10)
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
        [0] * 10,
    ]
    assert positions_of((GRID,), 4, 5).tolist() == found[:, 4:9].tolist()


@st.composite
def many_runs(draw: st.DrawFn) -> tuple[PictureRun, ...]:
    runs: list[PictureRun] = []
    at = 0
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.integers(0, 3))
        width, n_lines = draw(st.integers(0, 4)), draw(st.integers(1, 4))
        runs.append(PictureRun(at, (width or 1) * n_lines, width))
        at = runs[-1].end
    return tuple(runs)


@given(many_runs())
def test_positions_are_those_that_one_finds_row_by_row(runs: tuple[PictureRun, ...]) -> None:
    n_rows = (runs[-1].end if runs else 0) + 5
    wanted, position, row = np.zeros((4, n_rows), np.int32), 0, 0
    while row < n_rows:
        run = next((run for run in runs if run.first_row == row and run.grid_width), None)
        if run is None:
            wanted[:3, row] = position
            position, row = position + 1, row + 1
            continue
        for at in range(run.n_rows):
            line, column = divmod(at, run.grid_width)
            wanted[:3, row + at] = position, position + line, position + column
        position, row = position + run.n_positions, run.end
    for first in range(n_rows):
        assert np.array_equal(positions_of(runs, first, n_rows - first), wanted[:, first:])
        assert position_of(runs, first) == wanted[0, first]


def test_a_part_of_a_grid_is_not_shared() -> None:
    positions = SequencePositions(2)
    assert positions.are_plain
    positions.tell(0, (GRID,))
    assert not positions.are_plain
    assert [positions.whole(0, length) for length in range(10)] == [0, 1, 2, 2, 2, 2, 2, 2, 8, 9]
    positions.tell(1, (SQUARE,))
    assert [positions.whole(1, length) for length in (9, 10, 11, 14)] == [9, 10, 10, 14]
    positions.share(0, 1, 8)
    assert positions[1] == (GRID,)
    positions.share(0, 1, 2)
    assert positions[1] == ()
    assert positions.of(0, 8) == 5
    assert positions.of(1, 8) == 8
    positions.tell(1, ())
    assert not positions.are_plain
    assert [positions.has_grid(0, first, 2) for first in (0, 1, 7, 8)] == [False, True, True, False]
    positions.tell(0, ())
    assert positions.are_plain


def test_rows_that_see_each_other_are_found_and_end_where_they_do() -> None:
    runs = GRID, SQUARE
    assert sees_later(runs, 0, 10) is None
    assert sees_later(runs, 9, 2) is SQUARE
    assert sees_later(runs, 14, 5) is None
    assert [rows_until_edge(runs, first, 20) for first in (0, 9, 10, 12, 14)] == [10, 1, 4, 2, 20]
    assert [whole_before(runs, row) for row in (1, 2, 3, 8, 10, 13, 14)] == [1, 2, 2, 8, 10, 10, 14]
