"""Chooses routes for the requests of this node: asks the planner on behalf of a request, with the known
loads, the nodes that may fail, and the request's own pipelines that broke.

A route is chosen twice. The first choice is by records. The stages that accept it report their load at that
moment. Where it is higher than the records said, the planner chooses again, and a route that takes clearly
less time is assigned instead (`lighter`).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import trio

from swarmllm.errors import NoPipeline
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.origin.requests import OriginRequest
from swarmllm.pipeline.repair.retry_policy import PipelineSpeed
from swarmllm.pipeline.route.assembly import AFFINITY, Affinity, Assembly
from swarmllm.pipeline.route.inputs import NOTHING_CACHED, OwnLoad
from swarmllm.pipeline.route.local_load import LocalLoad
from swarmllm.pipeline.route.reported_loads import ReportedLoads
from swarmllm.pipeline.route.route_planner import DEFAULT_SIZE, RequestSize, RoutePlanner
from swarmllm.pipeline.route.suspects import Suspects, by_doubts
from swarmllm.pipeline.route.untried import UntriedNodes
from swarmllm.pipeline.route.warming import RouteWarming
from swarmllm.pipeline.stage.capacity import EXPECTED_OUTPUT_TOKENS
from swarmllm.scheduling.plan import Plan
from swarmllm.swarm.peers.trust import NodeTrust
from swarmllm.swarm.router import Router
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import Stage
from swarmllm_proto.tensors import Tensor

CHANGES_MAX: Final = 5
"""Of one request's route, because of what its stages said when they accepted it."""
GAIN: Final = 1.1
"""So many times longer must the accepted route take for another one to be assigned."""


DOUBTED: Final = "in doubt: a pipeline with it broke lately, here or by what another node says"
NEWCOMER: Final = "newcomers failed lately, and it has not served here often enough to be told from them"
UNTRIED: Final = "there has been no connection with it yet"
UNABLE: Final = (
    "(Nodes of earlier versions, which do not know where rows of this model's pictures stand: {}.)"
)


class CountsCachedRows(Protocol):
    def of(self, entry: CatalogueEntry, tokens: Tensor) -> Mapping[NodeId, int]:
        """By node id: first rows of a prompt that need not be computed there."""
        ...


class NothingCached:
    def of(self, entry: CatalogueEntry, tokens: Tensor) -> Mapping[NodeId, int]:
        return NOTHING_CACHED


class LighterRoute(Exception):
    """The stages have accepted, but others would take clearly less time."""

    def __init__(self, assembly: Assembly) -> None:
        super().__init__(assembly)
        self.assembly = assembly


