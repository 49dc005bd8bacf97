"""Messages between nodes about pictures (see `swarm`): announcements of encoders, requests and encoded rows.

A picture goes to the encoder's node in slices, each with the request's id, and its rows come back in slices.
No other node can ask for them, and no other id gives them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.frames import Buffer
from swarmllm_proto.ipc.base import Dimension, RequestId, TokenCount
from swarmllm_proto.ipc.vision import PICTURE_PARTS_MAX, MediumWord, PicturePart
from swarmllm_proto.limits import IMAGE_MAX, IMAGE_ROWS_MAX
from swarmllm_proto.swarm.base import DIGEST_SIZE, WIRE_VERSION, Count, Digest, ModelId

RECORD_PROJECTORS_MAX: Final = 64

NoRows = Literal["", "VisionEncoderUnavailable", "BadImage", "Busy", "EncoderDied"]


class ProjectorAnnounce(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """The encoder of one model, with which a node encodes pictures, or sounds, for nodes that ask with
    VisionEncodeRequest."""

    model_id: ModelId
    projector: Digest
    """BLAKE3 of its file."""
    n_embd: Dimension
    """Width of the rows that it makes: the model's."""
    shard: Count | UnsetType = UNSET
    """Its number among the model's shards: 2^32 - 1, beyond all layers."""
    size_bytes: Count | UnsetType = UNSET
    """Of its file, which the node gives to nodes that ask with FetchPiece; unset: it does not."""
    takes: Annotated[tuple[MediumWord, ...], Meta(min_length=1, max_length=8)] | UnsetType = UNSET
    """What it encodes: "picture", "sound"; unset: pictures."""


class VisionEncodeRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: encode a picture with a model's vision encoder. Answered by VisionEncodeResponse.

    Sent again with the same `request_id` for the next slice of the picture, while the answer is that there
    are no rows yet, and for further rows.
    """

    v: int = WIRE_VERSION
    request_id: RequestId
    model_id: ModelId
    image: Annotated[memoryview, Meta(max_length=IMAGE_MAX)]
    """Of a PNG, JPEG, WebP or GIF file, from `offset` on; empty where the receiver has all of it."""
    first_row: TokenCount = 0
    """Where a response that was too long for one ends, the next begins."""
    projector: Digest | UnsetType = UNSET
    """Which one of the model is to encode it, as it is announced."""
    digest: Digest | UnsetType = UNSET
    """BLAKE3 of the file."""
    size_bytes: Count | UnsetType = UNSET
    """Of the file; unset: `image` is all of it."""
    offset: Count | UnsetType = UNSET
    """Where `image` begins; unset: at 0."""
    rows_as: Annotated[str, Meta(max_length=16)] | UnsetType = UNSET
    """How rows may come, said with the first slice: "half" as `half_rows` packs them; unset, and where the
    receiver does not know it, as f32."""


class VisionEncodeResponse(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to VisionEncodeRequest. Neither rows nor an error: not yet; ask again."""

    v: int = WIRE_VERSION
    request_id: RequestId
    error: NoRows = ""
    n_rows: TokenCount = 0
    """Of the whole picture."""
    n_embd: TokenCount = 0
    rows: Annotated[memoryview, Meta(max_length=IMAGE_ROWS_MAX)] = memoryview(b"")
    """From `first_row` on, as many as fit: f32, n_embd each, or as `rows_as` says."""
    n_received: Count | UnsetType = UNSET
    """Bytes of the picture that are there: the next slice begins here."""
    parts: Annotated[tuple[PicturePart, ...], Meta(max_length=PICTURE_PARTS_MAX)] | UnsetType = UNSET
    """What the picture is in a prompt, with the first rows: where they stand, and the tokens around them."""
    digest: Annotated[bytes, Meta(max_length=DIGEST_SIZE)] | UnsetType = UNSET
    """With the first rows: `bound_digest` of all of them, as they are once they are unpacked."""
    rows_as: Annotated[str, Meta(max_length=16)] | UnsetType = UNSET
    """Unset: f32."""
    n_here: TokenCount | UnsetType = UNSET
    """How many rows `rows` are, where it is packed."""


def bound_digest(
    model_id: ModelId, projector: Digest, picture: Digest, parts: Iterable[PicturePart], rows: Buffer
) -> bytes:
    """32 bytes that bind what a picture became to picture, projector and model. `rows`: all of them, f32
    little-endian, one after the other."""
    digest = blake3(bytes.fromhex(model_id + projector + picture))
    for part in parts:
        numbers = (len(part.tokens), part.n_rows, *part.tokens)
        digest.update(struct.pack(f"<{len(numbers)}I", *numbers))
        if part.grid_width or not part.is_causal:
            # No part has neither tokens nor rows: this cannot be another part.
            digest.update(struct.pack("<4I", 0, 0, part.grid_width, part.is_causal))
    return digest.update(rows).digest()
