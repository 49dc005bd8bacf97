"""Finds the rows of a repaired pipeline that can be checked: those that neighbouring stages have the same
records of.

A stage that replaced a lost one has computed the rows before the break again. The next stage, where it
stayed, still has the rows that the lost stage sent. Different kernels round differently, so the two records
differ although nobody lies.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Comparable(NamedTuple):
    """Rows `first` to `end`."""

    first: int
    end: int


def comparable_rows(
    stage: int, n_stages: int, recomputed: Collection[int], *, n_due: int, n_prompt: int, n_rows: int
) -> Comparable | None:
    """Of `n_rows` rows of `stage`. `recomputed`: the stages that computed all of the first `n_due` rows
    again. None: what came to the stage is not what the one before it has."""
    stays = stage not in recomputed
    if stage and stays and stage - 1 in recomputed:
        return None
    end = n_rows
    if stage == 0 and stays:
        # The tokens came from a last stage that may be gone.
        end = min(end, n_prompt)
    is_last = stage == n_stages - 1
    first = n_due if not is_last and not stays and stage + 1 not in recomputed else 0
    return Comparable(first, end) if first < end else None
