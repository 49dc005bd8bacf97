"""Takes the signed statements of stages about their rows, for the requests of this node, and settles
contradictions.

Where two neighbours contradict each other, the receiver of the rows is asked for the sender's signature. If
it has one, the sender told this node something else and is the liar. If it has none, both lose a little trust
(see `verdict_recorder`). Either way one of the two has wrong rows, so the request moves to another pipeline.

A stage that refuses rows names their sender. The sender has stated what it sent, or gives no evidence, and
the stage shows the rows that it refused.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import numpy as np
import trio
from blake3 import blake3
from msgspec import UNSET

from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.check.ledger import Disagreement, InvalidCommitment, Ledger, Side
from swarmllm.pipeline.check.verdict_recorder import VerdictRecorder
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.lifecycle import OVER
from swarmllm.pipeline.tasks import PipelineTasks
from swarmllm.swarm.membership.signer import RowSigner
from swarmllm.swarm.peers.trust import NodeTrust, TrustEvent
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import decode_job, decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.row_commitments import (
    STRETCH_ROWS,
    RowsCommitment,
    is_signed_by,
    pipeline_digest,
    stretch_digests,
)
from swarmllm_proto.swarm import FetchRows, PipelineAssignment, PipelineError, RowsPiece

log = logging.getLogger(__name__)

LINGER_S: Final = 15.0
"""For what is said of a request after its end."""
LINGERING_MAX: Final = 256
ANSWER_TIMEOUT_S: Final = 5.0
EVIDENCE_S: Final = 10.0
"""Within which a stage has said what it sent, when its request is over. Its node may be busy, and lateness is
no guilt."""
_F32: Final = np.dtype("<f4")


@dataclass(slots=True)
class _Request:
    chain: Chain
    ledger: Ledger
    pipeline: bytes
    closed_s: float = float("inf")
    settled: set[int] = field(default_factory=set)
    """Stages of which a contradiction with the next one has been settled."""

    said: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    async def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Until it has been said, or there was time to."""
        with trio.move_on_after(EVIDENCE_S):
            while not is_there():
                await self.said.park()

    def node_id(self, stage: int) -> NodeId:
        return self.chain.context.view.stages[stage].node_id


