"""Cuts loaded layers where routes will need it, before a request waits for the cut.

A stage may be any part of a range that a node holds. The worker then has to have segments of exactly that
part, and making them takes from a tenth of a second to seconds. So when layers or holders of a model have
changed, the route that a request from here would take is worked out: where nodes hold the same layers, all of
them come to the same boundaries, by the speeds that they announce. This node's stages of that route are cut,
and those that other nodes' requests had here lately. Nothing is cut that requests have rows in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

from swarmllm.errors import SwarmLLMError
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange, covers
from swarmllm.pipeline.own_models import FindsOwnModels
from swarmllm.pipeline.stage.served import Served
from swarmllm.shared_ticks import REST_TICK_S, sleep_until_tick
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import Stage

log = logging.getLogger(__name__)

EVERY_S: Final = 5.0
RARELY_S: Final = REST_TICK_S
"""Once layers and holders have been the same for two looks."""


class Layers(Protocol):
    """The part of WorkerPool that this module needs; see there."""

    def loaded(self, model_id: ModelId) -> tuple[LayerRange, ...]: ...

    def context_sizes(self) -> dict[ModelId, int]: ...

    def cut(self, model_id: ModelId, layers: LayerRange, *, if_idle: bool = False) -> None: ...


class Holdings(Protocol):
    """The part of Registry that this module needs; see there."""

    def held(self, model_id: ModelId) -> Mapping[NodeId, tuple[LayerRange, ...]]: ...


class ChoosesStages(Protocol):
    async def stages_for(self, entry: CatalogueEntry) -> Sequence[Stage]:
        """The route that a request of this node would take now."""
        ...


class ServesOthers(Protocol):
    def served(self) -> Iterable[Served]:
        """The computations for others lately."""
        ...


_Situation: TypeAlias = tuple[tuple[LayerRange, ...], frozenset[tuple[NodeId, tuple[LayerRange, ...]]]]


class CutsAhead:
    def __init__(
        self,
        node_id: NodeId,
        pool: Layers,
        registry: Holdings,
        models: FindsOwnModels,
        routes: ChoosesStages,
        sessions: ServesOthers,
    ) -> None:
        self._node_id = node_id
        self._pool = pool
        self._registry = registry
        self._models = models
        self._routes = routes
        self._sessions = sessions
        self._done: dict[ModelId, _Situation] = {}

    async def run(self) -> None:
        """Until cancelled."""
        n_calm = 0
        while True:
            n_calm = 0 if await self.look() else n_calm + 1
            await sleep_until_tick(EVERY_S if n_calm < 2 else RARELY_S)

    async def look(self) -> bool:
        """Once for each situation of a model: a route that others take for a moment is no reason to cut.
        Returns whether one was new."""
        has_changed = False
        models = self._pool.context_sizes()
        self._done = {model_id: each for model_id, each in self._done.items() if model_id in models}
        for model_id in models:
            loaded = self._pool.loaded(model_id)
            situation = loaded, frozenset(self._registry.held(model_id).items())
            if self._done.get(model_id) == situation:
                continue
            try:
                wanted = await self._wanted(model_id)
            except SwarmLLMError as error:  # no route yet: another holder will change the situation
                log.debug("no route of %s to cut for: %s", model_id, error.message)
                wanted = []
            for layers in dict.fromkeys(wanted):
                if layers not in loaded and covers(loaded, layers):
                    self._pool.cut(model_id, layers, if_idle=True)
            self._done[model_id] = situation
            has_changed = True
        return has_changed

    async def _wanted(self, model_id: ModelId) -> list[LayerRange]:
        stages = await self._routes.stages_for(await self._models.get(model_id))
        mine = [LayerRange(each.start, each.end) for each in stages if each.node_id == self._node_id]
        return mine + [
            layers for each in self._sessions.served() if each.model_id == model_id for layers in each.layers
        ]
