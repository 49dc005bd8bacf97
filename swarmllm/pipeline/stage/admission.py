"""Admits requests of other nodes to stages here, and routes their messages.

An assignment opens a session, a session is all that jobs can reach, and everything else is ignored and
counted: a message for a request this node knows nothing of is no fault (the request may just have ended),
and answering it would give a stranger something to play with.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import trio
from msgspec import UNSET

from swarmllm.errors import NodeBusy, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.layers import LayerRange, covers
from swarmllm.models.manifest import Manifest
from swarmllm.pipeline.prefix.names import ANSWER_TIMEOUT_S, give_names
from swarmllm.pipeline.prefix.stage_fetching import FetchesForStages, FetchesNothing
from swarmllm.pipeline.request import OriginSide, RequestContext, request_context
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.capacity import (
    FIRST_JOB_S,
    NEWCOMERS,
    HeldCapacity,
    OriginShares,
    StageAdmission,
    StagePlace,
    held_here,
)
from swarmllm.pipeline.stage.cell_shares import HeldCells, ask_for_cells
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.ended_requests import EndedRequests
from swarmllm.pipeline.stage.lifecycle import SessionState
from swarmllm.pipeline.stage.row_committer import MakesRowCommitters, NoRowCommitters
from swarmllm.pipeline.stage.served import Served, ServedBook
from swarmllm.pipeline.stage.session import NO_ROWS, Session
from swarmllm.scheduling.route import usable
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.peers.trust import EARNED_MIN, NeutralTrust, NodeTrust
from swarmllm.swarm.router import Router
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import KeptRows
from swarmllm_proto.swarm import (
    PipelineAck,
    PipelineAssignment,
    StageBlocks,
    StageRows,
    StageState,
    TellPrompt,
)
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

REACH_S = 2.0
"""For an assignment's next nodes, before it is acknowledged: the origin waits for that."""


class AssignmentRefused(Exception):
    """This node takes no part in the request. `unreachable`: the next node, where this node does not reach
    it."""

    busy = False

    def __init__(self, reason: str, *, unreachable: NodeId | None = None) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


class StageBusy(AssignmentRefused):
    """This node would take part once another request has ended."""

    busy = True


class TakesPrompts(Protocol):
    def tell_prompt(self, context: RequestContext, prompt: Tensor) -> None:
        """The worker of the last stage, which is here, guesses from the prompt (i32) from now on."""
        ...

    async def is_seated(self, request_id: str, stage: int, timeout_s: float) -> bool:
        """Whether the worker here has a seat for the stage; False also where that is not known in time."""
        ...

    def lacks_seat(self, request_id: str, stage: int) -> bool:
        """Whether the worker here has refused it."""
        ...


class HoldsCapacity(Protocol):
    def held(self) -> Iterable[HeldCapacity]:
        """By the requests of this node's own users."""
        ...


