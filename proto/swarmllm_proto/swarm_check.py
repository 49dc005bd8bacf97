"""The part of `swarm` about checks of what stages have computed: rows of a request, as a stage has them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmllm_proto.ipc_base import LayerIndex, Position, RequestId
from swarmllm_proto.limits import CHECKED_ROWS_MAX
from swarmllm_proto.swarm_base import DIGEST_SIZE, WIRE_VERSION


class FetchRows(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request, origin -> stage, after the last token: rows at a layer boundary, as they left the stage that
    ends there or came to the one that begins there. Answered by RowsPiece."""

    v: int = WIRE_VERSION
    request_id: RequestId
    boundary: LayerIndex
    position: Position
    n_tokens: Annotated[int, Meta(ge=1, le=4096)]
    digest_only: bool = False


class RowsPiece(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to FetchRows."""

    v: int = WIRE_VERSION
    request_id: RequestId
    known: bool
    """False: not all of these rows are here any more."""
    digest: Annotated[bytes, Meta(max_length=DIGEST_SIZE)] = b""
    """BLAKE3 of the rows."""
    rows: Annotated[memoryview, Meta(max_length=CHECKED_ROWS_MAX)] = memoryview(b"")
    """f32, little-endian, one row after the other."""
