"""The part of `swarm` about pictures."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarmllm_proto.ipc_base import RequestId, TokenCount
from swarmllm_proto.limits import IMAGE_MAX, IMAGE_ROWS_MAX
from swarmllm_proto.swarm_base import WIRE_VERSION, ModelId


class VisionEncodeRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: what a model's vision encoder makes of a picture."""

    v: int = WIRE_VERSION
    request_id: RequestId
    model_id: ModelId
    image: Annotated[memoryview, Meta(min_length=1, max_length=IMAGE_MAX)]
    """A PNG, JPEG or WebP file."""
    first_row: TokenCount = 0
    """Where a response that was too long for one ends, the next begins."""


class VisionEncodeResponse(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to VisionEncodeRequest."""

    v: int = WIRE_VERSION
    request_id: RequestId
    error: Literal["", "VisionEncoderUnavailable", "BadImage"] = ""
    n_rows: TokenCount = 0
    """Of the whole picture: as many positions of the prompt."""
    n_embd: TokenCount = 0
    rows: Annotated[memoryview, Meta(max_length=IMAGE_ROWS_MAX)] = memoryview(b"")
    """f32, n_embd each, from `first_row` on, as many as fit."""
