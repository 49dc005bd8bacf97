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
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import numpy as np
import trio
from blake3 import blake3
from msgspec import UNSET

from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.check.ledger import Disagreement, InvalidCommitment, Ledger, Side, SignedStretch
from swarmllm.pipeline.check.statements import Statements
from swarmllm.pipeline.check.verdict_recorder import VerdictRecorder
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.lifecycle import OVER
from swarmllm.pipeline.origin.requests import Attempt, OriginRequests
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
    stretch_digests,
)
from swarmllm_proto.swarm import FetchRows, PipelineAssignment, PipelineError, RowsPiece

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 5.0
_F32: Final = np.dtype("<f4")


@dataclass(slots=True)
class Commitments:
    router: Router
    registry: Registry
    verdict_recorder: VerdictRecorder
    trust: NodeTrust
    tasks: PipelineTasks
    requests: OriginRequests
    signer: RowSigner | None = None
    """None: this node asks no stage to commit."""

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

    def opened(self, attempt: Attempt, chain: Chain) -> None:
        """A pipeline begins."""
        context = attempt.context
        last = context.view.stages[-1].node_id
        if self.signer is not None and last != self.router.node_id and self.can_commit(last):
            chain.fingerprints.expect()
        if self.signer is not None and any(stage.commits is True for stage in context.view.stages):
            attempt.statements = Statements.of(context)

    def repeated(self, chain: Chain, position: int) -> None:
        """Rows from there on leave once more, because a job was damaged on its way."""
        attempt = self.requests.attempt(chain.context.request_id)
        if attempt is not None and attempt.statements is not None:
            attempt.statements.ledger.repeated(position, max(position + 1, chain.window.n_sent))

    async def said_by(self, attempt: Attempt, chain: Chain, stage: int) -> Ledger | None:
        """What has been said, when a stage and those beside it have spoken of its rows after the end, or have
        had time to. None: nobody was to."""
        statements = attempt.statements
        if statements is None:
            return None
        ledger, n_rows = statements.ledger, chain.n_rows
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
        await statements.wait_for(
            lambda: all(ledger.said(*each, last, n_rows - last) is not None for each in due)
        )
        return ledger

    def take(self, sender: NodeId, commitment: RowsCommitment) -> bool:
        """Takes a statement of another node. False: none is due in an attempt of this id."""
        attempt = self.requests.attempt(commitment.request_id)
        if attempt is None or attempt.statements is None or self.signer is None:
            return False
        stages = attempt.context.view.stages
        if commitment.stage >= len(stages) or stages[commitment.stage].node_id != sender:
            self._note(sender, f"a commitment of stage {commitment.stage}, which is not there")
        elif stages[commitment.stage].commits is not True:
            self._note(sender, "a commitment that nobody asked for")
        elif not is_signed_by(commitment, attempt.statements.pipeline, sender, self.signer.verify):
            self._note(sender, "a commitment with another's signature")
        else:
            self._add(sender, attempt, attempt.statements, commitment)
        return True

    def own(self, commitment: RowsCommitment) -> None:
        """Of a stage here."""
        attempt = self.requests.attempt(commitment.request_id)
        if attempt is not None and attempt.statements is not None:
            self._add(self.router.node_id, attempt, attempt.statements, commitment)

    def accused(self, sender: NodeId, message: PipelineError) -> None:
        """A stage refuses rows of the one before it (see `Chain.receive`, which has seen the message)."""
        attempt = self.requests.attempt(message.request_id)
        if attempt is None or (statements := attempt.statements) is None:
            return
        stages = attempt.context.view.stages
        for stage in range(len(stages) - 1):
            pair = stages[stage], stages[stage + 1]
            is_theirs = pair[0].node_id == message.node_id and pair[1].node_id == sender
            if is_theirs and all(each.commits is True for each in pair) and stage not in statements.settled:
                statements.settled.add(stage)
                settle = partial(self._settle_refusal, statements, stage, message.position)
                self.tasks.spawn_if_running(settle)
                return

    def _add(
        self, sender: NodeId, attempt: Attempt, statements: Statements, commitment: RowsCommitment
    ) -> None:
        try:
            found = statements.ledger.add(commitment)
        except InvalidCommitment as error:
            self._note(sender, f"a commitment that cannot be: {error}")
            return
        statements.changed()
        for contradiction in found:
            if contradiction.stage not in statements.settled:
                statements.settled.add(contradiction.stage)
                self.tasks.spawn_if_running(partial(self._settle, attempt, statements, contradiction))

    async def _settle(self, attempt: Attempt, statements: Statements, found: Disagreement) -> None:
        sender, receiver = statements.node_id(found.stage), statements.node_id(found.stage + 1)
        here = self.router.node_id
        provoked_by(log, sender).warning(
            "request %s: %s and %s say different things of rows %d to %d between them",
            *(attempt.id, sender, receiver),
            *(found.position, found.position + found.n_rows),
        )
        is_proven = receiver == here or (sender != here and await self._is_proven(statements, found))
        if is_proven:
            self.verdict_recorder.wrong(sender, "it signed for other rows than it sent, or told")
            self._leave(attempt, frozenset({sender}))
        else:
            self.verdict_recorder.contradict(sender, receiver)
            self._leave(attempt, frozenset({sender, receiver} - {here}))

    def _leave(self, attempt: Attempt, doubted: frozenset[NodeId]) -> None:
        """The next pipeline does without these."""
        chain = attempt.chain
        if chain is not None and chain.state not in OVER:
            chain.blamed.doubted = doubted
            chain.fail(RemoteError("two stages contradict each other about rows"))

    async def _is_proven(self, statements: Statements, found: Disagreement) -> bool:
        """Whether the next stage has the signature of the one before it for what it says to have got."""
        piece = await self._ask(statements, found.stage, found.position, found.n_rows, digest_only=True)
        received = statements.ledger.said(found.stage + 1, "received", found.position, found.n_rows)
        return received is not None and self._has_signed(
            statements, piece, found.stage, found.position, received
        )

    def _has_signed(
        self, statements: Statements, piece: RowsPiece | None, stage: int, position: int, digest: bytes
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
        sender = statements.node_id(stage)
        return is_it and is_signed_by(shown, statements.pipeline, sender, self.signer.verify)

    async def _settle_refusal(self, statements: Statements, stage: int, position: int) -> None:
        sender, receiver = statements.node_id(stage), statements.node_id(stage + 1)
        if self.router.node_id in (sender, receiver):
            return  # What this node sent, and what came to it, it knows by itself.
        ledger = statements.ledger
        await statements.wait_for(lambda: ledger.stretch_with(stage, position) is not None)
        if (found := ledger.stretch_with(stage, position)) is None:
            self.verdict_recorder.no_evidence(sender)
            return
        start, stretch = found
        piece = await self._ask(statements, stage, start, stretch.n_rows, digest_only=False)
        if piece is not None and self._are_bad(statements, stage, start, stretch, piece):
            self.verdict_recorder.bad_rows(sender)
        else:
            self.verdict_recorder.contradict(sender, receiver)

    def _are_bad(
        self, statements: Statements, stage: int, start: int, stretch: SignedStretch, piece: RowsPiece
    ) -> bool:
        """Whether the rows that the next stage shows are what the one before it signed for, and no layer
        computes them."""
        shown = blake3(piece.rows).digest()
        if shown != stretch.digest and not self._has_signed(statements, piece, stage, start, shown):
            return False
        if len(piece.rows) != stretch.n_rows * statements.context.n_embd * _F32.itemsize:
            return True
        return not bool(np.isfinite(np.frombuffer(piece.rows, _F32)).all())

    async def _ask(
        self, statements: Statements, stage: int, position: int, n_rows: int, *, digest_only: bool
    ) -> RowsPiece | None:
        """The stage after `stage`, what came to it. None: it does not say."""
        context = statements.context
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
                    statements.node_id(stage + 1), encode_request(asked), timeout_s=ANSWER_TIMEOUT_S
                )
            piece = decode_response(body)
        except (trio.TooSlowError, SwarmLLMError, ProtocolError):
            return None
        return piece if isinstance(piece, RowsPiece) and piece.known else None

    def _note(self, sender: NodeId, detail: str) -> None:
        self.trust.note(sender, TrustEvent.BROKE_PROTOCOL, detail)
