"""All requests of one node: the ones its own clients started, and the stages it runs for others.

`generate` opens at the first token, not before: until then a failure is still a plain refusal with a
status, and one more attempt may be made with the nodes that are alive now, without any client having seen a
character. From then on a stream outlives its pipeline (see `repair.failover`). An attempt that failed is
cleaned up before the next one starts, under another request id, so that nothing late can be mistaken.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.checker import Checker
from swarmllm.pipeline.check.commitments import Commitments
from swarmllm.pipeline.check.verdict_recorder import VerdictRecorder
from swarmllm.pipeline.origin.attempts import Attempts
from swarmllm.pipeline.origin.detokenizer import Detokenizer, TokenBytes
from swarmllm.pipeline.origin.generation import Generation, Prompt
from swarmllm.pipeline.origin.opener import PipelineOpener
from swarmllm.pipeline.origin.prompt_rows import PromptRows, Rows, ScoredPrompt
from swarmllm.pipeline.origin.prompts import Prompts
from swarmllm.pipeline.origin.requests import OriginRequest, OriginRequests, fit
from swarmllm.pipeline.own_models import OwnModels
from swarmllm.pipeline.prefix.cached_rows import CachedRows
from swarmllm.pipeline.prefix.fetching import PrefixFetcher
from swarmllm.pipeline.prefix.serving import PrefixServing, PrefixStore
from swarmllm.pipeline.prefix.stage_fetching import StageFetcher
from swarmllm.pipeline.prefix.transfer import PrefixTransfer
from swarmllm.pipeline.repair.failover import Failover
from swarmllm.pipeline.repair.hedge import HedgeBudget
from swarmllm.pipeline.repair.moves import Moves
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm.pipeline.repair.standbys import Standbys
from swarmllm.pipeline.request import new_request_id
from swarmllm.pipeline.request_handler import RequestHandler, ServesDigests, ServesPieces
from swarmllm.pipeline.route.cuts_ahead import CutsAhead
from swarmllm.pipeline.route.local_load import LocalLoad
from swarmllm.pipeline.route.measuring import ObservedCompute
from swarmllm.pipeline.route.request_routes import CountsCachedRows, NothingCached, RequestRoutes
from swarmllm.pipeline.route.route_planner import RoutePlanner
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.stage.capacity import Room
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.inbox import Inbox
from swarmllm.pipeline.stage.links import LinkNotices, NoStageLinks, StageLinks
from swarmllm.pipeline.stage.row_committer import MakesRowCommitters, NoRowCommitters, RowCommitters
from swarmllm.pipeline.stage.served import Served
from swarmllm.pipeline.stage.session import Session
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.tasks import PipelineTasks
from swarmllm.pipeline.vision.checking import PictureChecker
from swarmllm.pipeline.vision.encoders import Encoders
from swarmllm.pipeline.vision.serving import PictureServing
from swarmllm.scheduling.speeds import Observations, PeerSpeeds
from swarmllm.supervision import supervise
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.membership.signer import RowSigner
from swarmllm.swarm.peers.trust import NeutralTrust, NodeTrust
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm.workerpool.encoders import KeptPictures
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import Tensor

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)


class Pipelines:
    def __init__(
        self,
        router: Router,
        registry: Registry,
        pool: Compute,
        catalogue: Catalogue,
        node_id: NodeId,
        settings: PipelineSettings,
        *,
        pieces: ServesPieces | None = None,
        digests: ServesDigests | None = None,
        observations: Observations | None = None,
        trust: NodeTrust | None = None,
        links: StageLinks | None = None,
        budget: ByteBudget | None = None,
        kept: PrefixStore | None = None,
        prefix_key: str = "",
        kept_pictures: KeptPictures | None = None,
        signer: RowSigner | None = None,
    ) -> None:
        """`pieces` answers requests for bytes of models, `digests` requests for digests of a file that nodes
        have parts of; without them this node serves neither. Without `links` every job goes
        by way of the daemons. `kept`: KV of prompts, whose names are keyed with `prefix_key`; without it
        none travels. `kept_pictures`: what pictures became here; what they become elsewhere joins
        it. `signer`: stages here sign for their rows, and those of this node's requests are asked to."""
        self._observations = observations = observations or Observations()
        self._router = router
        self._registry = registry
        self._pool = pool = ObservedCompute(pool, observations)
        self._token_bytes = TokenBytes(pool)
        self._speeds = PeerSpeeds()
        planner = RoutePlanner(
            node_id,
            router,
            registry,
            pool,
            observations,
            settings.constraints,
            self._speeds,
            settings.activation_compression,
            prefers_signed_rows=signer is not None,
        )
        self._trust = trust = trust or NeutralTrust()
        self._node_id = node_id
        self._settings = settings
        self.on_work: Callable[[], None] = lambda: None
        """Called when a request of another node is taken up here."""
        self._tasks = tasks = PipelineTasks()
        self._counts = PipelineStatistics()
        self._suspects = Suspects()
        budget = budget or ByteBudget()
        self._links = links or NoStageLinks()
        self._requests = OriginRequests()
        verdicts = VerdictRecorder(node_id, trust, self._suspects, self._counts)
        commitments = Commitments(router, registry, verdicts, trust, tasks, self._requests, signer)
        self.commits = signer is not None
        row_committers: MakesRowCommitters = NoRowCommitters()
        if signer is not None:
            row_committers = RowCommitters(pool, router, signer, tasks, commitments)
        self._sessions = Sessions(
            pool,
            router,
            catalogue,
            settings,
            self._start_session,
            self._links,
            self._requests,
            trust,
            budget,
            row_committers,
        )
        self._local_load = LocalLoad(pool, self._requests, self._sessions, settings)
        self._checker = Checker(
            router,
            registry,
            pool,
            settings,
            self._counts,
            self._suspects,
            trust,
            self._local_load,
            commitments,
        )
        self._prefixes: PrefixFetcher | None = None
        prefix_serving: PrefixServing | None = None
        own_models = OwnModels(catalogue)
        cached_rows: CountsCachedRows = NothingCached()
        if kept is not None and (fetch := settings.prefix_fetch).is_on:
            transfer = PrefixTransfer(router, kept, fetch, self._counts, trust, budget)
            self._prefixes = PrefixFetcher(registry, transfer, observations, self._local_load, prefix_key)
            self._sessions.fetches = StageFetcher(node_id, registry, transfer, observations, own_models)
            cached_rows = CachedRows(
                node_id,
                registry,
                kept,
                sends_tokens=not settings.local_embedding_privacy,
                key=prefix_key,
            )
            prefix_serving = PrefixServing(
                node_id,
                kept,
                own_models,
                self._counts,
                registry.may_share,
                fetch.serving_timeout_s,
                self._sessions,
            )
        self._attempts = Attempts(
            router,
            registry,
            pool,
            self._requests,
            self._sessions,
            settings,
            self._counts,
            trust,
            self._suspects,
            self._checker,
            tasks,
            self._prefixes,
        )
        self._routes = RequestRoutes(router, planner, self._local_load, self._suspects, trust, cached_rows)
        self.stages_for, self.plan = self._routes.stages_for, self._routes.plan
        self._cuts_ahead = CutsAhead(node_id, pool, registry, own_models, self._routes, self._sessions)
        self._opener = PipelineOpener(
            node_id,
            self._attempts,
            self._routes,
            self._speeds,
            observations,
            trust,
            self._counts,
        )
        self._standbys = Standbys(
            node_id,
            self._attempts,
            self._routes,
            self._counts,
            HedgeBudget(settings.hedge),
            tasks,
            judged_after_s=settings.ack_timeout_s,
        )
        self._moves: Moves | None = None
        if self._prefixes is not None:
            # Without KV of other nodes a request that moves would have as much computed as one that breaks.
            self._moves = Moves(router, registry, self._requests, self._routes, self._attempts, tasks)
        self._prompt_rows = PromptRows(
            node_id, pool, settings, self._requests, self._attempts, self._routes.assembly_for
        )
        self._pictures = PictureServing(pool, own_models, self._counts, trust, budget, tasks)
        kept_pictures = KeptPictures() if kept_pictures is None else kept_pictures
        self._picture_checker = PictureChecker(
            pool,
            router,
            budget,
            self._counts,
            trust,
            self._suspects,
            self._local_load,
            kept_pictures,
            settings.check_rate,
        )
        self.encoders = Encoders(
            pool,
            router,
            registry,
            settings,
            self._counts,
            trust,
            budget,
            self._suspects,
            self._routes,
            kept_pictures,
            self._picture_checker,
        )
        self.prompts = Prompts(pool, self.encoders, settings)
        self._inbox = Inbox(
            self._sessions,
            self._requests,
            self._suspects,
            self._counts,
            trust,
            commitments,
            self._checker.replies,
            self._pictures.cancel,
        )
        self.on_request = RequestHandler(
            self._inbox,
            self._sessions,
            pool,
            pieces,
            digests,
            prefix_serving,
            self._local_load,
            self._pictures,
            lambda: self.on_work(),
        ).on_request
        """For requests of other nodes."""
        self.on_notice = LinkNotices(self._links, self._sessions, observations, self._inbox.take)
        """For what workers say unasked."""

    def statistics(self) -> PipelineStatistics:
        counts = PipelineStatistics(**{name: getattr(self._counts, name) for name in self._counts.__slots__})
        counts.prefix_missed = Counter(counts.prefix_missed)
        counts.prefix_not_asked = Counter(counts.prefix_not_asked)
        counts.active_generations = len(self._requests)
        counts.active_stage_requests = self._sessions.n_for_others() + len(self._pictures)
        counts.jobs_by_link = self._links.n_jobs
        counts.segments_served += sum(
            session.n_jobs for session in self._sessions.all_running() if session.view.origin != self._node_id
        )
        return counts

    def served(self) -> tuple[Served, ...]:
        """What was computed for other nodes in the last minutes."""
        return self._sessions.served()

    def served_tokens(self) -> Mapping[ModelId, int]:
        """By model, for all other nodes together, since the start."""
        return self._sessions.served_tokens()

    def used_by_others_s(self, model_id: ModelId) -> float:
        """See `Sessions`."""
        return self._sessions.used_by_others_s(model_id)

    def are_layers_in_use(self, model_id: ModelId | None = None, layers: LayerRange | None = None) -> bool:
        """Whether requests run over these layers (None: any) of this node that may go on elsewhere with what
        was computed here, or have left it here for that."""
        return self._moves is not None and self._sessions.uses(model_id, layers)

    def may_hand_over(self) -> bool:
        """Whether requests had stages here lately whose KV other nodes may fetch."""
        return self._moves is not None and (bool(self.served()) or self._sessions.uses())

    def needed(self) -> list[Collection[NodeId]]:
        """Of each model that was asked for here lately, the nodes that say they hold layers of it, reachable
        or not."""
        return [self._registry.announcers_of(model_id) for model_id in self._routes.warming.kept()]

    def is_working(self) -> bool:
        """Whether a request of this node or of another one runs here."""
        return bool(self._requests or self._pictures or self._sessions.by_request)

    def room(self) -> Room:
        """For one more request, of the model with least of it."""
        return self._local_load.room()

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once assignments and jobs are accepted."""
        async with trio.open_nursery() as nursery, self._router.changes() as changes:
            self._tasks.nursery = nursery
            supervise(nursery, "links", self._links.run)
            supervise(nursery, "checks", self._checker.run)
            supervise(nursery, "picture checks", self._picture_checker.run)
            supervise(nursery, "route warming", self._routes.warming.run)
            supervise(nursery, "cuts ahead", self._cuts_ahead.run)
            if self._prefixes is not None:
                supervise(nursery, "prefix checks", self._prefixes.run)
            self._router.serve(self.on_request, self.on_message)
            task_status.started()
            try:
                async for change in changes:
                    if change.kind == "disconnected":
                        self._lost(change.node_id)
                    else:
                        self._find_lost()
                    if change.kind == "connected":
                        self._suspects.clear(change.node_id)
                    if change.kind == "record" and self._moves is not None:
                        self._moves.look(change.node_id)
                    self._opener.swarm_changed()
            finally:
                self._tasks.nursery = None
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def generate(
        self,
        prompt: Prompt,
        entry: CatalogueEntry,
        sampling: Sampling,
        *,
        request_id: str | None = None,
        queue_s: float = 0.0,
    ) -> AsyncIterator[Generation]:
        """Answer one prompt; entered when the first token is there, and where `prompt.top_logprobs` asks for
        it, the prompt has been scored. Leaving early cancels on every node.

        Raises SwarmLLMError: InvalidRequest and ContextFull for the prompt, NoPipeline, NodeUnreachable,
        RemoteError, WorkerError, DeadlineExceeded.
        """
        request_id = request_id or new_request_id()
        started_s = trio.current_time()
        await self._pool.check_grammar(ModelFile.of(entry), sampling)
        tokens, pictures = await self.prompts.read(prompt, entry, sampling)
        tokenize_s = trio.current_time() - started_s
        sampling = self._fit(len(tokens), sampling, entry, prompt.field)
        sampling = self._exactly(sampling)
        if self._settings.check_rate > 0:
            sampling = msgspec.structs.replace(sampling, fingerprint_key=secrets.randbelow(2**32))
        self._counts.generations += 1
        scored: ScoredPrompt | None = None
        if prompt.top_logprobs is not None:
            scoring = msgspec.structs.replace(sampling, top_logprobs=prompt.top_logprobs)
            scored = await self._prompt_rows.score(request_id, tokens, entry, scoring, prompt.field)
            if not prompt.is_answered:
                yield Generation(
                    scored,
                    None,
                    request_id=request_id,
                    n_prompt_tokens=len(tokens),
                    is_apart=sampling.exact,
                    queue_s=queue_s,
                    tokenize_s=tokenize_s,
                    prompt=scored.values,
                )
                return
        request = OriginRequest(
            request_id,
            entry,
            tokens,
            sampling,
            RetryPolicy(self._settings.failover_timeout_s),
            prompt.session,
            is_exact=sampling.exact,
            pictures=pictures,
            tells_prompt=self._settings.tells_prompt,
        )
        with self._requests.under_way(request):
            async with self._open(request) as source:
                yield Generation(
                    source,
                    await source.next(),
                    request_id=request_id,
                    n_prompt_tokens=len(tokens),
                    stop=sampling.stop,
                    is_apart=sampling.exact,
                    queue_s=queue_s,
                    tokenize_s=tokenize_s,
                    prompt=None if scored is None else scored.values,
                    looked=() if pictures is None else pictures.looked,
                )

    async def rows(
        self, tokens: Tensor, entry: CatalogueEntry, *, request_id: str | None = None, is_exact: bool = False
    ) -> Rows:
        """The model's states after the final norm, of every token of i32 [n].

        Raises as `generate` does."""
        asked = self._exactly(Sampling(max_tokens=1, exact=is_exact))
        sampling = self._fit(len(tokens), asked, entry, "input")
        return await self._prompt_rows.rows(request_id or new_request_id(), tokens, entry, sampling)

    async def on_message(self, sender: NodeId, header: bytes, payload: memoryview) -> None:
        self._inbox.take(sender, header, payload)

    def _exactly(self, sampling: Sampling) -> Sampling:
        return msgspec.structs.replace(sampling, exact=sampling.exact or self._settings.exact)

    def _fit(self, n_prompt_tokens: int, sampling: Sampling, entry: CatalogueEntry, field: str) -> Sampling:
        return fit(n_prompt_tokens, sampling, entry, self.prompts.room_for(entry), field)

    @asynccontextmanager
    async def _open(self, request: OriginRequest) -> AsyncIterator[Failover]:
        """Nothing has been asked of anybody before the first `next`."""
        detokenizer = Detokenizer(request.sampling, request.generated, self._token_bytes)
        source = Failover(request, self._opener, self._standbys, detokenizer)
        try:
            yield source
        finally:
            self._standbys.served(request)
            self._counts.recoveries += request.recovery.n_recoveries
            self._counts.rebuilt += source.n_rebuilt
            await source.aclose()
            if request.recovery.is_under_way:
                self._opener.release(request.attempts)

    def _start_session(self, session: Session) -> None:
        self._tasks.spawn(partial(self._run_session, session), session.has_failed)
        self._links.join(session.context)

    async def _run_session(self, session: Session) -> None:
        await session.run()
        if session.view.origin != self._node_id:
            self._counts.segments_served += session.n_jobs

    def _lost(self, node_id: NodeId) -> None:
        self._links.lost(node_id)
        for chain in self._requests.chains():
            chain.lost(node_id)
        self._sessions.lost(node_id)
        self._pictures.lost(node_id)

    def _find_lost(self) -> None:
        """A reader of changes that falls behind may have missed a disconnection."""
        involved = {node_id for session in self._sessions.all_running() for node_id in session.view.node_ids}
        for node_id in involved - self._router.reachable() - {self._node_id}:
            self._lost(node_id)
