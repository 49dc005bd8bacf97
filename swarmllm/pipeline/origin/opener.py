"""Opens pipelines for a request: chooses a route and asks its stages to accept; changes to a route with less
load where their answers show one.

Each attempt has a request id of its own. A failed attempt is released before the next one starts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import trio

from swarmllm.errors import NoPipeline, SwarmLLMError
from swarmllm.pipeline.origin.attempts import Attempts, OnReportedLoads
from swarmllm.pipeline.origin.generation import TokenSource
from swarmllm.pipeline.origin.requests import Attempt, OriginRequest
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.measuring import learn, measure
from swarmllm.pipeline.route.request_routes import CHANGES_MAX, LighterRoute, RequestRoutes
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.scheduling.speeds import Observations, PeerSpeeds
from swarmllm.swarm.peers.trust import NodeTrust
from swarmllm_proto.identifiers import ModelId, NodeId


class PipelineOpener:
    """Implements `repair.failover.Opener`."""

    def __init__(
        self,
        node_id: NodeId,
        attempts: Attempts,
        routes: RequestRoutes,
        speeds: PeerSpeeds,
        observations: Observations,
        trust: NodeTrust,
        counts: PipelineStatistics,
    ) -> None:
        self._node_id = node_id
        self._attempts = attempts
        self._routes = routes
        self._speeds = speeds
        self._observations = observations
        self._trust = trust
        self._counts = counts
        self._swarm_changed = trio.lowlevel.ParkingLot()
        self._n_changes = 0

    def swarm_changed(self) -> None:
        """A node came, went or has another record."""
        self._n_changes += 1
        self._swarm_changed.unpark_all()

    @asynccontextmanager
    async def open_pipeline(self, request: OriginRequest) -> AsyncIterator[TokenSource]:
        """Raises SwarmLLMError (see `failover.Opener`)."""
        request.n_changes, request.current = self._n_changes, None
        # A retry prefers nothing: what it would prefer has just failed.
        is_first, begins_stream = request.n_attempts == 1, not request.generated
        previous = self._routes.previous(request) if is_first else ()
        assembly = await self._routes.choose(request, previous, request.broken)
        if request.recovery.is_late and assembly.node_ids == request.attempts[-1].assembly.node_ids:
            raise NoPipeline("no other nodes hold these layers")
        if begins_stream and not is_first:
            self._counts.retries += 1
        async with AsyncExitStack() as opened:
            source, assembly = await self._assign(request, assembly, opened)
            self._routes.took_over(request, assembly)
            # What earlier attempts have left, and this one has not taken over, is released.
            self.release(request.attempts[:-1])
            del request.attempts[:-1]
            try:
                yield source
            finally:
                if begins_stream:
                    self._measure(source, assembly, request.entry.model_id)
            learn(self._observations, source, assembly.network_s)

    async def _assign(
        self, request: OriginRequest, assembly: Assembly, opened: AsyncExitStack
    ) -> tuple[TokenSource, Assembly]:
        """Assign a route, or one that takes less time by what the stages of the first say. Raises
        SwarmLLMError."""
        accepted: Assembly | None = None
        may_weigh = not request.generated
        for n_changes in range(CHANGES_MAX + 2):
            attempt = self._attempts.begin(request, assembly)
            weigh = self._weigh(request, assembly) if may_weigh and n_changes < CHANGES_MAX else None
            pipeline = self._attempts.open(attempt, self._routes.pace(request, assembly), weigh)
            try:
                return await opened.enter_async_context(pipeline), assembly
            except LighterRoute as found:
                accepted, assembly = assembly, found.assembly
                self._counts.reassignments += 1
            except SwarmLLMError:
                # The one that was left had accepted.
                if accepted is None or request.recovery.avoid & accepted.node_ids:
                    raise
                assembly, accepted, may_weigh = accepted, None, False
        raise AssertionError("the last route is not weighed")

    def _weigh(self, request: OriginRequest, assembly: Assembly) -> OnReportedLoads:
        began_s = trio.current_time()

        async def weigh(n_running: Mapping[NodeId, int]) -> None:
            asked_s = trio.current_time() - began_s
            lighter = await self._routes.lighter(request, assembly, n_running, asked_s)
            if lighter is not None:
                raise LighterRoute(lighter)

        return weigh

    async def wait_for_change(self, request: OriginRequest, until_s: float) -> None:
        if self._n_changes == request.n_changes:
            with trio.CancelScope(deadline=until_s):
                await self._swarm_changed.park()

    def _measure(self, source: TokenSource, assembly: Assembly, model_id: ModelId) -> None:
        announced_s = partial(self._routes.announced_s, model_id)
        now_s = trio.current_time()
        measure(self._speeds, source, assembly, model_id, self._node_id, announced_s, self._trust.note, now_s)

    def release(self, broken: Sequence[Attempt]) -> None:
        for attempt in broken:
            self._attempts.release(attempt)
