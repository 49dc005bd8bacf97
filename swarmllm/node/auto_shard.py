"""AutoShardManager: this node's part in placing models, from the plan to one step at a time.

Every few seconds it works out the plan (see `placing`) for each model that its user lets the swarm place
here, and takes one step towards it when the plan has asked the same of this node three times in a row. What
is being loaded is told to the swarm as if it were held, so that nobody else starts on it. What the user
loaded by hand or by the configuration is pinned: counted, never moved. A step that fails is tried again
later.

Everything that goes into a plan comes from records, this node's own included, so that all nodes plan from the
same. Speeds wander with every forward; they go in as powers of the square root of two, or the plan would
wander with them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import trio
from msgspec import UNSET, UnsetType

from swarmllm.config import AutoManageTable
from swarmllm.errors import SwarmLLMError
from swarmllm.memory_info import memory_bytes
from swarmllm.models import CatalogueEntry, LayerRange, Manifest, covers, merge, subtract
from swarmllm.node.shares import AcceptedShares
from swarmllm.pipeline.route.inputs import Links, Load, circumstances
from swarmllm.scheduling.coordinates import Coordinate
from swarmllm.scheduling.cost import Workload
from swarmllm.scheduling.hysteresis import CONSISTENT_TICKS, Hysteresis
from swarmllm.scheduling.observation import Observations
from swarmllm.scheduling.placement import ModelShape, Placement, PlacementNode, place
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool import WorkerPool
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce, SharedModel

log = logging.getLogger("swarmllm.node")

RETRY_S = 30.0
"""After a step has failed."""


@dataclass(slots=True)
class PlacedModel:
    """What is known of one model that is placed here; its public fields are shown to people."""

    name: str
    model_id: ModelId | Literal[""] = ""
    target: tuple[LayerRange, ...] = ()
    state: str = "looking for it"
    loading: tuple[LayerRange, ...] = ()
    managed: tuple[LayerRange, ...] = ()
    """What this manager loaded, and may drop."""
    retry_at_s: float = 0.0
    shared: bool = False
    """A node shares it; it is dropped when nobody does any more."""
    patience: Hysteresis = field(default_factory=Hysteresis)


Find = Callable[[str], Awaitable[CatalogueEntry]]
Act = Callable[[CatalogueEntry, LayerRange], Awaitable[object]]


class AutoShardManager:
    def __init__(
        self,
        settings: AutoManageTable,
        *,
        node_id: NodeId,
        registry: Registry,
        pool: WorkerPool,
        find: Find,
        load: Act,
        drop: Act,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when the swarm should hear of what is being loaded."""
        self.models = [PlacedModel(name) for name in settings.models]
        self.shares: tuple[SharedModel, ...] | UnsetType = UNSET
        """What this node shares; unset where it shares nothing, and until it has looked what is here."""
        self._to_share = settings.share
        self._accepted = AcceptedShares(settings.accept)
        self._budget_bytes = int(settings.max_memory_gib * 2**30) or memory_bytes()[0] // 2
        self._max_pipes = settings.max_pipes or None
        self._interval_s = settings.interval_s
        self._node_id = node_id
        self._registry = registry
        self._pool = pool
        self._find = find
        self._load = load
        self._drop = drop
        self._on_change = on_change
        self._shapes: dict[str, ModelShape] = {}

    async def run(self) -> None:
        """Until cancelled; at once over where there is nothing to place."""
        while self.models or self._to_share or self._accepted.accept:
            await self.tick(trio.current_time())
            await trio.sleep(self._interval_s)

    async def tick(self, now_s: float) -> None:
        await self._follow_shares(now_s)
        for model in self.models:
            if now_s < model.retry_at_s:
                continue
            try:
                await self._look_after(model)
            except SwarmLLMError as error:
                model.state = error.message
                model.retry_at_s = now_s + (RETRY_S if model.model_id or model.shared else 0.0)
                log.info("placing %s: %s", model.name, error.message)

    async def _follow_shares(self, now_s: float) -> None:
        if self._to_share and (self.shares is UNSET or len(self.shares) < len(self._to_share)):
            await self._share_what_is_here()
        shared = self._accepted.follow(self._node_id, self._registry.working_nodes(), now_s)
        configured = {model.model_id for model in self.models if not model.shared}
        for model in [model for model in self.models if model.shared]:
            if model.name in shared and model.name not in configured:
                continue
            if model.name not in shared and not await self._forget(model, now_s):
                continue
            self.models.remove(model)
            self._on_change()
        known = {model.name for model in self.models} | configured
        self.models += [PlacedModel(name, shared=True) for name in shared if name not in known]

    async def _share_what_is_here(self) -> None:
        shares: dict[str, SharedModel] = {}
        for name in self._to_share:
            try:
                entry = await self._find(name)
            except SwarmLLMError as error:
                log.info("sharing %s: %s", name, error.message)
            else:
                shares[entry.model_id] = SharedModel(model_id=entry.model_id, name=entry.name)
        if tuple(shares.values()) != self.shares:
            self.shares = tuple(shares.values())
            self._on_change()

    async def _forget(self, model: PlacedModel, now_s: float) -> bool:
        """Drop what was loaded for a share that was withdrawn; False: not all of it could be dropped."""
        if now_s < model.retry_at_s:
            return False
        try:
            for layers in model.managed:
                await self._drop(await self._find(model.name), layers)
                model.managed = subtract(model.managed, [layers])
        except SwarmLLMError as error:
            model.state, model.retry_at_s = error.message, now_s + RETRY_S
            log.info("dropping %s, which is not shared any more: %s", model.name, error.message)
            return False
        return True

    # What the swarm is told.

    @property
    def model_ids(self) -> tuple[ModelId, ...]:
        return tuple(sorted({model.model_id for model in self.models if model.model_id}))

    @property
    def free_bytes(self) -> int:
        """Of the budget; layers that the user loaded count too."""
        return max(0, self._budget_bytes - self._used_bytes()) if self.models else 0

    def loading(self, model_id: ModelId) -> tuple[LayerRange, ...]:
        return next((model.loading for model in self.models if model.model_id == model_id), ())

    def pinned(self, model_id: ModelId) -> tuple[LayerRange, ...]:
        """Of what is loaded, what was not loaded here."""
        managed = [layers for m in self.models if m.model_id == model_id for layers in m.managed]
        return subtract(self._pool.loaded(model_id), managed)

    def loaded_by_hand(self, model_id: ModelId, layers: LayerRange) -> None:
        """A person wants them here: they are not this manager's to drop any more."""
        for model in self.models:
            if model.model_id == model_id:
                model.managed = subtract(model.managed, [layers])

    def _used_bytes(self) -> int:
        held = {model_id: list(ranges) for model_id, ranges in self._pool.models().items()}
        for model in self.models:
            if model.model_id and model.loading:
                held.setdefault(model.model_id, []).extend(model.loading)
        return sum(
            self._shapes[model_id].n_bytes(layers)
            for model_id, ranges in held.items()
            if model_id in self._shapes
            for layers in merge(ranges)
        )

    async def _look_after(self, model: PlacedModel) -> None:
        entry = await self._find(model.name)
        for model_id in (entry.model_id, *self._pool.models()):
            if model_id not in self._shapes:
                self._shapes[model_id] = shape_of((await self._find(model_id)).manifest)
        if model.model_id != entry.model_id:
            model.model_id = entry.model_id
            self._on_change()
        shape = self._shapes[entry.model_id]
        records = self._registry.working_nodes()
        own = records.get(self._node_id)
        if own is None or model.model_id not in own.capability.placed_models:
            model.state = "telling the swarm"
            return
        # With hundreds of nodes this takes tens of milliseconds, which nobody else need wait for.
        plan = await trio.to_thread.run_sync(plan_of, entry.manifest, records, self._max_pipes)
        model.target = plan.targets[self._node_id]
        held = self._pool.loaded(entry.model_id)
        others = self._registry.held(entry.model_id).items()
        elsewhere = [layers for node_id, ranges in others if node_id != self._node_id for layers in ranges]
        pinned = self.pinned(entry.model_id)
        step = next_step(held, model.target, pinned, elsewhere, self.free_bytes, shape)
        if step.load is None and step.drop is None:
            model.patience.forget()
            model.state = f"waits for {step.waits_for}" if step.waits_for else "as planned"
            return
        if not model.patience.see((model.target, step)):
            model.state = f"about to move ({model.patience.n_seen} of {CONSISTENT_TICKS})"
            return
        model.patience.forget()
        if step.load is not None:
            await self._take(model, entry, step.load)
        elif step.drop is not None:
            model.state = f"dropping {step.drop}"
            log.info("placing %s: dropping %s, others have it", model.name, step.drop)
            try:
                await self._drop(entry, step.drop)
            finally:
                # What a failed drop leaves here is still for this manager to move.
                gone = subtract([step.drop], self._pool.loaded(entry.model_id))
                model.managed = subtract(model.managed, gone)

    async def _take(self, model: PlacedModel, entry: CatalogueEntry, layers: LayerRange) -> None:
        model.state, model.loading = f"loading {layers}", (layers,)
        log.info("placing %s: loading %s", model.name, layers)
        self._on_change()
        try:
            await self._load(entry, layers)
            model.managed = merge([*model.managed, layers])
            model.state = "loaded"
        finally:
            model.loading = ()
            self._on_change()


