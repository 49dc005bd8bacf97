"""Questions and answers between nodes that each fetched a part of one file, as MessagePack maps.

A ModelId covers every tensor, so anyone who has fetched only some layers from the web cannot know it. But the
header of the file is the same for all, and with it the list of the tensors: who says of which file it speaks
needs no names, only places in that list. A node tells what it hashed itself or what a ModelId covers, never
hearsay, so that a node that says something wrong can be named.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from swarmllm_proto.swarm.messages import (
    DIGEST_SIZE,
    WIRE_VERSION,
    Count,
    Digest,
    SwarmRequest,
    SwarmResponse,
)

FILE_TENSORS_MAX: Final = 65_536
"""Tensors of one file, as many as a header may list."""
RUNS_MAX: Final = FILE_TENSORS_MAX // 2
"""Every second tensor: more runs would touch each other."""


class DigestRun(msgspec.Struct, frozen=True, array_like=True):
    """The digests of tensors that follow one another in a file; travels as an array of its fields in this
    order."""

    first: Annotated[int, Meta(ge=0, le=FILE_TENSORS_MAX - 1)]
    """Place of the first one among the tensors in the order of their offsets."""
    digests: Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=FILE_TENSORS_MAX * DIGEST_SIZE)]
    """Each tensor's digest as in an Outline, 32 bytes each."""

    def __post_init__(self) -> None:
        if len(self.digests) % DIGEST_SIZE:
            raise ValueError(
                f"field `digests`: {len(self.digests)} bytes are no digests of {DIGEST_SIZE} bytes each"
            )
        if self.first + len(self.digests) // DIGEST_SIZE > FILE_TENSORS_MAX:
            raise ValueError(f"field `digests`: beyond the {FILE_TENSORS_MAX} tensors that a file may have")


Runs = Annotated[tuple[DigestRun, ...], Meta(max_length=RUNS_MAX)]


class FetchDigests(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: which tensors of this file do you know? Answered by Digests."""

    v: int = WIRE_VERSION
    header: Digest
    """BLAKE3 of the file up to its first tensor."""
    size_bytes: Count
    sha256: Digest | None = None
    """Of the whole file, where the server said it."""
    known: Runs = ()
    """What the asking node hashed of it: for a node that fetches parts of it too."""


class Digests(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to FetchDigests. "whole": all of it is known here. "part": what this node hashed; it wants to
    know the rest. "unknown": nothing."""

    v: int = WIRE_VERSION
    status: Literal["unknown", "part", "whole"]
    known: Runs = ()


AnyRequest: TypeAlias = SwarmRequest | FetchDigests
AnyResponse: TypeAlias = SwarmResponse | Digests
