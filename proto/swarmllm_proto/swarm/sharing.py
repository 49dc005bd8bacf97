"""Parts of a node's record: models that it asks others to hold, and files that it asks them to fetch parts
of.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.identifiers import Digest, ModelId, NodeId, PublishedName
from swarmllm_proto.ipc.messages import LayerIndex, require_layer_range
from swarmllm_proto.swarm.base import Count, ShortText

FILE_PARTS_MAX: Final = 128


class SharedModel(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """A model that a node asks the others to hold parts of. Those that accept place it together."""

    model_id: ModelId
    name: ShortText
    source: PublishedName | UnsetType = UNSET
    """Where its file is published; each reader asks its own hub for it, and believes nothing of it."""


class FilePart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Layers [start, end) of a file that one node is asked to fetch."""

    node_id: NodeId
    start: LayerIndex
    end: LayerIndex

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)


class SharedFile(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """A file on a hub that a node asks the others to fetch the layers of, each some: nobody has hashed all of
    it, so that nobody can name it by a ModelId. Those that accept tell each other their hashes
    (`file_digests`); when the model is known, it becomes a SharedModel."""

    source: PublishedName
    """The file, or the first of its parts; each reader asks its own hub for it. Empty: none can."""
    name: ShortText
    header: Digest
    """BLAKE3 of the file up to its first tensor. Of parts: of the file that they make together."""
    size_bytes: Count
    sha256: Digest | UnsetType = UNSET
    """Of the whole file, where the hub says it."""
    parts: Annotated[tuple[FilePart, ...], Meta(max_length=FILE_PARTS_MAX)]


class FetchedFile(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The progress of a node with its parts of a SharedFile."""

    header: Digest
    state: Literal["fetching", "done", "failed"]
    layers: Annotated[tuple[tuple[LayerIndex, LayerIndex], ...], Meta(max_length=64)] = ()
    """`[start, end)` that are on its disk with all they need."""
    arrived_bytes: Count = 0
    total_bytes: Count = 0
    """Told now and then, for people; 0: not known yet."""
    problem: Annotated[str, Meta(max_length=300)] = ""
    """Why it failed, for people."""
