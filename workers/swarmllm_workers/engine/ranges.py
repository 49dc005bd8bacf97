"""Arithmetic of layer ranges [start, end): unions and differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]


def merge(ranges: Sequence[Range]) -> list[Range]:
    """The same layers in the fewest ranges, in order."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(ranges: Sequence[Range], removed: Sequence[Range]) -> list[Range]:
    """The layers of `ranges` that are not in `removed`, in order."""
    remaining = merge(ranges)
    for cut_start, cut_end in removed:
        parts: list[Range] = []
        for start, end in remaining:
            parts += [(start, min(end, cut_start)), (max(start, cut_end), end)]
        remaining = [(start, end) for start, end in parts if start < end]
    return remaining


def join(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{start}:{end}" for start, end in ranges)
