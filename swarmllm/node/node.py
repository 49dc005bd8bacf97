"""Joins the parts of a running node into the one object behind the HTTP API.

The node joins the packages below it (catalogue, worker pool, registry, pipelines) into the operations of the
API, and announces changes of its layers to the swarm. Requests of this node's users pass through `Admission`
first; requests that other nodes send through our layers do not, those are bounded where they arrive.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from swarmllm.config import Config
from swarmllm.downloads import Downloads, SharedDigests
from swarmllm.downloads.published_files import PublishedFiles
from swarmllm.downloads.settings import from_environment
from swarmllm.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    StoreLocked,
    SwarmLLMError,
)
from swarmllm.loop_watchdog import LoopWatchdog
from swarmllm.models import Catalogue, CatalogueEntry, LayerRange, needed_tensors
from swarmllm.models.layers import subtract
from swarmllm.models.manifest import is_text_encoder
from swarmllm.models.projector_store import ProjectorStore
from swarmllm.models.segment_copies import SEGMENTS, SegmentCopies
from swarmllm.node.admission import Admission
from swarmllm.node.announcing.announcer import Announcer
from swarmllm.node.announcing.capability import describe
from swarmllm.node.data_dir import DOWNLOADS, PROJECTORS
from swarmllm.node.embeddings import Embeddings
from swarmllm.node.joining import Joining
from swarmllm.node.metrics import Metrics
from swarmllm.node.model_access import unseen
from swarmllm.node.model_keeper import ModelKeeper
from swarmllm.node.on_demand import FOREVER_S, OnDemand
from swarmllm.node.placing.auto_shard import AutoShardManager
from swarmllm.node.placing.disk import PlacingDisk, disk_budget_bytes
from swarmllm.node.placing.projectors import ProjectorPlacing
from swarmllm.node.placing.share_book import ShareBook
from swarmllm.node.projectors import ProjectorKeeper
from swarmllm.node.provisioning import ModelProvisioner
from swarmllm.node.remembered_loads import LoadRestorer, RememberedLoads
from swarmllm.node.sharing.file_followers import Followers
from swarmllm.node.sharing.file_shares import FileShares
from swarmllm.node.sharing.sharing import Sharing
from swarmllm.node.tokenization import Texts
from swarmllm.node.user_requests import UserRequests
from swarmllm.node.views import PeerLookup, PeerView, Readiness, RequestCounts
from swarmllm.pictures import MediumName
from swarmllm.pipeline.origin.generation import Generation, Prompt
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.stage.served import Served
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.scheduling.plan import Plan
from swarmllm.scheduling.speeds import Observations
from swarmllm.scheduling.tiers import LOCAL, Caller, tier_caps
from swarmllm.supervision import current as current_supervision
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import DhtStatistics, PortMappingState, Reachability, Router
from swarmllm.transfer import ModelTransfer, TransferStatistics
from swarmllm.workerpool import LoadOptions, WorkerPool, WorkerStatistics
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import Gpu, Sampling
from swarmllm_proto.swarm import NodeCapability, ProjectorAnnounce

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("swarmllm.node")

MAX_TOKENS = 2**20
JOINING_S = 30.0
"""How long after the start a model that others have is waited for."""
LOOK_AGAIN_S = 0.25
TIDY_S = 60.0
"""Between two looks at copies of layers that nobody may use any more."""
ENDING_S = 5.0
"""How long requests that are ended before the node stops may take to tell other nodes."""
HANDED_OVER_S = 5.0
"""How long what requests have left here is kept at most for those that have gone elsewhere."""
GIVING_UP_S = 10.0
"""How long layers stay at most that are to be unloaded, while requests that use them go elsewhere."""
QUIET_S = 1.0
"""Nobody has fetched KV for so long: whoever wanted any has it."""
T = TypeVar("T")
Progress = Callable[[int, int], None]


class Node:
    def __init__(
        self,
        config: Config,
        *,
        router: Router,
        registry: Registry,
        pool: WorkerPool,
        catalogue: Catalogue,
        pipelines: Pipelines,
        transfer: ModelTransfer,
        gathering: SharedDigests,
        observations: Observations | None = None,
        trust: Trust | None = None,
        remembered: RememberedLoads | None = None,
        watchdog: LoopWatchdog | None = None,
        book: ShareBook | None = None,
        is_private: bool = False,
    ) -> None:
        """`book`: what was shared by command, and fetched for others' shares. `is_private`: the swarm has a
        key."""
        inference = config.inference
        self.nickname = config.nickname
        self.copies = SegmentCopies(config.data_dir / SEGMENTS, config.store.segment_cache_gib)
        self.admission = Admission(
            tier_caps(inference.max_concurrent_requests, inference.n_slots),
            inference.max_queued_requests,
            inference.queue_timeout_s,
        )
        self.config = config
        self.watchdog = watchdog or LoopWatchdog()
        self.supervision = current_supervision()
        self._router = router
        self._registry = registry
        self._pool = pool
        self._catalogue = catalogue
        self._pipelines = pipelines
        self._transfer = transfer
        remembered = remembered or RememberedLoads()
        downloads = from_environment(os.environ, config.downloads)
        published_files = PublishedFiles(downloads)
        self.models = ModelKeeper(
            catalogue,
            pool,
            transfer,
            registry,
            gathering,
            remembered,
            ProjectorKeeper(catalogue, pool, transfer, ProjectorStore(config.data_dir / PROJECTORS)),
            published_files,
            self,
        )
        self.downloads = Downloads(
            config.data_dir / DOWNLOADS,
            transfer,
            downloads,
            gathering=gathering,
            models=self.models,
            projectors=self.models,
            published_files=published_files,
        )
        self.models.by_hand = self._chosen_by_hand
        self._restoring = LoadRestorer(remembered, pool, self.models)
        self.peer_lookup = PeerLookup(router, registry, trust or Trust())
        self._observations = observations or Observations()
        book = book or ShareBook()
        disk = PlacingDisk(disk_budget_bytes(config.auto_manage), book, self.models)
        projectors = ProjectorPlacing(
            router.node_id, self.models, n_wanted=config.auto_manage.projector_holders
        )
        self.models.projector_by_hand = projectors.belongs_to_user
        self.placing = AutoShardManager(
            config.auto_manage,
            node_id=router.node_id,
            registry=registry,
            pool=pool,
            models=self.models,
            on_change=self.holdings_changed,
            disk=disk,
            book=book,
            projectors=projectors,
            is_private=is_private,
        )
        joining = Joining(router, registry, meets_others=self._meets_others)
        self.sharing = Sharing(self.placing, registry, router.node_id, models=self.models, joining=joining)
        self.provisioner = ModelProvisioner(self.models, pool, self.sharing)
        self.on_demand = OnDemand(_DemandedModels(self))
        self.models.give_up = self.on_demand.give_up
        self.placing.is_on_demand = self.on_demand.has_loaded
        self.file_shares = FileShares(
            router.node_id,
            registry=registry,
            downloads=self.downloads,
            gathering=gathering,
            sharing=self.sharing,
            followers=Followers(
                downloads=self.downloads,
                gathering=gathering,
                disk=disk,
                book=book,
                on_change=self.holdings_changed,
            ),
            accept=self.placing.accepts,
            book=book,
            nicknames=self,
            on_change=self.holdings_changed,
        )
        self._announcer = Announcer(
            config.nickname,
            router=router,
            registry=registry,
            pool=pool,
            catalogue=catalogue,
            transfer=transfer,
            observations=self._observations,
            describe=self._describe,
            placing=self.placing,
            files=self.file_shares,
            models=self.models,
        )
        self.started_at = self._announcer.started_at
        self._readiness = Readiness("starting", "loading models")
        self.metrics = Metrics(self)
        self.requests = UserRequests(self.metrics, self._announcer.work_began)
        pipelines.on_work = self._announcer.work_began
        self.texts = Texts(pool, pipelines.prompts, self)
        self.embeddings = Embeddings(
            pool,
            pipelines,
            self.admission,
            self.requests,
            self,
            router.node_id,
        )

    def configure(self, config: Config) -> None:
        """Take over what may change while it runs."""
        self.config = config
        self.admission.timeout_s = config.inference.queue_timeout_s
        self.downloads.configure(from_environment(os.environ, config.downloads))

    @property
    def node_id(self) -> NodeId:
        return self._router.node_id

    @property
    def counts(self) -> RequestCounts:
        return self.requests.counts

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._router.addresses

    @property
    def reachability(self) -> Reachability | None:
        return self._router.reachability

    @property
    def port_mapping(self) -> PortMappingState:
        return self._router.port_mapping

    def readiness(self) -> Readiness:
        if self.admission.is_closed:
            return Readiness("stopping", "the node finishes what runs, and stops")
        if self._readiness.status == "ready" and (missing := self._restoring.missing()):
            return Readiness("failed", missing)
        return self._readiness

    def peers(self) -> tuple[PeerView, ...]:
        return self.peer_lookup.peers()

    def pipeline_statistics(self) -> PipelineStatistics:
        return self._pipelines.statistics()

    def served(self) -> tuple[Served, ...]:
        """What this node computed for others in the last minutes."""
        return self._pipelines.served()

    def served_tokens(self) -> Mapping[ModelId, int]:
        """By model, for all other nodes together, since the start."""
        return self._pipelines.served_tokens()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self._pool.gpus.seen

    def worker_statistics(self) -> tuple[WorkerStatistics, ...]:
        return self._pool.statistics()

    def travel_statistics(self) -> TransferStatistics:
        return self._transfer.statistics()

    def dht_statistics(self) -> DhtStatistics | None:
        return self._transfer.seeking()

    async def start(self) -> None:
        """Load what the configuration names, then what was loaded by hand when the daemon ended.

        Raises ConfigError for an entry of the configuration that cannot be meant (no such model, layers it
        does not have); any other load that fails is logged and leaves the node running, not ready.
        """
        wanted = [await self._configured(text) for text in self.config.model.load]
        failures: list[str] = []
        for entry, layers in wanted:
            try:
                await self._retry_until_known(partial(self.models.hold, entry, layers))
            except SwarmLLMError as error:
                log.error(  # noqa: TRY400 (the message says it all)
                    "loading %s %s failed: %s", entry.name, layers, error.message
                )
                failures.append(f"{entry.name} {layers}: {error.message}")
                self._readiness = Readiness("failed", "; ".join(failures))
        if self.config.model.restore:
            await self._restoring.run(self._retry_until_known)
            await self.models.restore_projectors()
        if not failures:
            self._readiness = Readiness("ready")

    async def keep_trying(self) -> None:
        """Beside `start` and after it: what was loaded by hand and could not be loaded again yet."""
        await self._restoring.keep_trying()

    @asynccontextmanager
    async def generate(
        self,
        model: str,
        prompt: Prompt,
        sampling: Sampling,
        max_tokens: int | None,
        caller: Caller = LOCAL,
        request_id: str = "",
        keep_alive_s: float | None = None,
    ) -> AsyncIterator[Generation]:
        """One request of a user of this node. `max_tokens` None: until the context is full. `request_id`
        names it on every node; without one it gets a new one. `keep_alive_s`: how long the model stays
        afterwards if it was loaded on demand; None: as the name's preset or the configuration says.

        Leaving early cancels it on every node. Raises ModelNotFound, BadModel, Overloaded, NoPipeline,
        ContextFull, and what pipelines raise.
        """
        entry = await self._generating(model)
        # Pipelines shorten it to what the context leaves.
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens or MAX_TOKENS)
        with self.requests.under_way(entry.name, request_id) as request:
            async with self.loaded(entry, model, keep_alive_s), self.admission.turn(caller) as queue_s:
                request.has_turn()
                entry = await self._as_origin(entry)
                async with self._pipelines.generate(
                    prompt, entry, sampling, request_id=request.id, queue_s=queue_s
                ) as generation:
                    self.requests.first_token(request, generation)
                    yield generation

    async def require_encoder(self, model: str, field: str, needs: Collection[MediumName]) -> None:
        """For a request with pictures or sounds, the first of them at `field`. Raises ModelNotFound,
        InvalidRequest where the model does not take them, and VisionEncoderUnavailable where no projector for
        it can be used now."""
        entry = await self.models.find(model)
        await self._pipelines.encoders.require(entry, field, needs)

    @asynccontextmanager
    async def loaded(
        self, entry: CatalogueEntry, name: str, keep_alive_s: float | None = None
    ) -> AsyncIterator[None]:
        """For the time of a request to `name`: the model is loaded here if nobody else can run it and this
        node can. Raises what loading raises."""
        preset = await self.models.presets.get(name)
        configured_s = self.config.model.keep_alive_s if preset.keep_alive_s is None else preset.keep_alive_s
        keep_s = FOREVER_S if configured_s < 0 else configured_s
        async with self.on_demand.using(entry, LoadOptions(n_ctx=preset.context), keep_s, keep_alive_s):
            yield

    @property
    def _meets_others(self) -> bool:
        network = self.config.network
        return bool(network.bootstrap or network.bootstrap_file)

    def may_load_on_demand(self) -> bool:
        """Right after the start the nodes that hold a model may not be connected yet."""
        joining_until = self.started_at + (JOINING_S if self._meets_others else 0)
        return self.config.model.on_demand and time.time() >= joining_until

    async def tidy_copies(self) -> None:
        """Now and then, until cancelled."""
        while True:
            await trio.to_thread.run_sync(self.copies.tidy)
            await trio.sleep(TIDY_S)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the swarm informed of holdings, load and speed; started once it knows this node."""
        await self._announcer.run(task_status=task_status)

    async def drain(self, limit_s: float) -> None:
        """Before the node stops: take no new requests, tell the swarm that no layers are ready here, and wait
        until the requests of this node's users and those of other nodes that use its layers have ended, or
        gone elsewhere and taken what was computed here. After `limit_s` seconds the former end with
        NodeStopping, and the latter go on over other nodes."""
        self.admission.close()
        with trio.move_on_after(limit_s):
            try:
                await self._announcer.leave()
            except SwarmLLMError as error:
                log.warning("the swarm is not told that this node stops: %s", error.message)
            await self.admission.wait_empty()
            while self._pipelines.statistics().active_stage_requests:  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(LOOK_AGAIN_S)
            with trio.move_on_after(HANDED_OVER_S):
                while self._pipelines.are_layers_in_use():  # noqa: ASYNC110
                    await trio.sleep(LOOK_AGAIN_S)
                await self._kept_kv_is_taken()
        self.admission.end_all()
        with trio.move_on_after(ENDING_S):
            await self.admission.wait_empty()

    async def measure(self, file: Path) -> None:
        """Learn how fast this machine is, from `file` or by a probe of a second."""
        await self._announcer.measure(file)

    async def plan(self, model: str, request: RequestSize) -> tuple[str, Plan]:
        """The model's name, and the route that such a request would take now. Raises ModelNotFound,
        BadModel, NoPipeline."""
        entry = await trio.to_thread.run_sync(self._catalogue.resolve, model)
        return entry.name, await self._pipelines.plan(entry, request)

    def nickname_of(self, node_id: NodeId) -> str:
        if node_id == self.node_id:
            return self.nickname
        record = self._registry.node(node_id)
        return record.nickname if record is not None else ""

    def nickname_in_log(self, node_id: str) -> str:
        return self.nickname_of(NodeId(node_id))

    def model_name_in_log(self, model_id: str) -> str:
        return self._catalogue.names.get(ModelId(model_id), "")

    def _chosen_by_hand(self, model_id: ModelId, loaded: LayerRange | None) -> None:
        self.on_demand.forget(model_id)
        if loaded is not None:
            self.placing.loaded_by_hand(model_id, loaded)

    def holdings_changed(self) -> None:
        """For the pool: layers came or went, perhaps long after the request for it has ended."""
        self._announcer.look()

    def encoders_of(
        self, model_id: ModelId, entry: CatalogueEntry | None
    ) -> Mapping[NodeId, ProjectorAnnounce]:
        """Other nodes that encode pictures or sounds for a model; `entry`: what this node knows of it."""
        return self._pipelines.encoders.elsewhere(model_id, entry)

    async def publish(self) -> None:
        """Tell the swarm what this node holds and how it fares, if that has changed."""
        await self._announcer.publish()

    async def _kept_kv_is_taken(self) -> None:
        """Until nobody fetches any for QUIET_S. Nobody says beforehand who will."""
        before = -1
        while self._pipelines.may_hand_over() and self._pipelines.statistics().prefix_given_bytes != before:
            before = self._pipelines.statistics().prefix_given_bytes
            await trio.sleep(QUIET_S)

    @asynccontextmanager
    async def giving_up(self, model_id: ModelId, layers: LayerRange) -> AsyncIterator[None]:
        """Around an unload of layers: the swarm hears that they are not here any more, and where other nodes
        hold them, requests that use them may go there first, for GIVING_UP_S at most."""
        with self._announcer.giving_up(model_id, layers):
            others = (
                each
                for node_id, ranges in self._registry.held(model_id).items()
                if node_id != self.node_id
                for each in ranges
            )
            in_use = partial(self._pipelines.are_layers_in_use, model_id, layers)
            if self._pipelines.may_hand_over() and not subtract([layers], others):
                await self.publish()
                with trio.move_on_after(GIVING_UP_S):
                    while in_use():  # noqa: ASYNC110 (nobody tells)
                        await trio.sleep(LOOK_AGAIN_S)
                    await self._kept_kv_is_taken()
            yield

    async def model_for_embeddings(self, model: str) -> CatalogueEntry:
        """The model, with what embedding a text takes: of one that encodes whole texts all of it."""
        entry = await self.models.find(model)
        if not is_text_encoder(entry.manifest):
            return await self.model_for_texts(model)
        return await self._transfer.ensure(entry, entry.manifest.whole, unseen)

    async def _generating(self, model: str) -> CatalogueEntry:
        """Raises InvalidRequest for a model that generates no text, and what finding it raises."""
        entry = await self.models.find(model)
        if is_text_encoder(entry.manifest):
            raise InvalidRequest(
                f"{entry.name} encodes whole texts (/v1/embeddings, /v1/rerank) and generates none.",
                field="model",
            )
        return entry

    async def _as_origin(self, entry: CatalogueEntry) -> CatalogueEntry:
        """The model, with what reading and embedding a prompt takes: fetched once somebody can run it."""
        if entry.is_stored:
            # It may have come meanwhile.
            entry = await self.models.find(entry.model_id)
        if entry.is_stored and entry.absent(needed_tensors(entry.manifest, origin=True)):
            await self._pipelines.stages_for(entry)
            entry = await self._transfer.ensure(entry, None, unseen, origin=True)
        return entry

    async def model_for_texts(self, model: str) -> CatalogueEntry:
        entry = await self._generating(model)
        # Its header says all that texts take; the rest comes when the request loads it.
        return entry if self.on_demand.is_wanted(entry) else await self._as_origin(entry)

    async def _retry_until_known(self, act: Callable[[], Awaitable[T]]) -> T:
        """Right after the start, who has what is needed may not be connected yet."""
        until_s = trio.current_time() + (JOINING_S if self._meets_others else 0)
        while True:
            try:
                return await act()
            except StoreLocked as error:
                log.warning("loading has to wait: %s", error.message)
            except (ModelNotFound, NodeUnreachable):
                if trio.current_time() >= until_s:
                    raise
            await trio.sleep(LOOK_AGAIN_S)

    async def _configured(self, text: str) -> tuple[CatalogueEntry, LayerRange]:
        try:
            return await self._retry_until_known(partial(self._wanted, text))
        except SwarmLLMError as error:
            raise ConfigError(f"model.load {text}: {error.message}", field="model.load") from error

    async def _wanted(self, text: str) -> tuple[CatalogueEntry, LayerRange]:
        name, colon, layers = text.partition(":")
        return await self.models.resolve(name, layers if colon else None)

    def _describe(self) -> NodeCapability:
        stage_requests = self._pipelines.statistics().active_stage_requests
        return describe(
            self._observations,
            self._router.peers(),
            self.admission,
            stage_requests,
            self._pipelines.room(),
            self.placing.model_ids,
            self.placing.free_bytes,
            self.placing.free_disk_bytes,
            self.placing.accepts,
            commits=self._pipelines.commits,
            gpus=self._pool.gpus.seen,
        )


