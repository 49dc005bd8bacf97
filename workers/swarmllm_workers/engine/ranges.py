"""Layer ranges [start, end): their unions and differences, and routes through segments that cover them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swarmllm_workers.engine.segment import Segment

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


@dataclass(frozen=True)
class Route:
    """Segments that run [start, end) one after the other."""

    start: int
    end: int
    segments: tuple[Segment, ...]

    @property
    def is_closed(self) -> bool:
        for segment in self.segments:  # noqa: SIM110 (between two decode steps, a generator is a detour)
            if segment.is_closed:
                return True
        return False


def find_path(segments: Sequence[Segment], start: int, end: int) -> list[Segment] | None:
    """Segments that cover [start, end) exactly, the longest first where there is a choice."""
    if start == end:
        return []
    candidates = [segment for segment in segments if segment.start == start and segment.end <= end]
    for segment in sorted(candidates, key=lambda s: -s.end):
        rest = find_path(segments, segment.end, end)
        if rest is not None:
            return [segment, *rest]
    return None
