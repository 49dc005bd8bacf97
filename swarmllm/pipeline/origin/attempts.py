"""Drives the attempts at requests of this node: a pipeline is assigned, fed, watched and taken apart.

An attempt reports failing nodes to the next attempt, which avoids them, and to the whole swarm. It changes a
node's trust only at the end of a walk that had begun: a node that refuses an assignment because it is busy,
or has just unloaded its layers, has done nothing wrong.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TypeVar

import msgspec
import trio
from msgspec import UNSET

from swarmllm.errors import (
    ContextFull,
    DeadlineExceeded,
    NodeBusy,
    NodeRefused,
    NodeUnreachable,
    RemoteError,
    StageMoved,
    SwarmLLMError,
)
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.check.checker import Checker
from swarmllm.pipeline.origin.answered_prompts import AnsweredPrompts
from swarmllm.pipeline.origin.assignment import assign_fetches, assign_with_prefixes
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.generation import FetchedPrefix, TokenSource
from swarmllm.pipeline.origin.output import Blamed
from swarmllm.pipeline.origin.requests import Attempt, OriginRequest, OriginRequests
from swarmllm.pipeline.origin.single_stage import RemoteChain, open_local
from swarmllm.pipeline.prefix.fetching import PrefixFetcher
from swarmllm.pipeline.prefix.kept_prompts import KeptPrompt, KeptPrompts
from swarmllm.pipeline.prefix.names import PrefixNames, prefix_names
from swarmllm.pipeline.prefix.stage_holders import StageHolders
from swarmllm.pipeline.repair.probing import probe
from swarmllm.pipeline.repair.rebuild import assign_resuming
from swarmllm.pipeline.repair.retry_policy import PipelineSpeed
from swarmllm.pipeline.request import RequestContext, exact_chunk_tokens
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.newcomers import Newcomers
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.session import Session
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.tasks import PipelineTasks
from swarmllm.swarm.peers.trust import NodeTrust, TrustEvent
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.codec import encode_job, encode_request
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import (
    EARLY_PROMPT_TOKENS_MAX,
    CancelInference,
    KeptElsewhere,
    PipelineAck,
    PipelineAssignment,
    PipelineError,
    TellPrompt,
)
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0
TELL_TIMEOUT_S = 5.0
SEAT_TIMEOUT_S = 0.05
"""For a worker that computes and does not answer, a prompt is told later."""
AnyChain = TypeVar("AnyChain", bound=Chain)
OnReportedLoads = Callable[[Mapping[NodeId, int]], Awaitable[None]]
"""Is told how many other requests run on the nodes that have accepted, before anything is computed. What it
raises ends the attempt."""


class Attempts:
    def __init__(
        self,
        router: Router,
        registry: Registry,
        pool: Compute,
        requests: OriginRequests,
        sessions: Sessions,
        settings: PipelineSettings,
        counts: PipelineStatistics,
        trust: NodeTrust,
        suspects: Suspects,
        checker: Checker,
        tasks: PipelineTasks,
        prefixes: PrefixFetcher | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._stage_holders = StageHolders()
        self.kept_prompts = KeptPrompts()
        self._answered = AnsweredPrompts()
        self._requests = requests
        self._router = router
        self._registry = registry
        self._pool = pool
        self._sessions = sessions
        self._settings = settings
        self._counts = counts
        self._trust = trust
        self._suspects = suspects
        self._checker = checker
        self._tasks = tasks
        self._secret = secrets.token_bytes(32) if settings.shares_prefixes else None

    def begin(self, request: OriginRequest, assembly: Assembly) -> Attempt:
        """The request's current one from now on."""
        attempt = self._attempt(request, assembly, is_standby=False)
        request.goes_to(attempt)
        return attempt

    def stand_by(self, request: OriginRequest, assembly: Assembly) -> Attempt:
        """One beside the request's current one."""
        return self._attempt(request, assembly, is_standby=True)

    def _attempt(self, request: OriginRequest, assembly: Assembly, *, is_standby: bool) -> Attempt:
        """Stages that can sign for their rows are asked to."""
        assignment = request.assignment(assembly, self._router.node_id, is_standby=is_standby)
        return request.attempt(assembly, self._checker.commitments.asked(assignment))

    def open(
        self, attempt: Attempt, pace: PipelineSpeed, weigh: OnReportedLoads | None = None
    ) -> AbstractAsyncContextManager[TokenSource]:
        """Opens the attempt's pipeline. The node that makes it fail is added to `request.recovery.avoid`."""
        request, context = attempt.request, attempt.context
        if is_local(context) and request.pictures is None:
            brought: AbstractAsyncContextManager[FetchedPrefix | None] = nullcontext()
            if self._prefixes is not None:
                brought = self._prefixes.brought(request.entry, request.rows, is_exact=request.is_exact)
            return open_local(self._pool, context, request.rows, self.nickname(self._router.node_id), brought)
        may_send_tokens = not self._settings.local_embedding_privacy and request.pictures is None
        kind = RemoteChain if len(context.view.stages) == 1 and may_send_tokens else Chain
        return self.open_chain(attempt, kind, pace, weigh)

    @asynccontextmanager
    async def open_chain(
        self,
        attempt: Attempt,
        kind: type[AnyChain],
        pace: PipelineSpeed | None = None,
        weigh: OnReportedLoads | None = None,
    ) -> AsyncIterator[AnyChain]:
        """The same, where stages on other nodes take part in it."""
        request, context = attempt.request, attempt.context
        nicknames = {stage.node_id: self.nickname(stage.node_id) for stage in context.view.stages}
        chunk_tokens = self._settings.prefill_chunk_tokens
        if request.sampling.exact:
            chunk_tokens = exact_chunk_tokens(chunk_tokens)
        chain = kind(
            context,
            request.rows,
            chunk_tokens=chunk_tokens,
            silence_timeout_s=self._settings.silence_timeout_s,
            look_after_s=self._settings.ack_timeout_s / 2,
            stall_handler=self,
            nicknames=nicknames,
            prefix_names=self._prefix_names(attempt),
            pace=pace,
            checked_stage=self._drawn_stage(attempt, kind),
            pictures=request.pictures,
        )
        if attempt.assignment.resumes and (request.n_attempts > 2 or request.has_fetched):
            # What its stages took over may have come of several pipelines, and who sent what is not known.
            chain.checked_stage = None
        has_begun = False
        session = self._sessions.open(context, chain)
        self._requests.opened(attempt, chain)
        self._checker.commitments.opened(attempt, chain)
        try:
            start = await self._assign(attempt, chain, session, weigh)
            if chain.failure is not None:
                raise chain.failure
            start()
            has_begun = True
            yield chain
        except SwarmLLMError as error:
            chain.give_up()
            note_newcomers(chain, error, has_begun, self._suspects.newcomers, self._trust)
            if chain.blamed.culprit is not None and chain.blamed.culprit != self._router.node_id:
                request.recovery.avoid.add(chain.blamed.culprit)
                if chain.blamed.has_stalled or chain.blamed.has_lied:
                    self._suspects.doubt([chain.blamed.culprit], trio.current_time())
                if not isinstance(error, NodeBusy):
                    self._report_failure(context.request_id, chain.blamed.culprit, error)
            elif isinstance(error, RemoteError | DeadlineExceeded) and not isinstance(error, NodeBusy):
                here = {self._router.node_id}
                doubted = sorted(chain.blamed.doubted or chain.node_ids - here)
                request.recovery.doubted.update(doubted)
                self._suspects.doubt(doubted, trio.current_time())
            raise
        finally:
            self._requests.closed(attempt)
            note_trust_events(chain, self._trust, self._suspects)
            if chain.is_complete:
                self._checker.completed(chain)
            if chain.is_complete or isinstance(chain.failure, StageMoved):
                self._note_holders(attempt, chain)
            if chain.is_complete:
                self._answered.answered(request.entry.model_id, attempt.assignment.stages, request.tokens)
            session.stop()
            checked_stage = chain.checked_stage if chain.is_to_be_checked else None
            chain.close()
            # The session tidies up by itself; a client with an error to show need not wait for all of it.
            with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_TIMEOUT_S):
                await session.done.wait()
            if checked_stage is not None:
                self._check(attempt, chain, checked_stage)

    def _note_holders(self, attempt: Attempt, chain: Chain) -> None:
        """Of a chain whose stages keep their rows, under the names that they are told with its end."""
        if (names := chain.prefix_names) is None or self._prefixes is None:
            return
        now_s, request = trio.current_time(), attempt.request
        self._stage_holders.completed(names, chain.computed_tokens, chain.fetched, now_s)
        if request.pictures is None and not isinstance(chain, RemoteChain):
            self.kept_prompts.completed(KeptPrompt(request.entry, chain.tokens, names.stages, now_s))

    async def fetch_ahead(self, request: OriginRequest, assembly: Assembly) -> bool:
        """Has stages fetch KV of a prompt that no request needs now. Whether all have some of it then. Raises
        NodeBusy where a stage fetches for others at the moment."""
        attempt = self._attempt(request, assembly, is_standby=False)
        names, tokens = self._prefix_names(attempt), request.rows
        sources = () if names is None else self._sources_of(names, tokens)
        if names is None or not sources:
            return False
        try:
            n_blocks = await assign_fetches(
                self._router,
                attempt.assignment,
                attempt.context,
                names,
                tokens,
                timeout_s=self._settings.ack_timeout_s,
                fetches=self._sessions.fetches,
                sources=sources,
            )
        except NodeBusy:
            raise
        except SwarmLLMError as error:
            log.info("KV is not fetched ahead: %s", error.message)
            return False
        known, now_s = tokens[: n_blocks * BLOCK_TOKENS], trio.current_time()
        fetched = {source.stage for source in sources}
        self._stage_holders.completed(names, known, fetched, now_s)
        self.kept_prompts.completed(KeptPrompt(request.entry, known, names.stages, now_s))
        return n_blocks > 0

    def _drawn_stage(self, attempt: Attempt, kind: type[Chain]) -> int | None:
        """To be checked. Who checks computes from tokens, and a picture's rows are none."""
        if attempt.request.pictures is not None:
            return None
        return self._checker.draws(attempt.context, is_whole=kind is RemoteChain)

    def _prefix_names(self, attempt: Attempt) -> PrefixNames | None:
        """Nothing is named of exact requests, nor where what a stage takes over may have come of rows that
        were rounded at other places than this pipeline's."""
        request, assignment = attempt.request, attempt.assignment
        if request.sampling.exact or (assignment.resumes and attempt.was_rounded):
            return None
        marks = () if request.pictures is None else request.pictures.marks
        return prefix_names(self._secret, assignment, marks)

    def _sources(self, chain: Chain, new: Collection[int] | None = None) -> tuple[KeptElsewhere, ...]:
        """Where stages may fetch KV of the prompt's beginning. `new`: only they have to have it."""
        names = chain.prefix_names
        if names is None or self._prefixes is None or isinstance(chain, RemoteChain):
            return ()  # the node of a RemoteChain looks for KV itself
        stays = () if new is None else [i for i in range(len(names.stages)) if i not in new]
        return self._sources_of(names, chain.prompt, stays)

    def _sources_of(
        self, names: PrefixNames, tokens: Tensor, stays: Collection[int] = ()
    ) -> tuple[KeptElsewhere, ...]:
        may_give = (self._router.connected() | {self._router.node_id}).__contains__
        return self._stage_holders.sources(names, tokens, may_give, trio.current_time(), stays)

    def _note_fetched(
        self,
        request: OriginRequest,
        chain: Chain,
        acks: Mapping[NodeId, PipelineAck],
        sources: Collection[KeptElsewhere],
    ) -> None:
        """A stage that rests on fetched KV is not checked: if it is wrong, who is, the stage or the node that
        gave the KV? A stage that was never told where to fetch has not fetched, whatever it says."""
        names, view = chain.prefix_names, chain.context.view
        if names is None:
            return
        told = {source.stage for source in sources}
        here = self._sessions.fetches.fetched(chain.context, chain.prefixes_of(view.node_id), 1)
        said = {(node_id, stage) for node_id, ack in acks.items() for stage in ack.fetched or ()}
        said |= {(view.node_id, stage) for stage in here}
        chain.fetched = frozenset(
            stage
            for node_id, stage in said
            if stage < len(view.stages)
            and view.stages[stage].node_id == node_id
            and (stage in told or self._stage_holders.rests_on_peer(names, stage, chain.prompt))
        )
        request.has_fetched |= bool(chain.fetched)
        if chain.checked_stage in chain.fetched:
            chain.checked_stage = None

    def _check(self, attempt: Attempt, chain: Chain, stage: int) -> None:
        """Check the stage in a task of its own, and release the attempt's stages then."""

        async def collect() -> None:
            try:
                await self._checker.collect(attempt, chain, stage)
            finally:
                self.release(attempt)

        self._tasks.spawn_if_running(collect)

    async def _assign(
        self,
        attempt: Attempt,
        chain: Chain,
        session: Session,
        weigh: OnReportedLoads | None,
    ) -> Callable[[], None]:
        """Ask every stage to take part. Returns the function that starts the chain then."""
        assignment, context, timeout_s = attempt.assignment, attempt.context, self._settings.ack_timeout_s
        if assignment.resumes:
            new = _new_stages(attempt)
            sources = self._sources(chain, new)
            remainder, acks = await assign_resuming(
                self._sessions, assignment, context, chain, timeout_s=timeout_s, new=new, sources=sources
            )
            self._note_fetched(attempt.request, chain, acks, sources)
            if remainder.known:
                chain.checked_stage = None
            require_alike(attempt, acks, chain.blamed)
            require_picture_runs(context, acks, chain.blamed)
            self._tell_prompt(attempt, acks)
            return partial(chain.resume, session, *remainder)
        sources = self._sources(chain)
        n_known, acks = await assign_with_prefixes(
            self._pool,
            self._router,
            await self._with_prompt(attempt),
            context,
            chain,
            timeout_s=timeout_s,
            fetches=self._sessions.fetches,
            sources=sources,
        )
        self._note_fetched(attempt.request, chain, acks, sources)
        require_alike(attempt, acks, chain.blamed)
        require_picture_runs(context, acks, chain.blamed)
        if weigh is not None:
            n_running = {node_id: ack.n_running for node_id, ack in acks.items()}
            await weigh({node_id: n for node_id, n in n_running.items() if n is not UNSET})
        self._tell_prompt(attempt, acks)
        return partial(chain.start, session, n_known)

    async def _with_prompt(self, attempt: Attempt) -> PipelineAssignment:
        """With the prompt, where its last stage may know how that went on before. What it sends then comes to
        the first stage, which has to be this node's, and whose worker has to know of the request: another one
        may not have been asked yet."""
        request, assignment = attempt.request, attempt.assignment
        first, last = assignment.stages[0].node_id, assignment.stages[-1].node_id
        is_told = request.tells_prompt or last == self._router.node_id
        if not is_told or first != self._router.node_id or len(request.tokens) > EARLY_PROMPT_TOKENS_MAX:
            return assignment
        if not self._answered.has(request.entry.model_id, assignment.stages, request.tokens):
            return assignment
        tokens = request.prompt_for_guesses(assignment.stages)
        if not tokens or not await self._sessions.links.is_seated(assignment.request_id, 0, SEAT_TIMEOUT_S):
            return assignment
        if last == self._router.node_id:
            self._sessions.take_prompt(last, TellPrompt(request_id=assignment.request_id, tokens=tokens))
            return assignment
        return msgspec.structs.replace(assignment, prompt=tokens)

    def _tell_prompt(self, attempt: Attempt, acks: Mapping[NodeId, PipelineAck]) -> None:
        """To the last stage, if it guesses and may know the prompt. Nobody waits for it."""
        request, assignment = attempt.request, attempt.assignment
        last = assignment.stages[-1].node_id
        is_here = last == self._router.node_id
        if not is_here and (not request.tells_prompt or acks[last].guesses is not True):
            return
        if self._sessions.links.lacks_seat(assignment.request_id, 0):
            return  # The answer that the prompt had before would come by a link, to nobody.
        tokens = request.prompt_for_guesses(assignment.stages)
        if not tokens:
            return
        message = TellPrompt(request_id=assignment.request_id, tokens=tokens)
        if is_here:
            self._sessions.take_prompt(last, message)
        else:
            self._tasks.spawn_if_running(partial(self._ask_to_guess, last, encode_request(message)))

    async def _ask_to_guess(self, node_id: NodeId, body: bytes) -> None:
        try:
            await self._router.request(node_id, body, timeout_s=TELL_TIMEOUT_S)
        except SwarmLLMError as error:
            provoked_by(log, node_id).debug("%s guesses without the prompt: %s", node_id, error)

    def release(self, attempt: Attempt) -> None:
        """Tell the attempt's stages that nobody will go on with what they hold of it."""
        here = self._router.node_id
        header, payload = encode_job(CancelInference(request_id=attempt.id))
        for node_id in attempt.assembly.node_ids & {here, *self._router.reachable()}:
            if node_id == here:
                self._sessions.cancel(here, attempt.id)
            else:
                self._tasks.spawn_if_running(partial(self._tell, node_id, header, payload))

    # What chains ask (`StallHandler`).

    def repeats(self, chain: Chain, position: int) -> None:
        self._counts.repeats += 1
        self._checker.commitments.repeated(chain, position)

    async def investigate(self, chain: Chain) -> None:
        """It has been silent, or is too slow: who is at work, and is that worth waiting for?"""
        context, timeout_s = chain.context, self._settings.ack_timeout_s / 2
        session = self._sessions.running(context.request_id)
        n_due = chain.n_due
        found = await probe(
            self._router,
            context.request_id,
            context.view.stages,
            n_due,
            UNSET if session is None else session.rows()[1],
            session is not None and session.is_busy(),
            timeout_s,
        )
        if chain.n_due != n_due:
            return  # Something has come meanwhile.
        if found.error is not None and chain.silent_s >= timeout_s:
            if found.waits_for and found.culprit is not None:
                chain.blamed.stalled(found.culprit)
            elif found.culprit is not None:
                chain.blame(found.culprit)
            chain.blamed.doubted = found.waits_for
            chain.fail(found.error)
        elif chain.pace is not None:
            suspected = found.waits_for or chain.node_ids - {self._router.node_id}
            waited_s = chain.pace.waited_s(
                chain.account.n_decoded, chain.decode_s, chain.silent_s, chain.has_begun
            )
            is_worth = await chain.pace.is_worth_changing(waited_s, suspected)
            if is_worth and chain.n_due == n_due:
                chain.blamed.doubted = suspected
                chain.fail(DeadlineExceeded("the pipeline is far slower than planned"))

    def doubt(self, node_ids: Iterable[NodeId]) -> None:
        """The next routes do without these where they can."""
        self._suspects.doubt(sorted(node_ids), trio.current_time())

    def _report_failure(self, request_id: str, culprit: NodeId, error: SwarmLLMError) -> None:
        message = PipelineError(
            request_id=request_id, node_id=culprit, kind=error.code, message="a pipeline broke there"
        )
        header, payload = encode_job(message)
        for node_id in self._router.connected() - {culprit}:
            self._tasks.spawn_if_running(partial(self._tell, node_id, header, payload))

    async def _tell(self, node_id: NodeId, header: bytes, payload: bytes | memoryview) -> None:
        with trio.move_on_after(TELL_TIMEOUT_S):
            try:
                await self._router.send(node_id, header, payload)
            except SwarmLLMError as error:
                log.debug("%s not told of a failure: %s", node_id, error)

    def nickname(self, node_id: NodeId) -> str:
        record = self._registry.node(node_id)
        return record.nickname if record is not None else ""