class _DemandedModels:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._pool = node._pool
        self._pipelines = node._pipelines
        self._keeper = node.models

    def loaded(self, model_id: ModelId) -> tuple[LayerRange, ...]:
        return self._pool.loaded(model_id)

    def can_bring(self, entry: CatalogueEntry) -> bool:
        return self._node.provisioner.can_bring(entry)

    def lacks_room(self, entry: CatalogueEntry) -> bool:
        return self._node.provisioner.lacks_room(entry)

    async def fetch(self, entry: CatalogueEntry) -> None:
        await self._node.provisioner.fetch(entry)

    async def load_whole(self, entry: CatalogueEntry, options: LoadOptions) -> None:
        await self._node.provisioner.load(entry, options)

    async def spread_out(self, entry: CatalogueEntry) -> bool:
        return await self._node.provisioner.spread_out(entry)

    def is_spread(self, model_id: ModelId) -> bool:
        return model_id in self._node.provisioner.spread

    async def drop_whole(self, entry: CatalogueEntry) -> None:
        await self._node.provisioner.let_go(entry)

    def is_complete(self, entry: CatalogueEntry) -> bool:
        return self._keeper.is_complete(entry)

    def is_managed(self, model_id: ModelId) -> bool:
        return model_id in self._node.placing.model_ids and not self.is_spread(model_id)

    def may_load(self) -> bool:
        return self._node.may_load_on_demand()

    def used_by_others_s(self, model_id: ModelId) -> float:
        return self._pipelines.used_by_others_s(model_id)
