"""Where the layers of a stored model lie: in the container, or in a segment file beside it.

Whoever loads some layers of a container needs them as a segment file, and then their bytes are moved there:
no layer lies on the disk twice. The segment files themselves say what has moved. One is called
`segments/v3-4-8.gguf` (layout 3, layers 4 to 7), lies in the container's folder, and is complete as soon as
it has that name; what it holds of the model is read from there from then on, never from the container.

Only what a segment alone needs moves: its layers, and with the head the output matrix. What several segments
need (the embedding, tensors that all layers share) stays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FOLDER = "segments"
_FILE_NAME = re.compile(r"v(\d{1,9})-(\d{1,9})-(\d{1,9})\.gguf", re.ASCII)
_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class SegmentName:
    layout: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"v{self.layout}-{self.start}-{self.end}.gguf"

    def holds(self, tensor: str, n_layers: int) -> bool:
        """Whether this tensor of the model moves to the segment file."""
        if tensor == "output.weight":
            return self.end == n_layers
        layer = _LAYER.fullmatch(tensor)
        return layer is not None and self.start <= int(layer[1]) < self.end

    def moved(self, tensor: str, n_layers: int) -> str | None:
        """The name in the model of what the segment file calls `tensor`; None: that has not moved."""
        if tensor == "output.weight":
            return tensor if self.end == n_layers else None
        layer = _LAYER.fullmatch(tensor)
        if layer is None or self.start + int(layer[1]) >= self.end:
            return None
        return f"blk.{self.start + int(layer[1])}.{layer[2]}"


def parse_segment_name(file_name: str) -> SegmentName | None:
    """None: not the name of a segment file."""
    match = _FILE_NAME.fullmatch(file_name)
    return None if match is None else SegmentName(*map(int, match.groups()))
