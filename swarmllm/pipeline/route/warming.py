"""Keeps connections with the nodes of the routes that the next requests will probably take.

A node is connected with few others (`network.max_peers`), and the fastest pipeline of a model may lead over
nodes of which it only knows the records. A request does without such nodes where that costs it little,
because a record proves no node. So this module computes the cheapest routes over all reachable nodes in the
background, for the models that were requested lately, and dials their nodes: the next request finds them
connected, or known as unreachable. It computes more than one route, because the cheapest one changes with the
loads of nodes and with the length of the prompt.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.models import CatalogueEntry
from swarmllm.pipeline.route.inputs import OwnLoad
from swarmllm.pipeline.route.route_planner import RequestSize, RoutePlanner
from swarmllm.shared_ticks import next_tick_s
from swarmllm.swarm.router import Router
from swarmllm_proto.identifiers import ModelId, NodeId

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
"""Between two rounds. The first request for a model begins one at once: most conversations go on."""
MODELS_MAX: Final = 8
ASKED_S: Final = 1800.0
"""For so long after its last request a model's route is kept connected."""
ROUTES: Final = 3
"""Of a model, without a node in common."""
DIALS_MAX: Final = 6
"""In one round, and model."""


@dataclass(frozen=True, slots=True)
class _Asked:
    entry: CatalogueEntry
    size: RequestSize
    at_s: float


class RouteWarming:
    def __init__(
        self, router: Router, routes: RoutePlanner, load: Callable[[CatalogueEntry, RequestSize], OwnLoad]
    ) -> None:
        self._router = router
        self._routes = routes
        self._load = load
        self._asked: dict[ModelId, _Asked] = {}
        self._asked_anew = trio.Event()

    def asked(self, entry: CatalogueEntry, size: RequestSize, now: float) -> None:
        """A request is about to take a route of this model."""
        if self._asked.pop(entry.model_id, None) is None:
            self._asked_anew.set()
        if len(self._asked) >= MODELS_MAX:
            del self._asked[next(iter(self._asked))]
        self._asked[entry.model_id] = _Asked(entry, size, now)

    def kept(self) -> list[ModelId]:
        """The models that were asked for lately."""
        return list(self._asked)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            look_s = next_tick_s(trio.current_time(), EVERY_S) if self._asked else math.inf
            with trio.move_on_at(look_s):
                await self._asked_anew.wait()
            self._asked_anew = trio.Event()
            await self.warm(trio.current_time())

    async def warm(self, now: float) -> None:
        """Dial what is missing of the best routes of now."""
        for model_id, asked in list(self._asked.items()):
            if now - asked.at_s >= ASKED_S:
                self._asked.pop(model_id, None)
            elif self._router.reachable() != self._router.connected():
                await self._warm_one(asked)

    async def _warm_one(self, asked: _Asked) -> None:
        here, needed = self._router.node_id, dict[NodeId, None]()
        for _ in range(ROUTES):
            try:
                route = await self._routes.choose(
                    asked.entry, asked.size, self._load(asked.entry, asked.size), avoid=tuple(needed)
                )
            except SwarmLLMError:
                break
            found = sorted({stage.node_id for stage in route.stages} - {here})
            if not found:
                break
            needed |= dict.fromkeys(found)
        connected = self._router.connected()
        missing = [node_id for node_id in needed if node_id not in connected]
        # Those that are connected get a data connection, on which they tell their load.
        there = [node_id for node_id in needed if node_id in connected]
        async with trio.open_nursery() as nursery:
            for node_id in (*there, *missing[:DIALS_MAX]):
                nursery.start_soon(self._reach, node_id)

    async def _reach(self, node_id: NodeId) -> None:
        try:
            await self._router.reach(node_id)
        except SwarmLLMError as error:
            provoked_by(log, node_id).info("node %s of a probable route: %s", node_id, error.message)
