"""Through which segments a request's rows go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmllm_workers.engine.segment import Segment


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
