"""The part of `swarm` about requests whose pipeline broke: what a stage has left, and rows that leave it once
more."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmllm_proto.ipc_base import Position, RequestId, StageIndex, TokenCount
from swarmllm_proto.swarm_base import WIRE_VERSION


class StageRows(msgspec.Struct, frozen=True, array_like=True):
    """What one stage still has of a request that it took part in; travels as an array of its fields in this
    order."""

    stage: StageIndex
    n_rows: TokenCount
    """Whose KV is there, from position 0 on."""
    n_journal: TokenCount
    """That it can send on once more, from position 0 on."""


class ReplayRows(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message, origin -> a stage: send rows that left it once more to the stage after it, which has lost
    its KV or is another node. They arrive there as a LayerForward."""

    v: int = WIRE_VERSION
    request_id: RequestId
    stage: StageIndex
    """Whose results they are."""
    position: Position
    n_tokens: Annotated[int, Meta(ge=1, le=4096)]
    until: StageIndex
    """The last stage that is to compute them."""

    def __post_init__(self) -> None:
        if self.until <= self.stage:
            raise ValueError(f"field `until`: {self.until} must be after stage {self.stage}")