class RequestRoutes:
    def __init__(
        self,
        router: Router,
        planner: RoutePlanner,
        local_load: LocalLoad,
        suspects: Suspects,
        trust: NodeTrust,
        cached_rows: CountsCachedRows,
        draw: Callable[[Sequence[NodeId]], NodeId] = random.choice,
    ) -> None:
        self._router = router
        self.planner = planner
        self._local_load = local_load
        self._suspects = suspects
        self._trust = trust
        self._cached_rows = cached_rows
        self._draw = draw
        self._reported_loads = ReportedLoads()
        self._affinity = Affinity()
        self._untried = UntriedNodes()
        self.announced_s = planner.announced_s
        self.warming = RouteWarming(router, planner, partial(self._load, n_asking=0))

    async def stages_for(
        self, entry: CatalogueEntry, avoid: Collection[NodeId] = (), request: RequestSize = DEFAULT_SIZE
    ) -> tuple[Stage, ...]:
        """The route such a request of this node would take now. Raises NoPipeline."""
        return (await self.assembly_for(entry, avoid, request)).stages

    async def assembly_for(
        self,
        entry: CatalogueEntry,
        avoid: Collection[NodeId],
        request: RequestSize,
        *,
        is_exact: bool = False,
    ) -> Assembly:
        """The same with all that is known of the route."""
        load = self._load(entry, request, n_asking=0)
        return await self.planner.choose(entry, request, load, avoid, is_exact=is_exact)

    async def plan(self, entry: CatalogueEntry, request: RequestSize) -> Plan:
        """The same route with its reasons; nothing runs. Raises NoPipeline."""
        now = trio.current_time()
        suspects = dict.fromkeys(self._suspects.ordered(now, self._trust.score), DOUBTED)
        untried = {node_id: UNTRIED for node_id in self._router.untried() if node_id not in suspects}
        if not self._untried.may_be_taken(now):
            suspects, untried = suspects | untried, {}
        # An example of what a request would do without: another one may be drawn for it.
        spared = next(iter(self._spared(entry, now)), frozenset())
        suspects |= dict.fromkeys(spared - suspects.keys(), NEWCOMER)
        untried = {node_id: why for node_id, why in untried.items() if node_id not in suspects}
        load = self._load(entry, request, n_asking=0)
        return await self.planner.plan(entry, request, load, suspects, untried)

    async def choose(
        self,
        request: OriginRequest,
        previous: Sequence[Stage] = (),
        broken: Assembly | None = None,
        *,
        suspected: Collection[NodeId] = (),
        n_prompt_tokens: int | None = None,
        accepted: Assembly | None = None,
        accepted_factor: float = GAIN,
        is_running: bool = False,
    ) -> Assembly:
        """Without those who may fail, as far as there are others. `accepted`: as the planner has it.
        `is_running`: what the request takes up now becomes free. Raises NoPipeline."""
        n_output = min(request.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)
        n_prompt = len(request.tokens) if n_prompt_tokens is None else n_prompt_tokens
        entry = request.entry
        # An exact request computes all of its prompt, and ids of a picture's rows are no tokens.
        may_know = not request.is_exact and request.pictures is None
        cached_rows = self._cached_rows.of(entry, request.rows) if may_know else NOTHING_CACHED
        size = RequestSize(n_prompt, n_output, cached_rows)
        besides = request if is_running or accepted is not None else None
        load = self._load(entry, size, n_asking=1, besides=besides)
        now = trio.current_time()
        self.warming.asked(entry, size, now)
        if request.risked & request.recovery.avoid - self._router.reachable():
            self._untried.failed(now)
        untried = self._router.untried()
        # Who waits already, or has stages that have accepted, takes no risk.
        may_risk = request.n_attempts <= 1 and not suspected and accepted is None
        may_risk = may_risk and self._untried.may_be_taken(now)
        suspects = dict.fromkeys(
            (
                *sorted(suspected, key=self._trust.score),
                # What broke this request's pipelines will break the next: others' doubts count less.
                *by_doubts(request.recovery.doubted, self._trust.score),
                *self._suspects.ordered(now, self._trust.score),
                *(() if may_risk else untried),
            )
        )
        unable = self._unable(request)
        avoid = frozenset(request.recovery.avoid) | unable
        # A stage that goes on with what it holds of this request has shown that it works.
        at_work = frozenset[NodeId]() if broken is None else broken.node_ids

        async def without(newcomers: frozenset[NodeId]) -> Assembly:
            return await self.planner.choose(
                entry,
                size,
                load,
                # Rather a newcomer than a node in doubt.
                avoid | ((newcomers - at_work).union(suspects) if newcomers else newcomers),
                suspects=list(suspects),
                untried=untried if may_risk else (),
                previous=previous,
                broken=broken,
                accepted=accepted,
                accepted_factor=accepted_factor,
                is_exact=request.is_exact,
                within=None if request.broken is None else request.broken.kernel_group,
            )

        try:
            chosen = await self._without_newcomers(entry, without, now)
        except NoPipeline as error:
            if unable:
                raise NoPipeline(f"{error.message} {UNABLE.format(len(unable))}") from None
            raise
        risked = chosen.node_ids & untried
        return replace(chosen, untried=risked) if risked else chosen

    async def _without_newcomers(
        self, entry: CatalogueEntry, without: Callable[[frozenset[NodeId]], Awaitable[Assembly]], now: float
    ) -> Assembly:
        """What `without` gives, without newcomers where there has to be and can be. Raises NoPipeline."""
        for newcomers in self._spared(entry, now):
            with suppress(NoPipeline):
                return await without(newcomers)
        return await without(frozenset())

    def _spared(self, entry: CatalogueEntry, now: float) -> list[frozenset[NodeId]]:
        newcomers, score = self._suspects.newcomers, self._trust.score
        if newcomers.are_trusted(now):
            return []
        return list(newcomers.to_spare(self.planner.holders(entry.model_id), score, now, self._draw))

    def _unable(self, request: OriginRequest) -> frozenset[NodeId]:
        """Nodes that do not say that they know how the rows of its pictures stand."""
        if request.pictures is None or not request.pictures.runs:
            return frozenset()
        return self.planner.without_picture_runs(request.entry.model_id)

    async def elsewhere(self, request: OriginRequest) -> Assembly:
        """Raises NoPipeline (see `moves.FindsRoutes`)."""
        return await self.choose(request, broken=request.broken, is_running=True)

    async def standby(self, request: OriginRequest, suspected: frozenset[NodeId]) -> Assembly:
        """Raises NoPipeline (see `standbys.Routes`)."""
        return await self.choose(request, suspected=suspected, n_prompt_tokens=len(request.rows))

    async def lighter(
        self, request: OriginRequest, accepted: Assembly, n_running: Mapping[NodeId, int], asked_s: float
    ) -> Assembly | None:
        """A route that takes clearly less time than the accepted one, by what its stages have said; None:
        there is none. `n_running`: requests that run there, by node id. `asked_s`: what it took to ask them,
        which asking others takes again."""
        self._reported_loads.reported(n_running, request.id, trio.current_time())
        if all(n <= accepted.n_active.get(node_id, 0) for node_id, n in n_running.items()):
            return None
        # A conversation's last pipeline has its KV.
        factor = AFFINITY if accepted.is_reused else GAIN
        try:
            other = await self.choose(request, accepted=accepted, accepted_factor=factor)
        except NoPipeline:
            return None
        is_lighter = other.stages != accepted.stages and other.cost_s + asked_s < other.accepted_cost_s
        return other if is_lighter else None

    def previous(self, request: OriginRequest) -> tuple[Stage, ...]:
        """The pipeline of the conversation's last turn."""
        return self._affinity.previous(request.entry.model_id, request.conversation)

    def took_over(self, request: OriginRequest, assembly: Assembly) -> None:
        """The request goes to these stages, all of which have accepted."""
        self._affinity.remember(request.entry.model_id, request.conversation, assembly.stages)
        if assembly.untried:
            self._untried.accepted()

    def pace(self, request: OriginRequest, assembly: Assembly) -> PipelineSpeed:
        return PipelineSpeed(assembly.first_s, assembly.token_s, partial(self._elsewhere_s, request))

    async def _elsewhere_s(self, request: OriginRequest, suspected: Collection[NodeId]) -> float | None:
        """What a request would cost without nodes that keep it waiting; None: it needs all of them."""
        try:
            other = await self.choose(request, suspected=suspected)
        except NoPipeline:
            return None
        return None if other.node_ids.issuperset(suspected) else other.cost_s

    def _load(
        self, entry: CatalogueEntry, size: RequestSize, *, n_asking: int, besides: OriginRequest | None = None
    ) -> OwnLoad:
        n_tokens = size.n_prompt_tokens + size.n_output_tokens
        reported = self._reported_loads.at(trio.current_time())
        return self._local_load.now(entry, n_tokens, reported, n_asking=n_asking, besides=besides)