def _new_stages(attempt: Attempt) -> tuple[int, ...]:
    """Those that none of the pipelines had which the attempt resumes."""
    resumed = {
        (stage.node_id, stage.start, stage.end)
        for each in attempt.request.attempts
        if each is not attempt
        for stage in each.assignment.stages
    }
    return tuple(
        index
        for index, stage in enumerate(attempt.assignment.stages)
        if (stage.node_id, stage.start, stage.end) not in resumed
    )


def is_local(context: RequestContext) -> bool:
    return len(context.view.stages) == 1 and context.view.is_here(0)


def note_newcomers(
    chain: Chain, error: SwarmLLMError, has_begun: bool, newcomers: Newcomers, trust: NodeTrust
) -> None:
    """Count a failure against the newcomers that may have caused it. A refusal does not count, nor does a
    node that was not there to accept: both cost a request little, and the node may be honest."""
    if isinstance(error, NodeBusy | NodeRefused | ContextFull) or not isinstance(
        error, RemoteError | DeadlineExceeded
    ):
        return
    if isinstance(error, NodeUnreachable) and not has_begun:
        return
    here, culprit = chain.context.view.node_id, chain.blamed.culprit
    blamed = {culprit} if culprit is not None else {*(chain.blamed.doubted or chain.node_ids)}
    newcomers.failed(blamed - {here}, trust.score, trio.current_time())


