"""AutoShardManager: carries out this node's part of the placement plan, one step at a time.

Every few seconds it works out the plan (see `plan`) for each model that its user lets the swarm place
here, and takes one step towards it when the plan has asked the same of this node three times in a row; of a
new share, once, as soon as all that accept it have said that they take part. Layers that are being loaded are
announced as if they were held, so that no other node starts loading them. What the user loaded by hand or by
the configuration is pinned: counted, never moved. A step that fails is tried again later. Models are handled
side by side: one that takes an hour to arrive delays no other. Shares of other nodes are followed as
`accepted_shares` decides; a model that cannot be fetched loses its place to another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import trio
from msgspec import UNSET, UnsetType

from swarmllm.config import AutoManageTable
from swarmllm.errors import Conflict, SwarmLLMError
from swarmllm.models import CatalogueEntry, LayerRange, covers, merge, subtract
from swarmllm.node.model_access import PlacesModels, Sources
from swarmllm.node.placing.accepted_shares import ACCEPTED_MAX, AcceptedShares, accepted_writers
from swarmllm.node.placing.disk import PlacingDisk, memory_budget_bytes
from swarmllm.node.placing.plan import (
    all_take_part,
    is_followed,
    next_step,
    plan_of,
    ready_layers,
    shape_of,
)
from swarmllm.node.placing.projectors import ProjectorPlacing
from swarmllm.node.placing.share_book import SHARED_MAX, ShareBook
from swarmllm.scheduling.placement import CONSISTENT_TICKS, Hysteresis, ModelShape
from swarmllm.scheduling.speeds import MAX_MODELS
from swarmllm.shared_ticks import REST_TICK_S, next_tick_s
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool import WorkerPool
from swarmllm_proto.identifiers import NOT_PUBLISHED, ModelId, NodeId, PublishedName
from swarmllm_proto.swarm import NodeRecord, SharedModel

log = logging.getLogger("swarmllm.node")

FREE_STEP_BYTES = 2**28
BEGINNING_S = 0.5
"""Between two looks while the nodes that accept a new share are still to say so."""
RETRY_S = 30.0
"""After a step has failed."""
FAMILIAR_LOOKS = 3
"""After so many looks a node has heard what others hold; before, a model may only seem to be held nowhere."""
FAILURES_MAX = 3
"""So often in a row a model that others share may fail before it loses its place."""


@dataclass(slots=True)
class PlacedModel:
    """The state of one model that is placed here; the API shows its public fields."""

    name: str
    model_id: ModelId | Literal[""] = ""
    target: tuple[LayerRange, ...] = ()
    state: str = "looking for it"
    loading: tuple[LayerRange, ...] = ()
    managed: tuple[LayerRange, ...] = ()
    """What this manager loaded, and may drop."""
    arrived: tuple[int, int] = (0, 0)
    """(bytes that have come, bytes in all) of what is being fetched."""
    retry_at_s: float = 0.0
    n_failures: int = 0
    """In a row."""
    shared: bool = False
    """A node shares it; it is dropped when nobody does any more."""
    begins: bool = False
    """It is to be loaded here for the first time, as soon as the others have said that they take part."""
    is_new: bool = False
    """Nobody held any of it when it was looked at, and it was not complete since."""
    n_idle_looks: int = 0
    """In a row, at which its first plan asked nothing of this node and nobody was loading."""
    withdrawn: bool = False
    is_busy: bool = False
    """A task looks after it."""
    fetching: trio.CancelScope | None = None
    hysteresis: Hysteresis = field(default_factory=Hysteresis)


class AutoShardManager:
    def __init__(
        self,
        settings: AutoManageTable,
        *,
        node_id: NodeId,
        registry: Registry,
        pool: WorkerPool,
        models: PlacesModels,
        on_change: Callable[[], None],
        disk: PlacingDisk | None = None,
        book: ShareBook | None = None,
        projectors: ProjectorPlacing | None = None,
        is_private: bool = False,
    ) -> None:
        """`on_change` is called when the swarm should hear of what is being loaded. `disk` None: no limit.
        `book`: what was shared by command. `projectors`: places those of the same models. `is_private`: the
        swarm has a key."""
        self.models = [PlacedModel(name) for name in settings.models]
        self.shares: tuple[SharedModel, ...] | UnsetType = UNSET
        """What this node shares; unset where it shares nothing, and until it has looked what is here."""
        self.accepts = accepted_writers(settings.accept, is_private=is_private)
        """Whose shares it follows: node ids, or `members`."""
        self._disk = disk
        self._projectors = projectors
        self._book = book or ShareBook()
        self._to_share = list(settings.share)
        if self._book.shared:
            self.shares = tuple(self._shared(m, name) for m, name in self._book.shared.items())
        self._accepted = AcceptedShares(
            self.accepts, max(0, min(ACCEPTED_MAX, MAX_MODELS - len(settings.models)))
        )
        self._budget_bytes = memory_budget_bytes(settings)
        self._counts_gpus = not settings.max_memory_gib
        self._max_pipes = settings.max_pipes or None
        self._interval_s = settings.interval_s
        self._node_id = node_id
        self._registry = registry
        self._pool = pool
        self._models = models
        self._on_change = on_change
        self._shapes: dict[str, ModelShape] = {}
        self.is_on_demand: Callable[[ModelId], bool] = lambda model_id: False
        """Whether a model was loaded for requests, and goes when nobody asks for it any more."""
        self._configured_shares: set[ModelId] = set()
        self._wake = trio.Event()
        self._n_looks = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as looks:
            while True:
                await self._begin_looks(trio.current_time(), looks)
                is_beginning = any(model.begins for model in self.models)
                wait_s = min(self._interval_s, BEGINNING_S if is_beginning else math.inf)
                if not self.takes_part:
                    wait_s = max(wait_s, REST_TICK_S)
                with trio.move_on_at(next_tick_s(trio.current_time(), wait_s)):
                    await self._wake.wait()
                self._wake = trio.Event()

    async def tick(self, now_s: float) -> None:
        """One look at every model, and what follows from it, to its end."""
        async with trio.open_nursery() as looks:
            await self._begin_looks(now_s, looks)

    async def _begin_looks(self, now_s: float, looks: trio.Nursery) -> None:
        """One at a time at each model."""
        self._n_looks += 1
        await self._follow_shares(now_s)
        for model in self.models:
            if not model.is_busy and now_s >= model.retry_at_s:
                model.is_busy = True
                looks.start_soon(self._attend, model, now_s)

    async def _attend(self, model: PlacedModel, now_s: float) -> None:
        began_s = trio.current_time()
        try:
            if model.withdrawn:
                await self._forget(model)
            else:
                await self._look_after(model)
                model.n_failures = 0
        except SwarmLLMError as error:
            model.state = error.message
            now_s += trio.current_time() - began_s
            model.retry_at_s = now_s + (RETRY_S if model.model_id or model.shared else 0.0)
            model.n_failures += 1
            log.info("placing %s failed: %s", model.name, error.message)
            if model.shared and not model.managed and model.n_failures >= FAILURES_MAX:
                log.info("placing %s: given up for now, after %d failures", model.name, model.n_failures)
                self._accepted.cannot_be_fetched(ModelId(model.name), now_s)
                model.retry_at_s = 0.0
        finally:
            model.is_busy = False

    async def _follow_shares(self, now_s: float) -> None:
        if self._to_share:
            await self._share_what_is_here()
        shared = self._accepted.follow(self._node_id, self._registry.working_nodes(), now_s)
        configured = {model.model_id: model for model in self.models if not model.shared}
        for model in [model for model in self.models if model.shared]:
            if (other := configured.get(ModelId(model.name))) is not None and not model.is_busy:
                other.managed = merge([*other.managed, *model.managed])
                self.models.remove(model)
                self._on_change()
                continue
            if model.name not in shared and not model.withdrawn:
                model.retry_at_s = 0.0
            model.withdrawn = model.name not in shared
            if model.withdrawn and model.fetching is not None:
                model.fetching.cancel()
        known = {model.name for model in self.models} | configured.keys()
        self.models += [PlacedModel(name, shared=True) for name in shared if name not in known]
        if self.takes_part:
            try:
                await self._learn_shapes(self._pool.models())
            except SwarmLLMError as error:
                # Of a loaded model whose file is gone, for example: nobody else's placement ends by it.
                log.info("what is loaded is not all counted: %s", error.message)
            if self._disk is not None:
                await self._disk.look()

    async def _share_what_is_here(self) -> None:
        for name in list(self._to_share):
            try:
                entry = await self._models.find(name)
            except SwarmLLMError as error:
                log.info("%s cannot be shared yet: %s", name, error.message)
                continue
            self._to_share.remove(name)
            self._configured_shares.add(entry.model_id)
            self._set_shares({entry.model_id: entry.name})

    def _set_shares(self, more: dict[ModelId, str]) -> None:
        shares = {share.model_id: share.name for share in self.shares or ()} | more
        self.shares = tuple(self._shared(m, name) for m, name in shares.items())[:SHARED_MAX]
        self._on_change()

    def _shared(self, model_id: ModelId, name: str) -> SharedModel:
        return SharedModel(model_id=model_id, name=name, source=self._book.sources.get(model_id, UNSET))

    async def share(
        self, entry: CatalogueEntry, source: PublishedName = NOT_PUBLISHED, *, is_permanent: bool = True
    ) -> None:
        """Ask the others to hold parts of it, now and, if it `is_permanent`, after each start; this node
        takes part itself. `source`: where its file is published; empty: as said before. Raises Conflict (too
        many are shared)."""
        shares = {share.model_id for share in self.shares or ()} | self._book.shared.keys()
        if entry.model_id not in shares and len(shares) + len(self._to_share) >= SHARED_MAX:
            raise Conflict(f"this node shares {SHARED_MAX} models already, and not more.", field="model")
        if is_permanent:
            self._book.shared[entry.model_id] = entry.name
            if source:
                self._book.sources[entry.model_id] = source
            await self._book.save()
        self._set_shares({entry.model_id: entry.name})
        self._wake.set()

    async def unshare(self, model_id: ModelId) -> None:
        """Those that hold parts of it for this share drop them. Raises Conflict (it is not shared by this
        node, or by its configuration)."""
        if model_id in self._configured_shares:
            raise Conflict("the configuration shares this model: see auto_manage.share.", field="model")
        if model_id not in {share.model_id for share in self.shares or ()}:
            raise Conflict("this node does not share this model.", field="model")
        self._book.shared.pop(model_id, None)
        self._book.sources.pop(model_id, None)
        await self._book.save()
        self.shares = tuple(share for share in self.shares or () if share.model_id != model_id)
        self._on_change()
        self._wake.set()

    def _sources(self, model_id: ModelId) -> Sources:
        """As the nodes say whose share this node follows."""
        records = self._registry.working_nodes()
        return tuple(
            (node_id, share.source)
            for node_id in sorted(self._accepted.seen_s.get(model_id, ()))
            if node_id != self._node_id and node_id in records
            for share in records[node_id].shares or ()
            if share.model_id == model_id and share.source
        )

    async def _forget(self, model: PlacedModel) -> None:
        """Drop what was loaded for a share that was withdrawn."""
        for layers in model.managed:
            for loaded in self._loaded_of(ModelId(model.name), layers):
                model.state = f"dropping {loaded}"
                await self._models.drop(await self._models.find(model.name), loaded)
            model.managed = subtract(model.managed, [layers])
        if self._projectors is not None:
            await self._projectors.forget(ModelId(model.name))
        if self._disk is not None:
            await self._disk.end(ModelId(model.name))
        # It may have been shared again meanwhile.
        if model.withdrawn and model in self.models:
            self.models.remove(model)
            self._on_change()

    def _loaded_of(self, model_id: ModelId, layers: LayerRange) -> tuple[LayerRange, ...]:
        """The parts of `layers` that are loaded."""
        return subtract([layers], subtract([layers], self._pool.loaded(model_id)))

    # What the swarm is told.

    @property
    def model_ids(self) -> tuple[ModelId, ...]:
        return tuple(sorted({model.model_id for model in self.models if model.model_id}))

    @property
    def takes_part(self) -> bool:
        """Whether anything is or may be placed here."""
        return bool(self.models or self.accepts or self.shares)

    @property
    def free_bytes(self) -> int:
        """Of the budget; layers that the user loaded count too, but not what a request loaded: it goes by
        itself, and the plan would follow its coming and going."""
        return self.own_room[0] if self.takes_part else 0

    @property
    def free_disk_bytes(self) -> int | UnsetType:
        """Of the budget for what has to be fetched; unset: there is none."""
        return UNSET if self._disk is None or not self.takes_part else self._disk.free_bytes

    def loading(self, model_id: ModelId) -> tuple[LayerRange, ...]:
        return next((model.loading for model in self.models if model.model_id == model_id), ())

    def fetched(self, model_id: ModelId) -> tuple[int, int] | UnsetType:
        """(bytes that have come, bytes in all) of what is being fetched; unset: nothing is."""
        model = next((model for model in self.models if model.model_id == model_id), None)
        return UNSET if model is None or model.fetching is None else model.arrived

    def pinned(self, model_id: ModelId) -> tuple[LayerRange, ...]:
        """Of what is loaded, what was not loaded here."""
        managed = [layers for m in self.models if m.model_id == model_id for layers in m.managed]
        return subtract(self._pool.loaded(model_id), managed)

    def loaded_by_hand(self, model_id: ModelId, layers: LayerRange) -> None:
        """A person wants them here: they are not this manager's to drop any more."""
        for model in self.models:
            if model.model_id == model_id:
                model.managed = subtract(model.managed, [layers])
        if self._disk is not None:
            self._disk.belongs_to_user(model_id)

    async def learn_shapes(self) -> None:
        """Of what is loaded, so that `own_room` counts it."""
        await self._learn_shapes(self._pool.models())

    def shape_of(self, model_id: ModelId) -> ModelShape | None:
        """None: it was not looked at yet."""
        return self._shapes.get(model_id)

    @property
    def max_pipes(self) -> int | None:
        return self._max_pipes

    @property
    def own_room(self) -> tuple[int, int]:
        """(bytes of memory, bytes of disk) that are left of the budgets, whether or not this node takes
        part in anything yet."""
        gpu_bytes, gpu_free_bytes = self._pool.gpus.room if self._counts_gpus else (0, 0)
        memory_bytes = max(0, self._budget_bytes + gpu_bytes - self._used_bytes())
        if (free_bytes := self._pool.free_bytes()) is not None:
            # In steps: what other programs take from one moment to the next is no news for the plan.
            free_bytes += gpu_free_bytes
            memory_bytes = min(memory_bytes, free_bytes // FREE_STEP_BYTES * FREE_STEP_BYTES)
        return memory_bytes, 2**62 if self._disk is None else self._disk.free_bytes

    async def _learn_shapes(self, model_ids: Iterable[ModelId]) -> None:
        for model_id in list(model_ids):
            if model_id not in self._shapes:
                self._shapes[model_id] = shape_of((await self._models.find(model_id)).manifest)

    def _used_bytes(self) -> int:
        placed = self.model_ids
        held = {
            model_id: list(ranges)
            for model_id, ranges in self._pool.models().items()
            if model_id in placed or not self.is_on_demand(model_id)
        }
        for model in self.models:
            if model.model_id and model.loading:
                held.setdefault(model.model_id, []).extend(model.loading)
        projectors = self._projectors.used_bytes if self._projectors is not None else 0
        return projectors + sum(
            self._shapes[model_id].n_bytes(layers)
            for model_id, ranges in held.items()
            if model_id in self._shapes
            for layers in merge(ranges)
        )

    async def _look_after(self, model: PlacedModel) -> None:
        entry = await self._models.find(model.name)
        await self._learn_shapes((entry.model_id, *self._pool.models()))
        if model.model_id != entry.model_id:
            model.model_id = entry.model_id
            self._on_change()
        shape = self._shapes[entry.model_id]
        records = self._registry.working_nodes()
        own = records.get(self._node_id)
        ready = ready_layers(entry.model_id, records)
        if not ready and self._n_looks > FAMILIAR_LOOKS:
            model.is_new = model.shared
        elif covers(ready, entry.manifest.whole):
            model.is_new = False
        if own is None or model.model_id not in own.capability.placed_models:
            model.state, model.begins = "telling the swarm", model.shared
            return
        # With hundreds of nodes this takes tens of milliseconds, which nobody else need wait for.
        writers = self._accepted.seen_s.get(entry.model_id, {})
        is_first = model.shared and (model.is_new or not ready)
        is_first = is_first and all_take_part(entry.model_id, records, writers.keys())
        make_plan = partial(plan_of, entry.manifest, records, self._max_pipes)
        plan = await trio.to_thread.run_sync(partial(make_plan, is_first=is_first))
        if is_first and not is_followed(entry.model_id, records, plan):
            plan = await trio.to_thread.run_sync(make_plan)
            model.is_new, is_first = False, not ready
        model.target = plan.targets[self._node_id]
        held = self._pool.loaded(entry.model_id)
        others = self._registry.held(entry.model_id).items()
        elsewhere = [layers for node_id, ranges in others if node_id != self._node_id for layers in ranges]
        pinned = self.pinned(entry.model_id)
        step = next_step(held, model.target, pinned, elsewhere, self.free_bytes, shape)
        model.begins = model.shared and not held and step.load is not None
        if step.load is None and step.drop is None:
            if is_first and ready:
                self._wait_for_others(model, records)
            model.hysteresis.forget()
            model.state = f"waits for {step.waits_for}" if step.waits_for else "as planned"
            if self._projectors is not None and not step.waits_for:
                await self._projectors.look_after(entry, records)
            return
        if not model.hysteresis.see((model.target, step)) and not is_first:
            what = f"load {step.load}" if step.load is not None else f"drop {step.drop}"
            model.state = f"about to {what} (look {model.hysteresis.n_seen} of {CONSISTENT_TICKS})"
            return
        model.hysteresis.forget()
        if step.load is not None:
            await self._take(model, entry, step.load)
        elif step.drop is not None:
            model.state = f"dropping {step.drop}"
            log.info("placing %s: dropping %s, others have it", model.name, step.drop)
            try:
                await self._models.drop(entry, step.drop)
            finally:
                # What a failed drop leaves here is still for this manager to move.
                gone = subtract([step.drop], self._pool.loaded(entry.model_id))
                model.managed = subtract(model.managed, gone)

    def _wait_for_others(self, model: PlacedModel, records: Mapping[NodeId, NodeRecord]) -> None:
        """The rest of it is for others to load, by its first plan. One of them may follow the usual plan,
        which gives that rest to this node; so the first plan counts as long as somebody loads by it."""
        said = (each for record in records.values() for each in record.models)
        is_loaded = any(each.loading for each in said if each.model_id == model.model_id)
        model.n_idle_looks = 0 if is_loaded else model.n_idle_looks + 1
        if model.n_idle_looks >= CONSISTENT_TICKS:
            model.is_new, model.n_idle_looks = False, 0

    async def _take(self, model: PlacedModel, entry: CatalogueEntry, layers: LayerRange) -> None:
        model.state, model.loading = f"loading {layers}", (layers,)
        log.info("placing %s: loading %s", model.name, layers)
        self._on_change()
        try:
            if not await self._bring(model, entry, layers):
                return
            model.state = f"loading {layers}"
            await self._models.hold(entry, layers)
            model.managed = merge([*model.managed, layers])
            model.state = "loaded"
            self._accepted.was_fetched(entry.model_id)
        finally:
            model.loading, model.arrived = (), (0, 0)
            self._on_change()

    async def _bring(self, model: PlacedModel, entry: CatalogueEntry, layers: LayerRange) -> bool:
        """Fetch what `layers` need within the budget for the disk; False: there is no room, or the share was
        withdrawn meanwhile."""
        placed = {each.model_id for each in self.models if each.model_id}
        if self._disk is not None:
            if not await self._disk.make_room(entry, layers, keep={*placed, *self._pool.models()}):
                model.state = f"waits for disk space for {layers}"
                return False
            await self._disk.begin(entry)

        def arrived(done_bytes: int, total_bytes: int) -> None:
            model.arrived = (done_bytes, total_bytes)

        arriving = nullcontext() if self._disk is None else self._disk.arriving(entry, layers)
        with arriving, trio.CancelScope() as model.fetching:
            try:
                model.state = f"fetching {layers}"
                await self._models.fetch(entry, layers, arrived, self._sources(entry.model_id))
            finally:
                model.fetching = None
        return not model.withdrawn
