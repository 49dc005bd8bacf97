"""Direct links between the workers of neighbouring stages, for decode (see docs/job-processor.md).

A node keeps one sending link per (model, next node) and opens it when a request first needs it; the node
before opens the one that this node receives on. Requests share links, and each brings a *seat* for every
stage it has here: who may send its jobs, and to whom they go on. Nothing waits for any of this. A request
whose link is not there yet, cannot be had (no data port is reachable), or breaks goes by way of the daemons.

`LinkNotices` takes the notices of workers that pass jobs to each other without the daemons. The event loop
calls it, so it never waits: it records the notice, or puts it into a session's queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import trio
from blake3 import blake3

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.scheduling.speeds import Observations
from swarmllm.supervision import spawn
from swarmllm.swarm.router import LinkEnd, LinkMaker
from swarmllm.workerpool.calls import worker_fault
from swarmllm.workerpool.ring import RingCalls
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.identifiers import ModelId, NodeId, is_model_id
from swarmllm_proto.ipc import AnyWorkerMessage, Arrived, Error, LinkLost, Relay, Turned
from swarmllm_proto.limits import SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX
from swarmllm_proto.swarm import Stage
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""Before a link that could not be opened is tried again."""
WITHOUT_SEAT_MAX: Final = 1024


@dataclass(slots=True)
class _Sending:
    """This node's end of the link to the next node."""

    pid: int | None = None
    """Of the worker that has it; another process has none."""
    is_opening: bool = False
    retry_at_s: float = 0.0


class NoStageLinks:
    """Used where every job goes by way of the daemons."""

    n_jobs = 0

    def join(self, context: RequestContext) -> None:
        pass

    def tell_prompt(self, context: RequestContext, prompt: Tensor) -> None:
        pass

    async def is_seated(self, request_id: str, stage: int, timeout_s: float) -> bool:
        return False

    def lacks_seat(self, request_id: str, stage: int) -> bool:
        return False

    def lost(self, node_id: NodeId) -> None:
        pass

    def ended(
        self, model_id: ModelId, node_id: NodeId, direction: Literal["sending", "receiving"], reason: str
    ) -> None:
        pass

    async def run(self) -> None:
        pass


