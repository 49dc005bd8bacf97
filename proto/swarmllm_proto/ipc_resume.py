"""The part of `ipc` about requests whose pipeline broke: what is kept of them, and who goes on with it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmllm_proto.ipc_base import (
    DaemonMessage,
    LayerIndex,
    Position,
    RequestId,
    Seconds,
    TokenCount,
    WorkerMessage,
)

HeldRanges = Annotated[tuple[tuple[LayerIndex, LayerIndex], ...], Meta(min_length=1, max_length=256)]


class KeptRows(msgspec.Struct, frozen=True, array_like=True):
    """What is left of a request in one range of layers; travels as an array of its fields in this order."""

    n_rows: TokenCount = 0
    """Whose KV is there, from position 0 on."""
    n_journal: TokenCount = 0
    """Whose results can be read again, from position 0 on."""


class HoldRequest(DaemonMessage, frozen=True, tag=True):
    """Stop the request, but keep its KV and its journal for a ResumeRequest, for so long or until others need
    the room. Answered by Done."""

    request_id: RequestId
    hold_s: Seconds


class ResumeRequest(DaemonMessage, frozen=True, tag=True):
    """What was held of `resumes` is this request's from now on, its KV cut to `n_rows`. Answered by
    Resumed."""

    request_id: RequestId
    resumes: RequestId
    n_rows: TokenCount
    ranges: HeldRanges
    """Of which the answer speaks."""

    def __post_init__(self) -> None:
        for start, end in self.ranges:
            if end <= start:
                raise ValueError(f"field `ranges`: {end} must be above start {start}")


class Resumed(WorkerMessage, frozen=True, tag=True, kw_only=True):
    """Answers ResumeRequest."""

    kept: Annotated[tuple[KeptRows, ...], Meta(max_length=256)]
    """Of each range."""


class ReadJournal(DaemonMessage, frozen=True, tag=True):
    """What the layers before `end` gave for rows [position, position + n_rows) of the request, or what came
    to the layers from `end` on. Answered by LayerResult with f32 [n_rows, n_embd]."""

    request_id: RequestId
    end: LayerIndex
    position: Position
    n_rows: Annotated[int, Meta(ge=1, le=4096)]
