"""One request on one node: a bounded queue of jobs, one task that walks them in order, and the cleanup at the
end.

Each request has its own task, so requests do not wait for each other. The queue is as long as the origin's
window; a sender that overruns it ends the request, because waiting would hold up its other requests.
A job for which the byte budget has no room ends it too: the node is busy, nobody is to blame, and the origin
tries others.

A session ends when the origin cancels (also after the last token: it alone knows when the client has
everything), when its origin or a neighbour is lost, when nothing arrives for too long, or when a walk
fails; the origin is then told, the slot in the worker is freed, and later messages with its id are ignored.
Where it was another node's fault the slot is held for a while instead, because another pipeline may go on
with what is in it.

A request is in one state of the table in `lifecycle`; every event passes the table before it has an effect.
An impossible event is a defect of this program: it is logged, and ends this request alone.
"""

from __future__ import annotations

import logging
from functools import partial

import trio
from msgspec import UNSET, UnsetType

from swarmllm.errors import (
    DeadlineExceeded,
    NodeBusy,
    NodeUnreachable,
    RemoteError,
    SwarmLLMError,
    WorkerError,
)
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.job import Job
from swarmllm.pipeline.prefix.names import last_names
from swarmllm.pipeline.repair.probing import MOVED_BYTES
from swarmllm.pipeline.request import OriginSide, RequestContext
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.failure_reports import BAD_ROWS, UNUSABLE_ROWS, damage_report, report_of
from swarmllm.pipeline.stage.job_runner import FAULTS_OF_ROWS, JobRunner, is_unchecked
from swarmllm.pipeline.stage.lifecycle import (
    AT_WORK,
    LIFECYCLE,
    OVER,
    SessionEvent,
    SessionOwner,
    SessionState,
)
from swarmllm.pipeline.stage.row_committer import NoRowCommitter
from swarmllm.pipeline.stage.session_queue import (
    GivenPrompt,
    Item,
    NotFinite,
    PutResult,
    ReceivedRows,
    RelayedJob,
    Report,
    SessionQueue,
    read_job,
    read_prompt,
)
from swarmllm.state_table import UnknownTransition
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.peers.trust import NeutralTrust, NodeTrust, TrustEvent
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import encode_job
from swarmllm_proto.errors import BadTensor, ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import (
    LayerForward,
    RemoteGenerateRequest,
    ReplayRows,
    StageBlocks,
)

log = logging.getLogger(__name__)

CLEANUP_TIMEOUT_S = 5.0
"""How long a request that is over may take to free its slot and tell the other stages."""
LINK_REPORT_S = 5.0
"""Jobs that came by links so long ago count as work under way."""
NO_ROWS = UNSET, UNSET