@dataclass(slots=True)
class Commitments:
    router: Router
    registry: Registry
    verdict_recorder: VerdictRecorder
    trust: NodeTrust
    tasks: PipelineTasks
    signer: RowSigner | None = None
    """None: this node asks no stage to commit."""
    _requests: OrderedDict[str, _Request] = field(default_factory=OrderedDict)
    """By the id of an attempt. They are not in its OriginRequest, which ends LINGER_S before they do."""

    def asked(self, assignment: PipelineAssignment) -> PipelineAssignment:
        """The same, with what is asked of stages that can do it."""
        if self.signer is None or len(assignment.stages) < 2:
            return assignment
        stages = tuple(
            msgspec.structs.replace(stage, commits=True) if self.can_commit(stage.node_id) else stage
            for stage in assignment.stages
        )
        return msgspec.structs.replace(assignment, stages=stages)

    def can_commit(self, node_id: NodeId) -> bool:
        """Whether it announces that it signs for its rows, and so tells fingerprints of logits too."""
        record = self.registry.node(node_id)
        is_announced = record is not None and record.capability.commits is True
        return node_id == self.router.node_id or is_announced

    def opened(self, chain: Chain) -> None:
        """A pipeline begins."""
        context = chain.context
        last = context.view.stages[-1].node_id
        if self.signer is not None and last != self.router.node_id and self.can_commit(last):
            chain.fingerprints.expect()
        if self.signer is None or all(stage.commits is not True for stage in context.view.stages):
            return
        ledger = Ledger(len(context.view.stages), context.n_prompt_tokens + context.sampling.max_tokens)
        pipeline = pipeline_digest(
            context.request_id, context.model.model_id, context.view.origin, context.view.stages
        )
        self._requests[context.request_id] = _Request(chain, ledger, pipeline)

    def ledger(self, request_id: str) -> Ledger | None:
        request = self._requests.get(request_id)
        return None if request is None else request.ledger

    def repeated(self, chain: Chain, position: int) -> None:
        """Rows from there on leave once more, because a job was damaged on its way."""
        if (ledger := self.ledger(chain.context.request_id)) is not None:
            ledger.repeated(position, max(position + 1, chain.window.n_sent))

    async def said_by(self, chain: Chain, stage: int) -> Ledger | None:
        """What has been said, when a stage and those beside it have spoken of its rows after the end, or have
        had time to. None: nobody was to."""
        request = self._requests.get(chain.context.request_id)
        if request is None:
            return None
        n_rows = chain.n_rows
        last = (n_rows - 1) // STRETCH_ROWS * STRETCH_ROWS
        sides: list[tuple[int, Side]] = [(stage - 1, "sent"), (stage, "received"), (stage, "sent")]
        sides.append((stage + 1, "received"))
        stages = chain.context.view.stages
        due = [
            (index, side)
            for index, side in sides
            if 0 <= index < len(stages)
            and stages[index].commits is True
            and (index, side) not in ((0, "received"), (len(stages) - 1, "sent"))
        ]
        await request.wait_for(
            lambda: all(request.ledger.said(*each, last, n_rows - last) is not None for each in due)
        )
        return request.ledger

    def closed(self, chain: Chain) -> None:
        """Late news of it are heard for a while."""
        now_s = trio.current_time()
        if (request := self._requests.get(chain.context.request_id)) is not None:
            request.closed_s = now_s
            self._requests.move_to_end(chain.context.request_id)
        over = [key for key, each in self._requests.items() if each.closed_s <= now_s]
        for key in over:
            is_old = self._requests[key].closed_s + LINGER_S <= now_s
            if is_old or len(self._requests) > LINGERING_MAX:
                del self._requests[key]

    def take(self, sender: NodeId, said: RowsCommitment) -> bool:
        """Takes a statement of another node. False: this node has no such request."""
        request = self._requests.get(said.request_id)
        if request is None or self.signer is None:
            return False
        stages = request.chain.context.view.stages
        if said.stage >= len(stages) or stages[said.stage].node_id != sender:
            self._note(sender, f"a commitment of stage {said.stage}, which is not there")
        elif stages[said.stage].commits is not True:
            self._note(sender, "a commitment that nobody asked for")
        elif not is_signed_by(said, request.pipeline, sender, self.signer.verify):
            self._note(sender, "a commitment with another's signature")
        else:
            self._add(sender, request, said)
        return True

    def own(self, said: RowsCommitment) -> None:
        """Of a stage here."""
        if (request := self._requests.get(said.request_id)) is not None:
            self._add(self.router.node_id, request, said)

    def accused(self, sender: NodeId, message: PipelineError) -> None:
        """A stage refuses rows of the one before it (see `Chain.receive`, which has seen the message)."""
        request = self._requests.get(message.request_id)
        if request is None:
            return
        stages = request.chain.context.view.stages
        for stage in range(len(stages) - 1):
            pair = stages[stage], stages[stage + 1]
            is_theirs = pair[0].node_id == message.node_id and pair[1].node_id == sender
            if is_theirs and all(each.commits is True for each in pair) and stage not in request.settled:
                request.settled.add(stage)
                self.tasks.spawn_if_running(partial(self._settle_refusal, request, stage, message.position))
                return

    def _add(self, sender: NodeId, request: _Request, said: RowsCommitment) -> None:
        try:
            found = request.ledger.add(said)
        except InvalidCommitment as error:
            self._note(sender, f"a commitment that cannot be: {error}")
            return
        request.said.unpark_all()
        for contradiction in found:
            if contradiction.stage not in request.settled:
                request.settled.add(contradiction.stage)
                self.tasks.spawn_if_running(partial(self._settle, request, contradiction))

    async def _settle(self, request: _Request, found: Disagreement) -> None:
        sender, receiver = request.node_id(found.stage), request.node_id(found.stage + 1)
        here = self.router.node_id
        provoked_by(log, sender).warning(
            "request %s: %s and %s say different things of rows %d to %d between them",
            *(request.chain.context.request_id, sender, receiver),
            *(found.position, found.position + found.n_rows),
        )
        is_proven = receiver == here or (sender != here and await self._is_proven(request, found))
        if is_proven:
            self.verdict_recorder.wrong(sender, "it signed for other rows than it sent, or told")
            self._leave(request, frozenset({sender}))
        else:
            self.verdict_recorder.contradict(sender, receiver)
            self._leave(request, frozenset({sender, receiver} - {here}))

    def _leave(self, request: _Request, doubted: frozenset[NodeId]) -> None:
        """The next pipeline does without these."""
        chain = request.chain
        if chain.state not in OVER:
            chain.blamed.doubted = doubted
            chain.fail(RemoteError("two stages contradict each other about rows"))

    async def _is_proven(self, request: _Request, found: Disagreement) -> bool:
        """Whether the next stage has the signature of the one before it for what it says to have got."""
        piece = await self._ask(request, found.stage, found.position, found.n_rows, digest_only=True)
        received = request.ledger.said(found.stage + 1, "received", found.position, found.n_rows)
        return received is not None and self._has_signed(
            request, piece, found.stage, found.position, received
        )

    def _has_signed(
        self, request: _Request, piece: RowsPiece | None, stage: int, position: int, digest: bytes
    ) -> bool:
        if piece is None or piece.commitment is UNSET or self.signer is None:
            return False
        try:
            shown = decode_job(piece.commitment)
        except ProtocolError:
            return False
        if not isinstance(shown, RowsCommitment) or shown.stage != stage:
            return False
        index, rest = divmod(position - shown.position, STRETCH_ROWS)
        if rest or not 0 <= index < len(stretch_digests(shown.sent)):
            return False
        is_it = stretch_digests(shown.sent)[index] == digest
        return is_it and is_signed_by(shown, request.pipeline, request.node_id(stage), self.signer.verify)

    async def _settle_refusal(self, request: _Request, stage: int, position: int) -> None:
        sender, receiver = request.node_id(stage), request.node_id(stage + 1)
        if self.router.node_id in (sender, receiver):
            return  # What this node sent, and what came to it, it knows by itself.
        await request.wait_for(lambda: request.ledger.stretch_with(stage, position) is not None)
        if (found := request.ledger.stretch_with(stage, position)) is None:
            self.verdict_recorder.no_evidence(sender)
            return
        start, said = found
        piece = await self._ask(request, stage, start, said.n_rows, digest_only=False)
        if piece is not None and self._are_bad(request, stage, start, said.n_rows, said.digest, piece):
            self.verdict_recorder.bad_rows(sender)
        else:
            self.verdict_recorder.contradict(sender, receiver)

    def _are_bad(
        self, request: _Request, stage: int, start: int, n_rows: int, digest: bytes, piece: RowsPiece
    ) -> bool:
        """Whether the rows that the next stage shows are what the one before it signed for, and no layer
        computes them."""
        shown = blake3(piece.rows).digest()
        if shown != digest and not self._has_signed(request, piece, stage, start, shown):
            return False
        if len(piece.rows) != n_rows * request.chain.context.n_embd * _F32.itemsize:
            return True
        return not bool(np.isfinite(np.frombuffer(piece.rows, _F32)).all())

    async def _ask(
        self, request: _Request, stage: int, position: int, n_rows: int, *, digest_only: bool
    ) -> RowsPiece | None:
        """The stage after `stage`, what came to it. None: it does not say."""
        context = request.chain.context
        asked = FetchRows(
            request_id=context.request_id,
            boundary=context.view.stages[stage].end,
            position=position,
            n_tokens=n_rows,
            digest_only=digest_only,
        )
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                body = await self.router.request(
                    request.node_id(stage + 1), encode_request(asked), timeout_s=ANSWER_TIMEOUT_S
                )
            piece = decode_response(body)
        except (trio.TooSlowError, SwarmLLMError, ProtocolError):
            return None
        return piece if isinstance(piece, RowsPiece) and piece.known else None

    def _note(self, sender: NodeId, detail: str) -> None:
        self.trust.note(sender, TrustEvent.BROKE_PROTOCOL, detail)
