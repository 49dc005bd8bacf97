"""Segment files, small GGUFs that hold some layers of another: what they are called, and how one whose header
was damaged is told.

Where the layers of a stored model lie: in the container, or in a segment file beside it.

A node that loads some layers of a container needs them as a segment file, and then their bytes are moved
there: no layer lies on the disk twice. The segment files themselves say what has moved. One is called
`segments/v4-4-8.gguf` (layout 4, layers 4 to 7), lies in the container's folder, and is complete as soon as
it has that name; what it holds of the model is read from there from then on, never from the container.

Only what a segment alone needs moves: its layers, and with the head the output matrix. What several segments
need (the embedding, tensors that all layers share) stays.

A file of the user's stays as it is: its segment files are copies, in a folder for those of all models, and
have the source's path, size and time in their names.

The header of a segment file is the worker's own work, so no hash of the model covers it; it has one of itself
in its first key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from blake3 import blake3

LAYOUT_VERSION = 4
"""To be raised when the worker writes something else for the same range."""
FOLDER = "segments"
UNFINISHED = "."
"""What the name of a file begins with while it is written."""
TRIAL = "check-"
"""And that of a folder in which cuts are tried."""
SEAL_KEY = "swarmllm.header_blake3"
"""BLAKE3 of the bytes before the first tensor, with NO_SEAL in its own place."""
NO_SEAL = "0" * 64
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
        return self.in_model(tensor) if _LAYER.fullmatch(tensor) else None

    def in_model(self, tensor: str) -> str | None:
        """The same for whatever is in the segment file, moved or copied; None: a layer that it cannot
        have."""
        layer = _LAYER.fullmatch(tensor)
        if layer is None:
            return tensor
        index = self.start + int(layer[1])
        return f"blk.{index}.{layer[2]}" if index < self.end else None


def parse_segment_name(file_name: str) -> SegmentName | None:
    """None: not the name of a segment file."""
    match = _FILE_NAME.fullmatch(file_name)
    return None if match is None else SegmentName(*map(int, match.groups()))


def copy_prefix(source: str, size_bytes: int, mtime_ns: int) -> str:
    """What the names of the segment files of one file of the user's begin with."""
    identity = f"{source}|{size_bytes}|{mtime_ns}|{LAYOUT_VERSION}"
    return blake2b(identity.encode(), digest_size=12).hexdigest()


def copy_name(prefix: str, start: int, end: int) -> str:
    return f"{prefix}-{start}-{end}.gguf"


def parse_copy_name(file_name: str, prefix: str) -> SegmentName | None:
    """None: not the name of a copy of layers of that file."""
    if not file_name.startswith(f"{prefix}-"):
        return None
    return parse_segment_name(f"v{LAYOUT_VERSION}{file_name.removeprefix(prefix)}")


def seal(header: bytes, at: int) -> bytes:
    """The header with its hash at `at`, where NO_SEAL is."""
    return header[:at] + header_hash(header, at) + header[at + len(NO_SEAL) :]


def header_hash(header: bytes, at: int) -> bytes:
    """64 hexadecimal digits; whatever stands at `at` does not count."""
    bare = header[:at] + NO_SEAL.encode() + header[at + len(NO_SEAL) :]
    return blake3(bare).hexdigest().encode()
