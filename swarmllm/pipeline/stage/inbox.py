"""Job messages that come from other nodes, over the data plane or by a link: to whom each goes here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import trio

from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.swarm.peers.trust import Deed, Note
from swarmllm_proto.codec import decode_job
from swarmllm_proto.errors import DamagedJob, ProtocolError
from swarmllm_proto.swarm import (
    CancelInference,
    LayerForward,
    PipelineError,
    RemoteGenerateRequest,
    ReplayRows,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inbox:
    """Counts what it throws away."""

    sessions: Sessions
    chains: Mapping[str, Chain]
    """This node's own requests."""
    suspects: Suspects
    counts: PipelineStatistics
    note: Note

    def take(self, sender: str, header: bytes, payload: memoryview) -> None:
        """Never waits for work."""
        try:
            message = decode_job(header, payload)
        except DamagedJob as damaged:
            session = self.sessions.by_request.get(damaged.request_id)
            self.counts.messages_bad += 1
            self.note(sender, Deed.DAMAGED)
            if session is None or not session.arrived_damaged(sender, damaged.position):
                self.counts.messages_ignored += 1
            return
        except ProtocolError as error:
            self.counts.messages_bad += 1
            self.note(sender, Deed.BROKE_PROTOCOL, str(error))
            log.warning("message from %s refused: %s", sender, error)
            return
        if isinstance(message, LayerForward):
            session = self.sessions.by_request.get(message.request_id)
            accepted = session is not None and session.arrive(sender, message, payload)
        elif isinstance(message, RemoteGenerateRequest):
            session = self.sessions.by_request.get(message.request_id)
            accepted = session is not None and session.arrive_prompt(sender, message, payload)
        elif isinstance(message, ReplayRows):
            session = self.sessions.by_request.get(message.request_id)
            accepted = session is not None and session.arrive_replay(sender, message)
        elif isinstance(message, CancelInference):
            accepted = self.sessions.cancel(sender, message.request_id, message.prefixes, hold=message.hold)
        else:
            chain, own = self.chains.get(message.request_id), self.sessions.router.node_id
            accepted = chain is not None
            if chain is not None:
                chain.receive(sender, message, payload)
            elif isinstance(message, PipelineError) and message.node_id not in (own, sender):
                # (Who speaks of itself reports, too late, to the origin of a pipeline that has broken.)
                self.suspects.accuse(sender, message.node_id, trio.current_time())
                accepted = True
        if not accepted:
            self.counts.messages_ignored += 1
