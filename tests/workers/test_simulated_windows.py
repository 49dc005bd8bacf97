"""Several windows of guesses under way, simulated with the worker's own guesser, against one at a time."""

from __future__ import annotations

import pytest

from bench.windows import WAYS, Line, speed

ONE, SEVERAL = WAYS.values()
N_TOKENS = 200


def gains(line: Line, odds: float | None) -> tuple[float, float]:
    """Of one window and of several, over the same chain without guesses."""
    plain = speed(line, odds, 0, N_TOKENS, seed=1)
    one, several = (speed(line, odds, n_jobs, N_TOKENS, seed=1) for n_jobs in (ONE, SEVERAL))
    return one / plain, several / plain


@pytest.mark.parametrize("one_way_s", [5e-5, 0.01, 0.04])
def test_stages_compute_at_once_where_guesses_are_right(one_way_s: float) -> None:
    one, several = gains(Line(4, one_way_s, 0.006, 0.15), 1.0)
    assert one > 3.0
    assert several > 2.0 * one


@pytest.mark.parametrize("one_way_s", [5e-5, 0.01, 0.04])
@pytest.mark.parametrize("odds", [0.0, 0.5, None])
def test_windows_cost_hardly_anything_where_guesses_are_wrong(one_way_s: float, odds: float | None) -> None:
    one, several = gains(Line(4, one_way_s, 0.006, 0.15), odds)
    assert several > 0.95 * one
    assert min(one, several) > 0.97