@dataclass(slots=True)
class Sessions:
    """Every request in which this node takes part, its own included."""

    compute: Compute
    router: Router
    catalogue: Catalogue
    settings: PipelineSettings
    start_soon: Callable[[Session], None]
    """Also has the workers' links take part in its request."""
    links: TakesPrompts
    own: HoldsCapacity
    trust: NodeTrust = field(default_factory=NeutralTrust)
    budget: ByteBudget = field(default_factory=ByteBudget)
    row_committers: MakesRowCommitters = field(default_factory=NoRowCommitters)
    fetches: FetchesForStages = field(default_factory=FetchesNothing)
    ended: EndedRequests = field(default_factory=EndedRequests)
    by_request: dict[str, Session] = field(default_factory=dict)
    """Those that run, and those that are held because their pipeline broke and another one may go on. The
    latter stand in the order in which they came to be held."""
    _shares: dict[str | None, OriginShares] = field(default_factory=dict)
    """By model; None: of all together."""
    _served: ServedBook = field(default_factory=ServedBook)
    _is_fetching_ahead: bool = False

    def running(self, request_id: str) -> Session | None:
        session = self.by_request.get(request_id)
        return None if session is None or session.state is SessionState.HELD else session

    def all_running(self) -> list[Session]:
        return [each for each in self.by_request.values() if each.state is not SessionState.HELD]

    def held(self) -> list[Session]:
        """The one that is held longest first."""
        return [each for each in self.by_request.values() if each.state is SessionState.HELD]

    async def acknowledge(self, sender: NodeId, assignment: PipelineAssignment) -> PipelineAck:
        try:
            if assignment.only_fetches is True:
                return await self._fetch(sender, assignment)
            context = await self._accept(sender, assignment)
        except AssignmentRefused as refusal:
            return PipelineAck(
                request_id=assignment.request_id,
                accepted=False,
                reason=str(refusal)[:200],
                busy=refusal.busy,
                unreachable=refusal.unreachable or UNSET,
            )
        if assignment.prompt is not UNSET:
            self.take_prompt(sender, TellPrompt(request_id=assignment.request_id, tokens=assignment.prompt))
        await self._reach_neighbours(context)
        kept = await self.take_over(context, assignment.resumes)
        await self.fetches.bring(context, assignment.prefixes, assignment.kept_elsewhere or ())
        n_blocks = await give_names(self.compute, context, assignment.prefixes)
        if self.running(assignment.request_id) is None:
            await self._forget(context)
        return PipelineAck(
            request_id=assignment.request_id,
            accepted=True,
            n_prefix_blocks=n_blocks,
            kept=kept,
            guesses=self._guesses(context) or UNSET,
            kernel_class=self.compute.kernel_class(context.model.model_id)
            if context.sampling.exact
            else UNSET,
            picture_runs=bool(context.picture_runs) or UNSET,
            fetched=self.fetches.fetched(context, assignment.prefixes, n_blocks) or UNSET,
        )

    async def _fetch(self, sender: NodeId, assignment: PipelineAssignment) -> PipelineAck:
        """KV for requests to come, for one origin at a time; no place is taken. Raises AssignmentRefused."""
        context = await self._checked(sender, assignment)
        if self._is_fetching_ahead:
            raise StageBusy("KV is being fetched ahead already")
        self._is_fetching_ahead = True
        try:
            kept = assignment.kept_elsewhere or ()
            await self.fetches.bring(context, assignment.prefixes, kept, is_awaited=False)
            n_blocks = await self.fetches.n_blocks_here(context, assignment.prefixes)
        except SwarmLLMError as error:
            raise AssignmentRefused(error.message) from None
        finally:
            self._is_fetching_ahead = False
        return PipelineAck(request_id=assignment.request_id, accepted=True, n_prefix_blocks=n_blocks)

    def _guesses(self, context: RequestContext) -> bool:
        """Whether this node guesses the request's tokens."""
        view, sampling = context.view, context.sampling
        is_last_of_several = len(view.stages) > 1 and view.is_here(view.last)
        may_guess = context.wants == "tokens" and not sampling.exact
        return self.settings.guesses and is_last_of_several and may_guess

    def take_prompt(self, sender: NodeId, message: TellPrompt) -> PipelineAck:
        """The prompt of a request whose last stage is here, to guess from; at most once is enough."""
        session = self.running(message.request_id)
        reason = "no such request"
        if session is not None and session.view.origin == sender:
            reason = self._refuse_prompt(session.context, prompt := np.frombuffer(message.tokens, "<i4"))
            if not reason:
                self.links.tell_prompt(session.context, prompt)
        return PipelineAck(request_id=message.request_id, accepted=not reason, reason=reason)

    def _refuse_prompt(self, context: RequestContext, prompt: Tensor) -> str:
        """Why it is not taken; "": it is."""
        if not self._guesses(context):
            return "nothing guesses here"
        if len(prompt) != context.n_prompt_tokens:
            return f"{len(prompt)} tokens of a prompt of {context.n_prompt_tokens}"
        if not 0 <= prompt.min() <= prompt.max() < context.n_vocab:
            return f"token ids lie in [0, {context.n_vocab})"
        return ""

    async def take_over(self, context: RequestContext, resumes: Sequence[str]) -> tuple[StageRows, ...]:
        """Give a request what is left here of those that it resumes: of the first of which there is anything.
        Never raises for a worker that cannot: that is nothing."""
        mine = [stage for stage in range(len(context.view.stages)) if context.view.is_here(stage)]
        known = [self.by_request.get(each) for each in resumes]
        kept: tuple[KeptRows, ...] = ()
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                for broken in known:
                    if broken is None or broken.view.origin != context.view.origin:
                        continue
                    kept = await self._take_over(context, broken, mine)
                    if any(rows.n_rows for rows in kept):
                        break
        except (SwarmLLMError, trio.TooSlowError) as error:
            provoked_by(log, context.view.origin).info(
                "request %s finds nothing of an earlier one: %s", context.request_id, error
            )
            return ()
        return tuple(
            StageRows(stage, rows.n_rows, rows.n_journal) for stage, rows in zip(mine, kept, strict=False)
        )

    async def _take_over(
        self, context: RequestContext, broken: Session, mine: Sequence[int]
    ) -> tuple[KeptRows, ...]:
        if broken.state is not SessionState.HELD:
            broken.stop(hold=True)
            await broken.done.wait()
        kept = await self.compute.resume(
            context.model,
            request_id=context.request_id,
            resumes=broken.context.request_id,
            n_rows=context.n_given_tokens - 1,
            ranges=[context.view.layers(stage) for stage in mine],
        )
        broken.taken_over()
        return kept

    async def _forget(self, context: RequestContext) -> None:
        """It ended while it was given rows: what frees them may have been too early."""
        try:
            await self.compute.cancel(context.model.model_id, context.request_id)
        except SwarmLLMError as error:
            provoked_by(log, context.view.origin).info(
                "rows of request %s not freed: %s", context.request_id, error
            )

    def open(self, context: RequestContext, origin_side: OriginSide | None = None) -> Session:
        session = Session(
            context,
            self.compute,
            self.router,
            silence_timeout_s=self.settings.silence_timeout_s,
            origin_side=origin_side,
            hold_s=self.settings.failover_timeout_s,
            owner=self,
            trust=self.trust,
            budget=self.budget,
            row_committer=self.row_committers.of(context, self.ended),
        )
        self.start_soon(session)
        self.by_request[context.request_id] = session
        return session

    def cancel(
        self,
        sender: NodeId,
        request_id: str,
        prefixes: tuple[StageBlocks, ...] = (),
        n_rows: int = 0,
        *,
        hold: bool = False,
    ) -> bool:
        session = self.by_request.get(request_id)
        if session is not None:
            if session.view.origin != sender:
                return False
            # An origin that releases what is held has named it before.
            session.prefixes = prefixes or session.prefixes
            session.n_rows = n_rows or session.n_rows
            if hold:
                session.stop(hold=True)
            else:
                session.release()
            return True
        self.ended.cancel(sender, request_id)
        return True

    def lost(self, node_id: NodeId) -> None:
        """A node is gone."""
        for session in list(self.by_request.values()):
            session.lost(node_id)

    def state(self, sender: NodeId, request_id: str) -> StageState:
        """What its origin may know of a request."""
        session = self.running(request_id)
        known = session is not None and session.view.origin == sender
        busy = known and session is not None and session.is_busy()
        rows = session.rows() if known and session is not None else NO_ROWS
        return StageState(request_id=request_id, known=known, busy=busy, n_received=rows[0], n_sent=rows[1])

    def session_for(self, sender: NodeId, request_id: str) -> Session | None:
        """Of a request of this origin that runs or is held here."""
        session = self.by_request.get(request_id)
        return session if session is not None and session.view.origin == sender else None

    def n_for_others(self) -> int:
        return sum(map(self._is_of_others, self.all_running()))

    def uses(self, model_id: ModelId | None = None, layers: LayerRange | None = None) -> bool:
        """Whether a request that may go on over another pipeline runs over these layers (None: any) here, or
        is held for it."""
        return any(
            session.view.is_here(stage) and (layers is None or session.view.layers(stage).overlaps(layers))
            for session in self.by_request.values()
            if session.view.last > 0 and model_id in (None, session.context.model.model_id)
            for stage in range(session.view.last + 1)
        )

    async def next_end(self, origin: NodeId, model_id: ModelId) -> bool:
        """See `prefix.serving.EndsRequests`."""
        running = [
            session
            for session in self.all_running()
            if session.view.origin == origin and session.context.model.model_id == model_id
        ]
        if not running:
            return False
        async with trio.open_nursery() as nursery:

            async def wait(session: Session) -> None:
                await session.done.wait()
                nursery.cancel_scope.cancel()

            for session in running:
                nursery.start_soon(wait, session)
        return True

    def held_for_others(self) -> list[HeldCapacity]:
        """Without those that would give their place up."""
        latest_s = trio.current_time() - FIRST_JOB_S
        for_others = (
            session.context
            for session in self.all_running()
            if self._is_of_others(session) and (session.has_begun or session.assigned_s > latest_s)
        )
        return [*filter(None, map(held_here, for_others))]

    def served(self) -> tuple[Served, ...]:
        """What was computed for other nodes in the last minutes."""
        return self._served.view(
            Counter(
                (session.context.model.model_id, session.view.origin)
                for session in self.all_running()
                if self._is_of_others(session)
            ),
            trio.current_time(),
        )

    def served_tokens(self) -> Mapping[ModelId, int]:
        """By model, for all other nodes together, since the start."""
        return self._served.totals

    def used_by_others_s(self, model_id: ModelId) -> float:
        """When other nodes' requests used the model here last: infinity while one does, or may go on over
        another pipeline; minus infinity where none has."""
        if any(self._is_of_others(session, model_id) for session in self.by_request.values()):
            return math.inf
        return self._served.latest_s(model_id)

    def _is_of_others(self, session: Session, model_id: ModelId | None = None) -> bool:
        is_of_model = model_id in (None, session.context.model.model_id)
        return is_of_model and session.view.origin != self.router.node_id

    async def _checked(self, sender: NodeId, assignment: PipelineAssignment) -> RequestContext:
        """Whatever else runs here, this node could take part. Raises AssignmentRefused."""
        if assignment.origin != sender or sender == self.router.node_id:
            raise AssignmentRefused("the origin of a request must assign it itself")
        try:
            entry = await trio.to_thread.run_sync(self.catalogue.get, assignment.model_id)
        except SwarmLLMError:
            raise AssignmentRefused("this node does not have the model") from None
        # From here on without a pause: what is checked still holds when the session is opened.
        if assignment.request_id in self.by_request:
            raise AssignmentRefused("the request id is in use")
        if self.ended.is_cancelled(sender, assignment.request_id):
            raise AssignmentRefused("the request has been cancelled")
        if assignment.stages[-1].end != entry.manifest.n_layers:
            raise AssignmentRefused(f"the stages do not cover the model's {entry.manifest.n_layers} layers")
        owner = assignment.origin if self._has_earned(assignment.origin) else NEWCOMERS
        context = replace(request_context(assignment, entry, self.router.node_id), owner=owner)
        self._check_layers(context, entry.manifest)
        self._check_neighbours(context)
        self._check_prompt(context)
        self._check_scored(context)
        return context

    async def _accept(self, sender: NodeId, assignment: PipelineAssignment) -> RequestContext:
        """Opens a session. Raises AssignmentRefused."""
        context = await self._checked(sender, assignment)
        settings, origin, model_id = self.settings, assignment.origin, assignment.model_id
        if not self._make_cells(context):
            raise StageBusy("others need the cells for their prompts")
        if not self._make_room(origin, None, settings.max_stage_requests):
            raise StageBusy(f"this node takes part in {settings.max_stage_requests} requests already")
        if not self._make_room(origin, model_id, settings.max_requests_per_model):
            raise StageBusy(f"the model has {settings.max_requests_per_model} requests here already")
        self.open(context)
        view = context.view
        mine = [view.layers(stage) for stage in range(len(view.stages)) if view.is_here(stage)]
        self._served.began(model_id, origin, mine, trio.current_time())
        for layers in mine:
            self.compute.cut(model_id, layers)  # while the first rows are on their way
        return context

    def _make_room(self, origin: NodeId, model_id: ModelId | None, capacity: int) -> bool:
        """For one more request, of any model or of this one."""
        shares = self._shares.setdefault(model_id, OriginShares(capacity))
        places = [
            self._place(session) for session in self.all_running() if self._is_of_others(session, model_id)
        ]
        admission = shares.ask(origin, places, trio.current_time(), self._has_earned)
        return self._settled(admission)

    def _make_cells(self, context: RequestContext) -> bool:
        """For the prompt of one more request."""
        model_id = context.model.model_id
        taken = [
            HeldCells(self._place(session), session.context.n_given_tokens)
            for session in self.all_running()
            if self._is_of_others(session, model_id)
        ]
        own = sum(each.n_prompt_tokens for each in self.own.held() if each.model_id == model_id)
        n_ctx = self.compute.context_sizes().get(model_id, self.settings.n_ctx)
        admission = ask_for_cells(
            context.view.origin,
            context.n_given_tokens,
            taken,
            own,
            n_ctx,
            trio.current_time(),
            self._has_earned,
        )
        return self._settled(admission)

    def _has_earned(self, node_id: NodeId) -> bool:
        return self.trust.score(node_id) >= EARNED_MIN

    @staticmethod
    def _place(session: Session) -> StagePlace:
        return StagePlace(
            session.context.request_id, session.view.origin, session.assigned_s, session.has_begun
        )

    def _settled(self, admission: StageAdmission) -> bool:
        """After the request has gone that has to."""
        if admission.instead_of is not None:
            session = self.by_request[admission.instead_of]
            why = "it has had its turn" if session.has_begun else "no job has come"
            log.info(
                "request %s of %s gives its place up: %s", admission.instead_of, session.view.origin, why
            )
            session.report(NodeBusy(f"others need the place, and {why}"))
            self.close(session)
        return admission.is_granted

    def _check_prompt(self, context: RequestContext) -> None:
        """What cannot fit would make this node look full to everybody."""
        n_ctx = self.compute.context_sizes().get(context.model.model_id, self.settings.n_ctx)
        if context.n_given_tokens >= n_ctx:
            raise AssignmentRefused(
                f"the prompt has {context.n_given_tokens} tokens; there is room for {n_ctx} here"
            )

    def _check_scored(self, context: RequestContext) -> None:
        scored = context.scored
        if scored and (context.wants != "normed" or len(scored) != context.n_prompt_tokens):
            raise AssignmentRefused(f"{len(scored)} scored tokens for a prompt of {context.n_prompt_tokens}")
        if scored and max(scored) >= context.n_vocab:
            raise AssignmentRefused(f"scored token ids lie in [0, {context.n_vocab})")

    def _check_layers(self, context: RequestContext, manifest: Manifest) -> None:
        view = context.view
        mine = [index for index in range(len(view.stages)) if view.is_here(index)]
        if not mine:
            raise AssignmentRefused("no stage is assigned to this node")
        loaded = self.compute.loaded(context.model.model_id)
        for index in mine:
            layers = view.layers(index)
            if not covers(loaded, layers):
                raise AssignmentRefused(f"layers {layers} are not loaded here")
            if not usable([layers], manifest.n_layers, manifest.cut_alignment):
                raise AssignmentRefused(f"layers {layers} do not respect the cuts of the model")

    async def _reach_neighbours(self, context: RequestContext) -> None:
        """So that the first rows find a connection. Where there comes none in time, sending them tells."""

        async def reach(node_id: NodeId) -> None:
            try:
                await self.router.reach(node_id, timeout_s=REACH_S)
            except SwarmLLMError as error:
                provoked_by(log, context.view.origin).info(
                    "request %s: no connection to the next node: %s", context.request_id, error
                )

        async with trio.open_nursery() as nursery:
            for node_id in _next_nodes(context) - self.router.connected():
                nursery.start_soon(reach, node_id)

    def _check_neighbours(self, context: RequestContext) -> None:
        unreachable = _next_nodes(context) - self.router.reachable()
        if unreachable:
            node_id = min(unreachable)
            raise AssignmentRefused(f"this node does not reach {node_id}", unreachable=node_id)

    # Of the sessions.

    def computed(self, session: Session, n_tokens: int) -> None:
        if self._is_of_others(session):
            model_id, now_s = session.context.model.model_id, trio.current_time()
            self._served.computed(model_id, session.view.origin, n_tokens, now_s)

    def hold(self, session: Session) -> None:
        self.close(session)
        if session.context.request_id in self.by_request:
            session.release()  # Its place was free for a moment, and another session has its id by now.
            return
        self.by_request[session.context.request_id] = session
        held = self.held()
        if len(held) > self.settings.max_stage_requests:
            # No more than could run: origins may break as many requests as they like.
            held[0].release()

    def close(self, session: Session) -> None:
        if self.by_request.get(session.context.request_id) is session:
            del self.by_request[session.context.request_id]


def _next_nodes(context: RequestContext) -> frozenset[NodeId]:
    """Other nodes to which rows or tokens go from here."""
    view = context.view
    following = (
        view.stages[(index + 1) % len(view.stages)].node_id
        for index in range(len(view.stages))
        if view.is_here(index)
    )
    return frozenset(following) - {view.node_id}
