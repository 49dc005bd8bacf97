"""What workers say unasked while a ring turns without the daemons: to whom it goes here.

Called between two turns of the event loop, so nothing here waits: it files, or puts into a session's queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.stage.links import NoStageLinks
from swarmllm.scheduling.observation import Observations
from swarmllm.workerpool.faults import worker_fault
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import AnyWorkerMessage, Arrived, Error, LinkLost, Relay, Turned
from swarmllm_proto.limits import SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkNotices:
    """`handle(sender, header, payload)`: as if it had come over the data plane; False: nobody wanted it. A
    worker names nodes by the ids that it was given."""

    links: NoStageLinks
    sessions: Sessions
    observations: Observations
    handle: Callable[[NodeId, bytes, memoryview], None]

    def __call__(self, model_id: ModelId, message: AnyWorkerMessage, payload: memoryview) -> None:
        if isinstance(message, Arrived):
            if (frame := _frame(payload)) is not None:
                self.handle(NodeId(message.sender), frame.header, frame.payload)
        elif isinstance(message, Relay):
            if (frame := _frame(payload)) is not None:
                self._relay(message, frame)
        elif isinstance(message, Turned):
            self._turned(message)
        elif isinstance(message, LinkLost):
            self.links.ended(model_id, NodeId(message.peer), message.direction, message.reason)
        elif isinstance(message, Error):
            session = self.sessions.by_request.get(message.request_id)
            if session is not None:
                session.report(worker_fault(message))

    def _relay(self, message: Relay, frame: Frame) -> None:
        session = self.sessions.by_request.get(message.request_id)
        if session is not None:
            # In turn with what the session itself tells: tokens must not overtake each other.
            session.relay(NodeId(message.receiver), frame.header, frame.payload)

    def _turned(self, message: Turned) -> None:
        self.links.n_jobs += message.n_jobs
        session = self.sessions.by_request.get(message.request_id)
        if session is None or message.stage > session.view.last:
            return
        session.turned(message.n_jobs, running=message.running)
        if not message.n_jobs:
            return
        self.observations.observe(
            session.context.model.model_id,
            "decode",
            message.compute_s / message.n_jobs,
            len(session.view.layers(message.stage)),
            1,
        )


def _frame(payload: memoryview) -> Frame | None:
    try:
        frames = FrameDecoder(SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX).feed(payload)
    except ProtocolError as error:
        log.warning("a worker handed over a broken frame: %s", error)
        return None
    return frames[0] if frames else None
