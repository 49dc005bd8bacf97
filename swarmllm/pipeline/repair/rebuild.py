"""Rebuilds a broken pipeline: asks its stages what they have, and feeds rows to those that have nothing.

The origin feeds: one piece after the other leaves the journal of a stage (or the origin's own embedding) for
the stages that are built again, no more at once than they can take, until they have every row but the newest
token's. That row then walks the whole pipeline, and gives the next token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from swarmllm.pipeline.origin.assignment import Assigner, assign
from swarmllm.pipeline.origin.output import Chunk, PromptWindow
from swarmllm.pipeline.repair.plan import Rebuild, StageRemainder
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_proto.swarm import (
    KeptElsewhere,
    PipelineAck,
    PipelineAssignment,
    ReplayRows,
    Stage,
    StageBlocks,
    StageRows,
)


async def assign_resuming(
    sessions: Sessions,
    assignment: PipelineAssignment,
    context: RequestContext,
    assigner: Assigner,
    *,
    timeout_s: float,
    new: Collection[int] = (),
    sources: Sequence[KeptElsewhere] = (),
) -> tuple[Remainder, dict[NodeId, PipelineAck]]:
    """Ask every stage to take part in a pipeline that resumes a broken one. `new`: stages of which that one
    had none; they are told names, for KV of earlier requests, and `sources` say where they may fetch it.
    Returns what each stage has, and the acknowledgements of the other nodes. Raises as `assign` does."""
    stages, here = assignment.stages, context.view.node_id

    def names_of(node_id: NodeId) -> tuple[StageBlocks, ...]:
        mine = {stage for stage, each in enumerate(stages) if each.node_id == node_id}
        return assigner.prefixes_of(node_id) if mine.issubset(new) else ()

    acks = await assign(
        sessions.router,
        assignment,
        timeout_s=timeout_s,
        blamed=assigner.blamed,
        prefixes_of=names_of,
        sources=sources,
    )
    kept_by = {node_id: ack.kept for node_id, ack in acks.items()}
    kept_by[here] = await sessions.take_over(context, assignment.resumes)
    n_blocks = {node_id: ack.n_prefix_blocks for node_id, ack in acks.items() if names_of(node_id)}
    known = {
        stage: n_blocks[each.node_id] * BLOCK_TOKENS
        for stage, each in enumerate(stages)
        if n_blocks.get(each.node_id)
    }
    return Remainder(left_of(stages, kept_by), known), acks


class Remainder(NamedTuple):
    """What a broken pipeline's stages have when another one resumes it."""

    left: tuple[StageRemainder, ...]
    known: Mapping[int, int]
    """By new stage, how many first rows it has of an earlier request, its own or another node's."""


def left_of(
    stages: Sequence[Stage], kept_by: Mapping[NodeId, Iterable[StageRows]]
) -> tuple[StageRemainder, ...]:
    """What each stage has, by what its own node says; no node speaks for another."""
    left = [StageRemainder()] * len(stages)
    for node_id, kept in kept_by.items():
        for rows in kept:
            if rows.stage < len(stages) and stages[rows.stage].node_id == node_id:
                left[rows.stage] = StageRemainder(rows.n_rows, rows.n_journal)
    return tuple(left)


class RebuildSchedule:
    """Decides which rows are sent next, and from which stage, while stages are rebuilt. Pure bookkeeping."""

    def __init__(
        self,
        planned: Sequence[Rebuild],
        n_due: int,
        chunk_tokens: int,
        ends: Sequence[int] = (),
        runs: Sequence[PictureRun] = (),
    ) -> None:
        """`n_due`: rows that every stage is to have. `ends`, `runs`: as in PromptWindow."""
        self._left = deque(planned)
        self._n_due = n_due
        self._chunk_tokens = chunk_tokens
        self._ends, self._runs = ends, runs
        self.now: Rebuild | None = None
        """None: every stage has its rows."""
        self.window: PromptWindow
        self.advance()

    def advance(self) -> None:
        """What was under way has got there."""
        self.now = self._left.popleft() if self._left else None
        if self.now is not None:
            size = self.now.until - self.now.first + 2
            self.window = PromptWindow(
                self._n_due,
                self._chunk_tokens,
                size,
                self.now.begin,
                ends=self._ends,
                runs=self._runs,
            )

    @property
    def until(self) -> int:
        """The stage that says how far it is."""
        assert self.now is not None
        return self.now.until

    @property
    def may_embed(self) -> bool:
        """Whether `next_embedded` would give something now."""
        return self.now is not None and self.now.source is None and self.window.may_send()

    @property
    def is_over(self) -> bool:
        return self.now is None

    def passed(self, position: int) -> bool:
        """Rows below `position` are where they are to be; whether more than before. Raises
        InvalidReport."""
        has_advanced = self.window.passed(position)
        if self.window.n_passed >= self._n_due:
            self.advance()
        return has_advanced

    def next_embedded(self) -> Chunk | None:
        """What the origin is to embed and send now."""
        if self.now is None or self.now.source is not None:
            return None
        chunk = self.window.next_chunk()
        # Behind the last of these rows there is still the newest token's.
        return None if chunk is None else chunk._replace(left=chunk.left + 1, until=self.now.until)

    def next_replays(self, request_id: str) -> Iterable[ReplayRows]:
        """The rows that a stage has to send again now."""
        if self.now is None or self.now.source is None:
            return
        while (chunk := self.window.next_chunk()) is not None:
            yield ReplayRows(
                request_id=request_id,
                stage=self.now.source,
                position=chunk.position,
                n_tokens=chunk.n_tokens,
                until=self.now.until,
            )
