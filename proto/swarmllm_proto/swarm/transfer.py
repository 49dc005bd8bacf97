"""Messages between nodes by which a model's bytes travel (see `swarm`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.ipc.base import LayerIndex
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm.base import WIRE_VERSION, Count, Digest, ModelId, TensorName


class FetchPiece(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: some bytes of a model. Answered by Piece.

    "outline": of the msgpack of the model's Outline. "header": of the GGUF before its first tensor. "tensor":
    of the tensor's data, wherever they lie in the holder's file. "chunks": of the tensor's chunk list, the
    BLAKE3 of each MiB of its data, 32 bytes each. "projector": of the file of the model's projector.
    """

    v: int = WIRE_VERSION
    model_id: ModelId
    part: Literal["outline", "header", "tensor", "chunks", "projector"]
    tensor: TensorName = ""
    offset: Count = 0
    """From the start of the part."""
    size_bytes: Annotated[int, Meta(ge=1, le=PIECE_MAX)]
    projector: Digest | UnsetType = UNSET
    """BLAKE3 of the file, for `projector`: a model may have several."""


class Piece(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to FetchPiece. Fewer bytes than asked for: the part ends there."""

    v: int = WIRE_VERSION
    status: Literal["ok", "busy", "absent"]
    """busy: ask again later. absent: not here."""
    data: Annotated[memoryview, Meta(max_length=PIECE_MAX)] = memoryview(b"")
    """Decoded: a view of what was decoded, not a copy."""


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a ModelId covers and a GGUF's header does not contain. Travels inside Pieces."""

    header_bytes: Count
    """Before the first tensor."""
    size_bytes: Count
    """Of the holder's file."""
    digests: dict[TensorName, Digest]
    """Tensor name -> BLAKE3 of its data, or, above one MiB, of its chunk list."""
    checked_unit: LayerIndex = 0
    """Parts of so many layers, or of a multiple, compute the same as the whole model, says the giver who has
    tried; the number of layers: no parts do; 0: it knows nothing beyond the table. Of an architecture in the
    table it may only forbid cuts."""