def note_trust_events(chain: Chain, trust: NodeTrust, suspects: Suspects) -> None:
    """After a chain's end: what its nodes have earned or lost by it."""
    here = chain.context.view.node_id
    failure = chain.failure
    if failure is None:
        if chain.is_complete:
            suspects.newcomers.served(chain.node_ids - {here}, trust.score)
            for node_id in chain.node_ids - {here}:
                trust.note(node_id, TrustEvent.SERVED)
                suspects.served(node_id)
    elif chain.blamed.culprit not in (None, here) and not isinstance(failure, NodeBusy | ContextFull):
        event = TrustEvent.LOST if isinstance(failure, NodeUnreachable) else TrustEvent.FAILED
        event = TrustEvent.STALLED if chain.blamed.has_stalled else event
        event = TrustEvent.BROKE_PROTOCOL if chain.blamed.has_lied else event
        trust.note(chain.blamed.culprit, event, type(failure).__name__)


def require_picture_runs(context: RequestContext, acks: Mapping[NodeId, PipelineAck], blamed: Blamed) -> None:
    """That nodes have understood where rows of pictures stand: a node of before ignores it, and would compute
    something else. Raises NodeRefused."""
    for node_id, ack in acks.items():
        if context.picture_runs and ack.picture_runs is not True:
            blamed.blame(node_id)
            raise NodeRefused(f"node {node_id} does not know how rows of this model's pictures stand")


def require_alike(attempt: Attempt, acks: Mapping[NodeId, PipelineAck], blamed: Blamed) -> None:
    """That nodes have the kernels which the route of an exact request was chosen for: one may have loaded the
    model with other settings since it announced them. Raises NodeRefused."""
    kernel_group = attempt.assembly.kernel_group
    if kernel_group is None or not kernel_group.kernel_class:
        return
    for node_id, ack in acks.items():
        if ack.kernel_class != kernel_group.kernel_class:
            blamed.blame(node_id)
            raise NodeRefused(f"the kernels of node {node_id} are not {kernel_group} any more")
