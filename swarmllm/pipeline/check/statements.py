"""Keeps what the stages of one attempt have signed for, and wakes who waits for more of it.

An attempt has them from when its stages are asked to take part. They outlive it for a while (see
`OriginRequests`): a stage may state what it sent after the last token has come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from swarmllm.pipeline.check.ledger import Ledger
from swarmllm.pipeline.request import RequestContext
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.row_commitments import pipeline_digest

EVIDENCE_S: Final = 10.0
"""Within which a stage has said what it sent, when its request is over. Its node may be busy, and lateness is
no guilt."""


@dataclass(slots=True, eq=False)
class Statements:
    context: RequestContext
    """Of the attempt."""
    ledger: Ledger
    pipeline: bytes
    """The digest of the pipeline, which every signature covers."""
    settled: set[int] = field(default_factory=set)
    """Stages of which a contradiction with the next one has been settled."""
    _changed: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    @classmethod
    def of(cls, context: RequestContext) -> Statements:
        """None have been made yet."""
        stages = context.view.stages
        ledger = Ledger(len(stages), context.n_prompt_tokens + context.sampling.max_tokens)
        digest = pipeline_digest(context.request_id, context.model.model_id, context.view.origin, stages)
        return cls(context, ledger, digest)

    def node_id(self, stage: int) -> NodeId:
        return self.context.view.stages[stage].node_id

    def changed(self) -> None:
        """One more has been made."""
        self._changed.unpark_all()

    async def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Until it has been stated, or there was time to."""
        with trio.move_on_after(EVIDENCE_S):
            while not is_there():
                await self._changed.park()
