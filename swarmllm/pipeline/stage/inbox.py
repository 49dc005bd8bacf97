"""Reads what other nodes send, and gives each job message to the request that it belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from swarmllm.errors import InvalidRequest
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.check.commitments import Commitments
from swarmllm.pipeline.check.recompute import Replies
from swarmllm.pipeline.origin.requests import OriginRequests
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.stage.failure_reports import BAD_ROWS
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.swarm.peers.trust import NodeTrust, TrustEvent
from swarmllm_proto.codec import decode_job, decode_request
from swarmllm_proto.errors import DamagedJob, ProtocolError
from swarmllm_proto.file_digests import AnyRequest
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import (
    CancelInference,
    LayerForward,
    PipelineError,
    RemoteGenerateRequest,
    ReplayRows,
    RowsCommitment,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inbox:
    """Counts the messages that it drops."""

    sessions: Sessions
    requests: OriginRequests
    """Of this node's clients."""
    suspects: Suspects
    counts: PipelineStatistics
    trust: NodeTrust
    commitments: Commitments
    """Of stages, for requests of this node's clients."""
    replies: Replies = field(default_factory=Replies)
    """To checks."""
    cancel_picture: Callable[[NodeId, str], bool] = lambda sender, request_id: False
    """False: the request is about no picture."""

    def read_request(self, sender: NodeId, body: bytes) -> AnyRequest:
        """Raises InvalidRequest."""
        try:
            return decode_request(body)
        except ProtocolError as error:
            self.counts.messages_bad += 1
            self.trust.note(sender, TrustEvent.BROKE_PROTOCOL, str(error))
            raise InvalidRequest(f"the request cannot be read: {error}") from None

    def take(self, sender: NodeId, header: bytes, payload: memoryview) -> None:
        """Never waits for work."""
        try:
            message = decode_job(header, payload)
        except DamagedJob as damaged:
            session = self.sessions.running(damaged.request_id)
            self.counts.messages_bad += 1
            self.trust.note(sender, TrustEvent.DAMAGED)
            if session is None or not session.arrived_damaged(sender, damaged.position):
                self.counts.messages_ignored += 1
            return
        except ProtocolError as error:
            self.counts.messages_bad += 1
            self.trust.note(sender, TrustEvent.BROKE_PROTOCOL, str(error))
            provoked_by(log, sender).warning("message from %s refused: %s", sender, error)
            return
        if isinstance(message, LayerForward):
            session = self.sessions.running(message.request_id)
            accepted = session is not None and session.arrive(sender, message, payload)
            accepted = accepted or self.replies.take(sender, message, payload)
        elif isinstance(message, RemoteGenerateRequest):
            session = self.sessions.running(message.request_id)
            accepted = session is not None and session.arrive_prompt(sender, message, payload)
        elif isinstance(message, ReplayRows):
            session = self.sessions.running(message.request_id)
            accepted = session is not None and session.arrive_replay(sender, message)
        elif isinstance(message, RowsCommitment):
            accepted = self._take_commitment(sender, message)
        elif isinstance(message, CancelInference):
            accepted = self.cancel_picture(sender, message.request_id) or self.sessions.cancel(
                sender, message.request_id, message.prefixes, message.n_rows or 0, hold=message.hold
            )
        else:
            chain, own = self.requests.chain(message.request_id), self.sessions.router.node_id
            accepted = chain is not None
            if chain is not None and not chain.may_say(sender, message):
                self.counts.messages_bad += 1
                self.trust.note(
                    sender, TrustEvent.BROKE_PROTOCOL, "a token of a request that it has no token of"
                )
            elif chain is not None:
                chain.receive(sender, message, payload)
                if isinstance(message, PipelineError) and message.kind == BAD_ROWS:
                    self.commitments.accused(sender, message)
            elif isinstance(message, PipelineError) and message.node_id not in (own, sender):
                # (Who speaks of itself reports, too late, to the origin of a pipeline that has broken.)
                self.suspects.accuse(sender, message.node_id, trio.current_time())
                accepted = True
            else:
                accepted = self.replies.take(sender, message, payload)
        if not accepted:
            self.counts.messages_ignored += 1

    def _take_commitment(self, sender: NodeId, message: RowsCommitment) -> bool:
        session = self.sessions.by_request.get(message.request_id)
        is_taken = session.row_committer.hears(sender, message) if session is not None else None
        if is_taken is False:
            self.trust.note(
                sender, TrustEvent.BROKE_PROTOCOL, "it signed for rows that it does not send here"
            )
        return self.commitments.take(sender, message) or is_taken is not None
