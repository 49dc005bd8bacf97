"""Layer ranges: the one unit in which models are cut, loaded, announced and routed.

Half-open `[start, end)` of absolute layer indices, as everywhere in Python, because then ranges that touch
share a number and lengths need no `+ 1`. Written `start:end` for people, in the CLI and in the
configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import attrgetter

import msgspec

from swarmllm.errors import InvalidRequest
from swarmllm_proto.limits import LAYERS_MAX

MAX_LAYER = LAYERS_MAX

_WRITTEN = re.compile(r"(\d{1,5}):(\d{1,5})", re.ASCII)


class LayerRange(msgspec.Struct, frozen=True, order=True, gc=False):
    """Layers `start` up to, but not including, `end`. Never empty. Raises InvalidRequest for anything
    else.

    No garbage collection looks at them: others announce them by the thousand."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= MAX_LAYER:
            raise InvalidRequest(
                f"layer range {self.start}:{self.end} must satisfy 0 <= start < end <= {MAX_LAYER}",
                field="layers",
            )

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read "0:4". Raises InvalidRequest naming the field `layers`."""
        written = _WRITTEN.fullmatch(text.strip())
        if written is None:
            raise InvalidRequest(
                f"layer range {text[:40]!r} is not of the form start:end, such as 0:4", field="layers"
            )
        return cls(int(written[1]), int(written[2]))

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, other: LayerRange | int) -> bool:
        if isinstance(other, int):
            return self.start <= other < self.end
        return self.start <= other.start and other.end <= self.end

    def overlaps(self, other: LayerRange) -> bool:
        return self.start < other.end and other.start < self.end


def merge(ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """The same layers in the fewest ranges, ascending."""
    merged: list[LayerRange] = []
    for layers in sorted(ranges, key=attrgetter("start", "end")):
        if merged and layers.start <= merged[-1].end:
            merged[-1] = LayerRange(merged[-1].start, max(merged[-1].end, layers.end))
        else:
            merged.append(layers)
    return tuple(merged)


def subtract(ranges: Iterable[LayerRange], removed: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """The layers of `ranges` that are in none of `removed`, in the fewest ranges, ascending."""
    left: list[LayerRange] = []
    gone = merge(removed)
    for layers in merge(ranges):
        start = layers.start
        for hole in gone:
            if not hole.overlaps(layers):
                continue
            if start < hole.start:
                left.append(LayerRange(start, hole.start))
            start = max(start, hole.end)
        if start < layers.end:
            left.append(LayerRange(start, layers.end))
    return tuple(left)


def covers(ranges: Iterable[LayerRange], wanted: LayerRange) -> bool:
    """Whether every layer of `wanted` is in some of `ranges`."""
    return any(wanted in layers for layers in merge(ranges))