NOBODY = NodeId("")
QUICKEST_S, SLOWEST_S = 1e-7, 100.0
"""Per layer and row: beyond, a node is wrong about itself or lies."""

HELD_MAX = 1024
"""Ranges that a plan counts, all nodes together. Each node's share is the same: its widest ones. A plan takes
half a second with that, and ten times as long with four times as many."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next; at most one of the two."""

    load: LayerRange | None = None
    drop: LayerRange | None = None
    waits_for: str = ""
    """Why nothing can be done, though something should."""


def shape_of(manifest: Manifest) -> ModelShape:
    sizes = dict.fromkeys(("layer", "embedding", "head", "header"), 0)
    for shard in manifest.shards:
        sizes[shard.kind] = max(sizes[shard.kind], shard.size_bytes)
    tied = sizes["embedding"] if manifest.tied_embedding else 0
    return ModelShape(
        manifest.n_layers,
        manifest.cut_alignment,
        max(1, sizes["layer"]),
        sizes["embedding"],
        sizes["head"] + tied,
    )


def plan_of(manifest: Manifest, records: Mapping[NodeId, NodeRecord], max_pipes: int | None) -> Placement:
    """`records`: of this node and of those that are connected and trusted."""
    model_id = manifest.model_id
    said = {
        node_id: announced
        for node_id, record in records.items()
        for announced in record.models
        if announced.model_id == model_id
    }
    involved = {
        node_id: record
        for node_id, record in records.items()
        if node_id in said or model_id in record.capability.placed_models
    }
    speeds = circumstances(
        NOBODY,
        manifest,
        Workload(),
        involved,
        {node_id: record.capability for node_id, record in involved.items()},
        Links(),
        Observations(),
        Load(),
    ).speeds
    n_ranges = max(1, HELD_MAX // max(1, len(involved)))
    nodes = [
        _node(record, said.get(node_id), model_id, speeds[node_id].decode_s, n_ranges)
        for node_id, record in involved.items()
    ]
    return place(shape_of(manifest), nodes, max_pipes)


def next_step(
    held: tuple[LayerRange, ...],
    target: tuple[LayerRange, ...],
    pinned: tuple[LayerRange, ...],
    elsewhere: Iterable[LayerRange],
    free_bytes: int,
    shape: ModelShape,
) -> Step:
    """From what is held to what is wanted. `elsewhere`: what other connected nodes have ready; what none of
    them has is the last copy, and stays. `pinned` stays in any case. Loading comes first, so that there is
    never less in the swarm than before; where there is no room, dropping does."""
    wanted = subtract(target, held)
    surplus = subtract(subtract(held, target), pinned)
    safe = [layers for layers in surplus if covers(elsewhere, layers)]
    for layers in wanted:
        if shape.n_bytes(layers) <= free_bytes:
            return Step(load=layers)
    if safe:
        return Step(drop=safe[0])
    if wanted:
        return Step(waits_for=f"room for {wanted[0]}")
    if surplus:
        return Step(waits_for=f"another holder of {surplus[0]}")
    return Step()


def _node(
    record: NodeRecord, announced: ShardAnnounce | None, model_id: ModelId, layer_s: float, n_ranges: int
) -> PlacementNode:
    said, takes_part = record.capability, model_id in record.capability.placed_models
    held: tuple[LayerRange, ...] = ()
    pinned: tuple[LayerRange, ...] = ()
    if announced is not None:
        held = _widest((*announced.ranges, *announced.loading), n_ranges)
        pinned = _widest(announced.pinned, n_ranges)
    where = said.coordinate
    return PlacementNode(
        record.node_id,
        said.placing_free_bytes,
        2 ** (round(2 * math.log2(min(SLOWEST_S, max(QUICKEST_S, layer_s)))) / 2),
        held,
        pinned,
        Coordinate(where.position_s, where.height_s, where.error) if where is not None else None,
        takes_part,
    )


def _widest(pairs: Iterable[tuple[int, int]], n_ranges: int) -> tuple[LayerRange, ...]:
    """In the fewest ranges; where there are too many, those with most layers."""
    merged = merge(LayerRange(*pair) for pair in pairs)
    if len(merged) <= n_ranges:
        return merged
    return tuple(sorted(sorted(merged, key=lambda layers: (-len(layers), layers.start))[:n_ranges]))