class Session:
    """Everything that this node keeps of one request."""

    def __init__(
        self,
        context: RequestContext,
        compute: Compute,
        router: Router,
        *,
        silence_timeout_s: float,
        origin_side: OriginSide | None = None,
        hold_s: float = 0.0,
        owner: SessionOwner[Session] | None = None,
        trust: NodeTrust | None = None,
        budget: ByteBudget | None = None,
        row_committer: NoRowCommitter | None = None,
    ) -> None:
        """`hold_s`: how long the slot of a broken request is kept for another pipeline."""
        self.context = context
        self.view = context.view
        self._log = provoked_by(log, self.view.origin)
        self._state = LIFECYCLE.first
        self.done = trio.Event()
        """Its work is over, and what it has here is freed or held."""
        self.n_jobs = 0
        self.row_committer = row_committer or NoRowCommitter()
        self._compute = compute
        self._router = router
        self._runner = JobRunner(context, compute, router, origin_side, self.row_committer)
        self._origin_side = origin_side
        self.prefixes: tuple[StageBlocks, ...] = ()
        """What the origin called the rows in the end; without it they are kept as they were first named."""
        self.n_rows = 0
        """That the request has in the end, once its origin has said so."""
        self._hold_s = hold_s
        self._left_hold = trio.Event()
        self._owner = owner
        self._trust = trust or NeutralTrust()
        self._scope = trio.CancelScope()
        self._received = ReceivedRows(len(self.view.stages))
        self._refused: tuple[SwarmLLMError, NodeId | None] | None = None
        """Why an item was not queued, and whose fault that is, where it is anybody's."""
        self._link_heard_s = float("-inf")
        """When jobs last came by links."""
        self._at_work_on: Item | None = None
        self._n_bytes: int | None = None
        """Received from the request's nodes, when somebody last asked."""
        # The origin of a request waits in its client's task (see chain); its session only works on demand.
        self._silence_timeout_s = float("inf") if origin_side is not None else silence_timeout_s
        self._queue = SessionQueue(len(self.view.stages), budget)
        self.assigned_s = trio.current_time()

    def __repr__(self) -> str:
        return f"<Session {self.context.request_id} {self._state.name} jobs={self.n_jobs}>"

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def has_begun(self) -> bool:
        """Something of it has come, by way of the daemons or by a link."""
        return self._state is not SessionState.ASSIGNED

    def is_busy(self) -> bool:
        """Whether anything of this request happens here: work, or part of a large job that comes in. The
        first call has no earlier count of bytes to compare with, and returns True."""
        n_bytes = sum(
            peer.bytes_received for peer in self._router.peers() if peer.node_id in self.view.node_ids
        )
        before, self._n_bytes = self._n_bytes, n_bytes
        is_moving = before is None or n_bytes - before > MOVED_BYTES
        has_reported = trio.current_time() - self._link_heard_s < LINK_REPORT_S
        by_link = has_reported or self._state is SessionState.BY_LINK
        is_walking = isinstance(self._at_work_on, Job | GivenPrompt | ReplayRows)
        return is_walking or is_moving or by_link or not self._queue.is_empty

    def rows(self) -> tuple[int | UnsetType, int | UnsetType]:
        """The positions below which rows have come to the stage here, and have left it; UNSET where they come
        by links, or several stages are here."""
        n_stages = sum(self.view.is_here(stage) for stage in range(self.view.last + 1))
        if self._link_heard_s > float("-inf") or n_stages > 1:
            return NO_ROWS
        return self._received.n_rows, self._runner.n_sent

    @property
    def _may_hold(self) -> bool:
        return self._hold_s > 0 and self.context.wants == "tokens" and self.view.last > 0

    def offer(self, job: Job) -> None:
        """A job of this node's own: the origin's side feeds the prompt, or repeats a token."""
        if self._put(job) and job.token is not None:
            self._received.repeated()

    def stop(self, *, hold: bool = False) -> None:
        """End the request on this node; `done` is set when everything is freed, or with `hold` when another
        request may have what is left. The origin's side knows by itself whether one may."""
        hold = hold or (self._origin_side is not None and self._origin_side.may_be_resumed)
        if self._try_pass(SessionEvent.HOLD if hold and self._may_hold else SessionEvent.END):
            self._scope.cancel()

    def release(self) -> None:
        """End it, and nobody will go on with what it has here."""
        if self._try_pass(SessionEvent.RELEASE):
            self._scope.cancel()

    def taken_over(self) -> None:
        """What was held is another request's by now."""
        self._try_pass(SessionEvent.TAKEN)

    def ask_replay(self, message: ReplayRows) -> None:
        """Of the origin's side: have rows sent once more."""
        node_id = self.view.stages[message.stage].node_id
        if node_id == self.view.node_id:
            self._put(message)
        else:
            self.relay(node_id, *encode_job(message))

    def arrive_replay(self, sender: NodeId, message: ReplayRows) -> bool:
        """The origin wants rows to be sent once more. False: the sender has no business with it."""
        if (
            sender != self.view.origin
            or message.until > self.view.last
            or not self.view.is_here(message.stage)
        ):
            return False
        self._put(message, sender)
        return True

    def arrive(self, sender: NodeId, message: LayerForward, payload: memoryview) -> bool:
        """A job from another node. False: the sender had no business sending it, and it is ignored."""
        stage = message.stage
        if stage > self.view.last or not self.view.is_here(stage) or sender not in self.view.senders(message):
            return False
        if not self._takes_in():
            return True
        # Chunks only: what comes by links is not counted here, and tokens come one at a time.
        is_chunk = message.step == "layer" and message.position < self.context.n_given_tokens
        if is_chunk and self._received.is_behind_damage(stage, message.position):
            return True
        try:
            job = read_job(self.context, sender, message, payload, trio.current_time())
        except BadTensor as error:
            event = TrustEvent.BAD_NUMBERS if isinstance(error, NotFinite) else TrustEvent.BROKE_PROTOCOL
            self._trust.note(sender, event, str(error))
            first = self.row_committer.refused(message.stage, message.position, error)
            self._refuse_rows(sender, BAD_ROWS, str(error), first)
            return True
        self._received.add(stage, message.position, message.n_tokens)
        # What came packed takes more memory than it took on the way.
        n_bytes = len(payload) if job.tensor is None else max(len(payload), job.tensor.nbytes)
        self._enqueue(job, sender, n_bytes)
        return True

    def arrive_prompt(self, sender: NodeId, message: RemoteGenerateRequest, payload: memoryview) -> bool:
        """The only stage is here, and is to generate by itself. False: the sender has no business with it."""
        if sender != self.view.origin or self.view.last > 0 or self.context.wants != "tokens":
            return False
        if not self._takes_in():
            return True
        try:
            self._enqueue(GivenPrompt(read_prompt(self.context, message, payload)), sender, len(payload))
        except BadTensor as error:
            self._trust.note(sender, TrustEvent.BROKE_PROTOCOL, str(error))
            self.report(WorkerError(f"prompt refused: {error}", kind="bad_tensor"))
        return True

    def arrived_damaged(self, sender: NodeId, position: int) -> bool:
        """A job whose digest was wrong: ask the origin to repeat it, and let pass what was sent behind it."""
        if sender not in self.view.node_ids:
            return False
        if not self._takes_in() or not self._received.damaged(position):
            return True
        damage = damage_report(self.context.request_id, self.view.node_id, position)
        self._enqueue(Report(damage, ends=False), sender)
        return True

    def _takes_in(self) -> bool:
        """Something came from another node. False: it comes too late, and has no effect."""
        return self._try_pass(SessionEvent.JOB) and self._state in AT_WORK

    def ran_by_link(
        self, stage: int, n_jobs: int, n_rows: int, *, n_sure: int | None = None, running: bool
    ) -> None:
        """The worker reports jobs that came and left by links, and their rows. `running`: another is there.
        `n_sure`: jobs of which at least one row was no guess; None: all."""
        if self._try_pass(SessionEvent.LINK_RUNS if running else SessionEvent.LINK_RESTS):
            self.n_jobs += n_jobs
            self._computed(stage, n_rows)
            self.row_committer.ran_by_link(stage, n_jobs if n_sure is None else n_sure)
            self._link_heard_s = trio.current_time()

    def relay(self, receiver: NodeId, header: bytes, payload: bytes | memoryview) -> bool:
        """Sends a job message of this node's worker. False: the session does not send this message."""
        if receiver not in self.view.node_ids:
            return False
        if self._try_pass(SessionEvent.JOB) and not self._sends_now(receiver, header, payload):
            self._enqueue(RelayedJob(receiver, header, payload))
        return True

    def _sends_now(self, receiver: NodeId, header: bytes, payload: bytes | memoryview) -> bool:
        """Where nothing of this request is still to be sent before it: a token costs no turn of the task."""
        is_first = self._queue.is_empty and self._at_work_on is None and self._state in AT_WORK
        return is_first and self._router.send_now(receiver, header, payload)

    def lost(self, node_id: NodeId) -> None:
        """A node is gone. The origin's own session leaves the matter to its client's side (see chain)."""
        if node_id == self.view.origin:
            self.release()
        elif node_id in self.view.node_ids and self._origin_side is None:
            self.report(NodeUnreachable(f"node {node_id} disconnected"))

    def _refuse_rows(self, sender: NodeId, kind: str, text: str, position: int = 0) -> None:
        """Report rows that cannot be used, and who sent them. `position`: of the first bad row."""
        if self._origin_side is None:
            reported = report_of(self.context.request_id, sender, kind, f"job refused: {text}", position)
            self._put(Report(reported, ends=True), event=SessionEvent.FAILURE)
            return
        if kind == BAD_ROWS:
            self._origin_side.blame(sender)
        self.report(RemoteError(f"node {sender} sent a job that is refused: {text}"))

    def report(self, error: SwarmLLMError) -> None:
        """The request cannot go on here: tell the origin, then end."""
        if self._origin_side is not None:
            self._origin_side.fail(error)
            self.stop()
            return
        message = report_of(self.context.request_id, self.view.node_id, error.code, error.message)
        self._put(Report(message, ends=True), event=self._failure(error))

    def _failure(self, error: SwarmLLMError) -> SessionEvent:
        """The origin's side decides by itself whether another pipeline may go on (see stop)."""
        is_elsewhere = isinstance(error, NodeUnreachable) and self._origin_side is None
        return SessionEvent.NODE_LOST if is_elsewhere and self._may_hold else SessionEvent.FAILURE

    async def run(self) -> None:
        """Raises nothing but cancellation, and UnknownTransition for a defect."""
        try:
            await self._work_and_clean_up()
            if self._state is SessionState.HELD:
                with trio.move_on_after(self._hold_s):
                    await self._left_hold.wait()
                if self._state is SessionState.HELD:
                    self._pass(SessionEvent.EXPIRED)
        finally:
            if self._state is SessionState.HELD:
                self._pass(SessionEvent.SHUT_DOWN)
        if self._state is SessionState.FREEING_HELD:
            await self._runner.free_slot(self.prefixes)
            self._pass(SessionEvent.FREED)

    async def _work_and_clean_up(self) -> None:
        try:
            with self._scope:
                await self._work()
        finally:
            self._queue.close()
            with trio.CancelScope(shield=True):
                if self._refused is not None:
                    await self._tell_failure(*self._refused)
                self._pass(SessionEvent.CLEAN_UP)
                with trio.move_on_after(CLEANUP_TIMEOUT_S):
                    try:
                        await self._clean_up()
                    except Exception:
                        self._log.exception("request %s could not be cleaned up", self.context.request_id)
            self._pass(SessionEvent.CLEANED if self.view.runs_layers else SessionEvent.NOTHING_KEPT)
            if self.view.runs_layers and self._origin_side is None:
                reported = (self.context.request_id, self.view.origin, self.n_jobs)
                self._log.info("request %s of %s ended here after %d jobs", *reported)

    def _pass(self, event: SessionEvent) -> None:
        """Pass an event through the table. Raises UnknownTransition, before any effect, where it cannot
        happen."""
        before, after = self._state, LIFECYCLE.after(self._state, event)
        if after is before:
            return
        self._state = after
        if before is SessionState.HELD:
            self._left_hold.set()
        if after is SessionState.HELD:
            self.done.set()
            if self._owner is not None:
                self._owner.hold(self)
        elif after in OVER and before not in OVER:
            if self._owner is not None:
                self._owner.close(self)
            self.done.set()

    def _try_pass(self, event: SessionEvent) -> bool:
        """`_pass` for callers that are not this session's task. False: the event cannot happen, and the
        request is ended."""
        try:
            self._pass(event)
        except UnknownTransition:
            if not self._scope.cancel_called:
                self._log.exception("request %s is ended", self.context.request_id)
            self._scope.cancel()
            return False
        return True

    def has_failed(self, error: Exception) -> None:
        """`run` raised what it should not have."""
        if self._origin_side is not None:
            self._origin_side.fail(SwarmLLMError(f"internal error ({type(error).__name__})"))
        self._pass(SessionEvent.DEFECT)

    async def _work(self) -> None:
        while True:
            try:
                with trio.fail_after(self._silence_timeout_s):
                    item = await self._queue.get()
                self._at_work_on = item
                await self._handle(item)
                self._at_work_on = None
                if isinstance(item, Report) and item.ends:
                    return
            except trio.TooSlowError:
                if trio.current_time() - self._link_heard_s < self._silence_timeout_s:
                    continue
                late = DeadlineExceeded(f"nothing arrived for {self._silence_timeout_s:g} s")
                self._pass(SessionEvent.FAILURE)
                await self._tell_failure(late)
                return
            except SwarmLLMError as error:
                if isinstance(item, Job) and item.sender and getattr(error, "kind", "") in FAULTS_OF_ROWS:
                    self._refuse_rows(item.sender, UNUSABLE_ROWS, error.message)
                    continue
                self._pass(self._failure(error))
                await self._tell_failure(error)
                return
            except ProtocolError as error:
                self._pass(SessionEvent.FAILURE)
                await self._tell_failure(WorkerError(f"cannot be sent on: {error}", kind="bad_message"))
                return
            except Exception as error:
                # A defect of ours costs this request, not the daemon; what it says may quote anything, so
                # only its type travels.
                self._log.exception("request %s failed", self.context.request_id)
                self._pass(SessionEvent.FAILURE)
                await self._tell_failure(SwarmLLMError(f"internal error ({type(error).__name__})"))
                return

    def _count_token(self) -> None:
        self.n_jobs += 1
        self._computed(0, 1)

    def _computed(self, stage: int, n_tokens: int) -> None:
        if self._owner is not None and n_tokens and self.view.first_here == stage:
            self._owner.computed(self, n_tokens)

    async def _handle(self, item: Item) -> None:
        if isinstance(item, Job):
            self.n_jobs += 1
            stage, n_tokens = item.stage, item.n_tokens * (item.position >= self.context.n_given_tokens)
            await self._runner.run(item)
            self._computed(stage, n_tokens)
        elif isinstance(item, GivenPrompt):
            await self._runner.generate(item.tokens, self._count_token)
        elif isinstance(item, ReplayRows):
            await self._runner.replay(item)
        elif isinstance(item, RelayedJob):
            await self._runner.relay(item.receiver, item.header, item.payload)
        else:
            await self._runner.tell_origin(item.error)

    async def _tell_failure(self, error: SwarmLLMError, sender: NodeId | None = None) -> None:
        """`sender`: because of what came from there."""
        self._log.info("request %s failed here: %s", self.context.request_id, error)
        if self._origin_side is not None:
            self._origin_side.fail(error)
            return
        if is_unchecked(error):
            self._trust.note(self.view.origin, TrustEvent.BAD_REQUEST, error.message)
        message = report_of(self.context.request_id, self.view.node_id, error.code, error.message)
        if sender not in (None, self.view.node_id):
            message = report_of(self.context.request_id, sender, UNUSABLE_ROWS, error.message)
        with trio.move_on_after(CLEANUP_TIMEOUT_S):
            try:
                await self._runner.tell_origin(message)
            except SwarmLLMError as error:
                self._log.info("request %s: its origin is not told: %s", self.context.request_id, error)

    async def _clean_up(self) -> None:
        hold = self._state is not SessionState.FREEING
        async with trio.open_nursery() as nursery:
            if self._origin_side is not None:
                self.prefixes = last_names(self._origin_side, self.view.node_id)
                self.n_rows = self._origin_side.n_rows
                # A node that lost this one ends the request on its own.
                for node_id in {stage.node_id for stage in self.view.stages} & self._router.connected():
                    nursery.start_soon(partial(self._runner.cancel_at, node_id, hold=hold))
            if self.view.runs_layers:
                await self.row_committer.finish(self.n_rows)
                if hold:
                    nursery.start_soon(self._runner.hold_slot, self._hold_s, self.prefixes)
                else:
                    nursery.start_soon(self._runner.free_slot, self.prefixes)

    def _put(
        self,
        item: Item,
        sender: NodeId | None = None,
        n_bytes: int = 0,
        event: SessionEvent = SessionEvent.JOB,
    ) -> bool:
        """`sender`: another node, where it is from one. False: the event cannot happen."""
        may_happen = self._try_pass(event)
        if may_happen:
            self._enqueue(item, sender, n_bytes)
        return may_happen

    def _enqueue(self, item: Item, sender: NodeId | None = None, n_bytes: int = 0) -> None:
        """For an event that has passed the table."""
        put = self._queue.put(item, is_foreign=bool(sender), sender=sender, n_bytes=n_bytes)
        if put is PutResult.QUEUED:
            return
        if put is PutResult.OVERRUN:
            overrun = RemoteError("more jobs at once than the window allows")
            self._refused = overrun, sender or self.view.node_id
        else:
            self._refused = NodeBusy(f"there is no room for a job of {n_bytes} bytes now"), None
        self._try_pass(SessionEvent.FAILURE)
        self._scope.cancel()