class StageLinks(NoStageLinks):
    def __init__(self, node_id: NodeId, maker: LinkMaker, workers: RingCalls) -> None:
        self._node_id = node_id
        self._maker = maker
        self._workers = workers
        self._nursery: trio.Nursery | None = None
        self._sending: dict[tuple[str, NodeId], _Sending] = {}
        """By model and next node."""
        self._receiving: set[tuple[str, NodeId]] = set()
        """(model, node before), as far as known."""
        self._seats_due: dict[tuple[str, int], trio.Event] = {}
        """Of seats that are being taken: request and stage."""
        self._without_seat: deque[tuple[str, int]] = deque(maxlen=WITHOUT_SEAT_MAX)
        """Those that the worker refused last."""
        self.n_jobs = 0
        """That came by links and were run here."""

    def __repr__(self) -> str:
        return f"<StageLinks sending={len(self._sending)} receiving={len(self._receiving)}>"

    async def run(self) -> None:
        """Until cancelled; before that nothing is opened or taken."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._maker.serve_links(self._take)
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        if self._nursery is not None:
            spawn(self._nursery, "link", work, *arguments)

    def join(self, context: RequestContext) -> None:
        """This node takes part in a request."""
        view = context.view
        if context.wants != "tokens":
            return  # Nothing is decoded.
        for stage in range(len(view.stages)):
            after = view.stages[(stage + 1) % len(view.stages)].node_id
            before = view.stages[stage - 1].node_id
            if view.is_here(stage) and {before, after} != {self._node_id} and self._nursery is not None:
                due = self._seats_due[context.request_id, stage] = trio.Event()
                self._spawn(self._take_seat, context, stage, before, after, due)

    def tell_prompt(self, context: RequestContext, prompt: Tensor) -> None:
        """The worker of the last stage, which is here, guesses from the prompt (i32) from now on."""
        self._spawn(self._tell_prompt, context, prompt)

    async def is_seated(self, request_id: str, stage: int, timeout_s: float) -> bool:
        """Whether this node's worker has a seat for a stage of a request that was joined. False also where
        that is not known in time: jobs that come by a link before it would come to nobody."""
        key = request_id, stage
        if (due := self._seats_due.get(key)) is not None:
            with trio.move_on_after(timeout_s):
                await due.wait()
        return self._nursery is not None and key not in self._seats_due and not self.lacks_seat(*key)

    def lacks_seat(self, request_id: str, stage: int) -> bool:
        """The worker has refused it."""
        return (request_id, stage) in self._without_seat

    async def _tell_prompt(self, context: RequestContext, prompt: Tensor) -> None:
        request_id, stage = context.request_id, context.view.last
        if (due := self._seats_due.get((request_id, stage))) is not None:
            await due.wait()
        try:
            await self._workers.take_prompt(
                context.model.model_id,
                request_id=request_id,
                stage=stage,
                prompt=prompt,
                begins=not context.generated,
            )
        except SwarmLLMError as error:
            provoked_by(log, context.view.origin).info(
                "request %s guesses without its prompt: %s", request_id, error.message
            )

    def lost(self, node_id: NodeId) -> None:
        """A node is gone: what its workers still send is not to be listened to."""
        known = {key for key in (*self._sending, *self._receiving) if key[1] == node_id}
        for key in known:
            self._sending.pop(key, None)
            self._receiving.discard(key)
            self._spawn(self._close, *key)

    def ended(
        self, model_id: ModelId, node_id: NodeId, direction: Literal["sending", "receiving"], reason: str
    ) -> None:
        """A worker's link has ended."""
        provoked_by(log, node_id).info(
            "the %s link with %s for %s has ended: %s", direction, node_id, model_id, reason
        )
        if direction == "sending":
            self._sending.pop((model_id, node_id), None)
        else:
            self._receiving.discard((model_id, node_id))

    async def _take_seat(
        self, context: RequestContext, stage: int, before: NodeId, after: NodeId, due: trio.Event
    ) -> None:
        """`due`: is set when the worker has answered."""
        view, model_id = context.view, context.model.model_id
        layers = view.layers(stage)
        try:
            await self._workers.take_seat(
                model_id,
                request_id=context.request_id,
                stage=stage,
                start=layers.start,
                end=layers.end,
                before=before,
                after=after,
                origin=view.origin,
                n_prompt_tokens=context.n_prompt_tokens,
                sampling=context.sampling if stage == view.last else None,
                row_format="f32" if stage == view.last else context.row_format(stage + 1),
                exact_rows=context.exact_rows,
                picture_runs=context.picture_runs,
                owner=context.owner,
                ring=ring_name(view.stages),
            )
        except SwarmLLMError as error:
            provoked_by(log, context.view.origin).info(
                "request %s goes without a seat: %s", context.request_id, error.message
            )
            self._without_seat.append((context.request_id, stage))
            return
        finally:
            due.set()
            if self._seats_due.get((context.request_id, stage)) is due:
                del self._seats_due[context.request_id, stage]
        if after != self._node_id:
            await self._ensure(model_id, after)

    async def _ensure(self, model_id: ModelId, node_id: NodeId) -> None:
        link = self._sending.setdefault((model_id, node_id), _Sending())
        is_up = link.pid is not None and link.pid == self._workers.pid(model_id)
        if is_up or link.is_opening or trio.current_time() < link.retry_at_s:
            return
        link.is_opening = True
        link.retry_at_s = trio.current_time() + RETRY_S
        try:
            end = await self._maker.open_link(node_id, model_id)
            try:
                link.pid = await self._workers.take_link(
                    model_id, node_id, "sending", end.connection.fileno(), end.key, end.nonce
                )
            finally:
                end.close()
        except SwarmLLMError as error:
            provoked_by(log, node_id).info("no link to %s for %s: %s", node_id, model_id, error.message)
        finally:
            link.is_opening = False

    async def _take(self, sender: NodeId, purpose: str, end: LinkEnd) -> bool:
        """`purpose`: the model's id."""
        if not is_model_id(purpose):
            provoked_by(log, sender).info("the link from %s is not taken: it names no model", sender)
            return False
        model_id = purpose
        try:
            pid = await self._workers.take_link(
                model_id, sender, "receiving", end.connection.fileno(), end.key, end.nonce
            )
        except SwarmLLMError as error:
            provoked_by(log, sender).info("the link from %s is not taken: %s", sender, error.message)
            return False
        if pid is not None:
            self._receiving.add((model_id, sender))
        return pid is not None

    async def _close(self, model_id: ModelId, node_id: NodeId) -> None:
        try:
            await self._workers.close_links(model_id, node_id)
        except SwarmLLMError as error:
            provoked_by(log, node_id).info("the links with %s are not closed: %s", node_id, error.message)


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
            self._note_jobs(message)
        elif isinstance(message, LinkLost):
            self.links.ended(model_id, NodeId(message.peer), message.direction, message.reason)
        elif isinstance(message, Error):
            session = self.sessions.running(message.request_id)
            if session is not None:
                session.report(worker_fault(message))

    def _relay(self, message: Relay, frame: Frame) -> None:
        session = self.sessions.running(message.request_id)
        if session is not None:
            # In turn with what the session itself tells: tokens must not overtake each other.
            session.relay(NodeId(message.receiver), frame.header, frame.payload)

    def _note_jobs(self, message: Turned) -> None:
        self.links.n_jobs += message.n_jobs
        session = self.sessions.running(message.request_id)
        if session is None or message.stage > session.view.last:
            return
        n_alone = max(0, message.n_jobs - (message.n_windows or 0))
        n_rows = n_alone + (message.n_window_rows or 0)
        n_sure = max(0, message.n_jobs - (message.n_numbered or 0))
        session.ran_by_link(message.stage, message.n_jobs, n_rows, n_sure=n_sure, running=message.running)
        if not n_alone:
            return
        self.observations.observe(
            session.context.model.model_id,
            "decode",
            message.compute_s / n_alone,
            len(session.view.layers(message.stage)),
            1,
        )


def ring_name(stages: Sequence[Stage]) -> str:
    """The same for the same layers on the same nodes, in the same order."""
    text = " ".join(f"{stage.node_id}:{stage.start}:{stage.end}" for stage in stages)
    return blake3(text.encode()).hexdigest(16)


def _frame(payload: memoryview) -> Frame | None:
    try:
        frames = FrameDecoder(SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX).feed(payload)
    except ProtocolError as error:
        log.warning("a worker handed over a broken frame: %s", error)
        return None
    return frames[0] if frames else None
