"""Announces this node to the swarm: its layers, its load and its speed.

One record, which this node alone writes. It is published when something in it has changed (see `capability`):
holdings are compared when a part of the node reports a change, load and speed now and then (see
`look_times`).

It announces a bounded part of the workers' kept KV, of models that run here whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio
from msgspec import UNSET, UnsetType

from swarmllm import __version__
from swarmllm.errors import BadModel, StoreLocked
from swarmllm.models import Catalogue, CatalogueEntry, LayerRange
from swarmllm.models.layers import subtract
from swarmllm.models.manifest import MMPROJ_INDEX
from swarmllm.node.announcing.capability import float_among, load_has_changed, machine_speed, steady
from swarmllm.node.announcing.look_times import SPEAK_S, LookTimes
from swarmllm.node.announcing.record_changes import RecordChanges
from swarmllm.node.model_access import KnowsNewModels
from swarmllm.node.placing.auto_shard import AutoShardManager
from swarmllm.node.sharing.file_shares import FileShares
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.records.prefix_index import NODE_PREFIXES_MAX
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm.transfer import ModelTransfer
from swarmllm.workerpool import WorkerPool
from swarmllm_proto.codec import encode_record
from swarmllm_proto.identifiers import Digest, ModelId
from swarmllm_proto.ipc import KvType
from swarmllm_proto.node_load import encode_load, load_of
from swarmllm_proto.swarm import (
    MODEL_RANGES_MAX,
    RECORD_MODELS_MAX,
    RECORD_RANGES_MAX,
    FetchedFile,
    FileAnnounce,
    KeptPrefix,
    NodeCapability,
    NodeRecord,
    PrefixCacheAnnounce,
    ProjectorAnnounce,
    ShardAnnounce,
    SharedFile,
    SharedModel,
)
from swarmllm_proto.swarm.base import PREFIX_MODELS_MAX
from swarmllm_proto.swarm.vision import RECORD_PROJECTORS_MAX

if TYPE_CHECKING:
    from trio_typing import TaskStatus


def prefix_announcements(
    kept: Mapping[ModelId, tuple[KeptPrefix, ...]], ready: Iterable[ShardAnnounce]
) -> tuple[PrefixCacheAnnounce, ...]:
    """`kept`: by model id, the most recently used first. Where there are too many, every model has an equal
    share of the room."""
    whole = [model.model_id for model in ready if model.ranges == ((0, model.n_layers),)]
    told = [model_id for model_id in whole if kept.get(model_id)][:PREFIX_MODELS_MAX]
    if not told:
        return ()
    n_each = NODE_PREFIXES_MAX // len(told)
    return tuple(
        PrefixCacheAnnounce(model_id=model_id, prefixes=kept[model_id][:n_each]) for model_id in told
    )


def within_limits(
    ready: Iterable[ShardAnnounce], files: Iterable[FileAnnounce]
) -> tuple[tuple[ShardAnnounce, ...], tuple[FileAnnounce, ...]]:
    """As many as one record may have: first what is ready to run, in the order in which it comes."""
    left = RECORD_RANGES_MAX
    models: list[ShardAnnounce] = []
    for model in islice(ready, RECORD_MODELS_MAX):
        if (n_ranges := len(model.ranges) + len(model.loading) + len(model.pinned)) <= left:
            left -= n_ranges
            models.append(model)
    told: list[FileAnnounce] = []
    for file in islice(files, RECORD_MODELS_MAX):
        if len(file.layers) <= left:
            left -= len(file.layers)
            told.append(file)
    return tuple(models), tuple(told)


log = logging.getLogger(__name__)

SOFTWARE = f"swarmllm/{__version__}"
Holdings = tuple[
    tuple[ShardAnnounce, ...],
    tuple[FileAnnounce, ...],
    tuple[PrefixCacheAnnounce, ...],
    tuple[SharedModel, ...] | UnsetType,
    tuple[ProjectorAnnounce, ...] | UnsetType,
    tuple[SharedFile, ...] | UnsetType,
    tuple[FetchedFile, ...] | UnsetType,
]
"""(layers ready to run, files to give, prompts' beginnings whose KV is kept, models that are shared,
projectors, files that are shared, files of which parts are fetched)"""


class Announcer:
    def __init__(
        self,
        nickname: str,
        *,
        router: Router,
        registry: Registry,
        pool: WorkerPool,
        catalogue: Catalogue,
        transfer: ModelTransfer,
        observations: Observations,
        describe: Callable[[], NodeCapability],
        placing: AutoShardManager,
        files: FileShares,
        models: KnowsNewModels,
    ) -> None:
        self.started_at = time.time()
        self._nickname = nickname
        self._router = router
        self._registry = registry
        self._pool = pool
        self._catalogue = catalogue
        self._transfer = transfer
        self._observations = observations
        self._describe = describe
        self._placing = placing
        self._files = files
        self._models = models
        self._leaves = False
        self._given_up: list[tuple[ModelId, LayerRange]] = []
        """Layers that are loaded here, but not for long."""
        self._sequence = 0
        self._published: Holdings | None = None
        self._changes = RecordChanges()
        self._times = LookTimes()
        self._woken = trio.Event()
        self._publishing = trio.Lock()

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the swarm informed; started once it knows this node."""
        await self._publish_when_possible()
        task_status.started()
        self._looked(is_whole=True, has_changed=True)
        while True:
            with trio.move_on_at(self._times.next_s(trio.current_time())):
                await self._woken.wait()
            self._woken = trio.Event()
            now = trio.current_time()
            if now < self._times.next_s(now):
                continue
            if not self._times.is_whole_due(now):
                means = self._changes.of_work(self._describe())
                if means == "load":
                    await self._publish_load()
                if means in ("load", "nothing"):
                    self._looked(is_whole=False, has_changed=means == "load")
                    continue
            self._observations.floating = float_among(
                self._router.node_id, self._observations.floating, self._router.peers(), self._registry
            )
            self._observations.place.move(self._observations.floating)
            # What changes from here on is for the next look.
            self._looked(is_whole=True, has_changed=False)
            if await self._publish_when_possible():
                self._looked(is_whole=False, has_changed=True)

    def _looked(self, *, is_whole: bool, has_changed: bool) -> None:
        told = self._changes.told
        is_working = bool(told.active_requests or told.stage_requests or told.queued_requests)
        self._times.looked(
            trio.current_time(), is_whole=is_whole, has_changed=has_changed, is_working=is_working
        )

    async def _publish_when_possible(self) -> bool:
        """Returns what `publish` does."""
        while True:
            try:
                return await self.publish()
            except StoreLocked as error:
                log.warning("the swarm is told later what is held here: %s", error.message)
                await trio.sleep(SPEAK_S)

    async def measure(self, file: Path) -> None:
        """Learn how fast this machine is, from `file` or by a probe of a second, and which GPUs it has."""
        self._observations.machine = await trio.to_thread.run_sync(machine_speed, file)
        await self._pool.gpus.look()
        self.look()

    def look(self) -> None:
        """Something may have changed: compare now, not only in a few seconds."""
        self._times.at_once()
        self._woken.set()

    def work_began(self) -> None:
        """A request of this node's users, or of another node, is taken up: compare every second."""
        if self._times.work_began(trio.current_time()):
            self._woken.set()

    async def leave(self) -> None:
        """Tell the swarm that no layers are ready here, so that no new request is planned over them."""
        self._leaves = True
        await self.publish()

    @contextmanager
    def giving_up(self, model_id: ModelId, layers: LayerRange) -> Iterator[None]:
        """In the block, these layers are not announced, though they are loaded."""
        given_up = model_id, layers
        self._given_up.append(given_up)
        try:
            yield
        finally:
            self._given_up.remove(given_up)

    async def publish(self) -> bool:
        """Tell the swarm what this node holds and how it fares, if that has changed. One at a time: the last
        word is the newest. Returns whether there is a sign of work in it: round trips change without.
        """
        async with self._publishing:
            holdings = await self._holdings()
            capability = self._describe()
            means = self._changes.of_all(capability, trio.current_time())
            is_of_work = holdings != self._published or self._changes.of_work(capability) != "nothing"
            told = steady(self._changes.told, capability)
            if means == "record" or self._published is None or _is_for_everybody(self._published, holdings):
                await self._router.publish(self._next_record(holdings, told))
                self._record_published(holdings, told)
            elif means in ("speeds", "links", "settled") or holdings != self._published:
                await self._publish_details(holdings, told, soon=means == "speeds")
                if means == "settled":
                    self._changes.load_settled()
            elif means == "load":
                await self._tell_load(capability)
            return is_of_work

    async def _publish_details(self, holdings: Holdings, capability: NodeCapability, *, soon: bool) -> None:
        # A heartbeat that tells the load says that there are new details, too.
        has_load = load_has_changed(self._changes.told, capability)
        record = self._next_record(holdings, capability)
        if await self._router.publish_details(record, soon=soon and not has_load):
            self._record_published(holdings, capability)
            return
        self._published = holdings
        self._changes.details_published(capability)
        if has_load:
            await self._tell_load(capability)

    def _next_record(self, holdings: Holdings, capability: NodeCapability) -> bytes:
        self._sequence += 1
        return encode_record(self._record(holdings, capability))

    def _record_published(self, holdings: Holdings, capability: NodeCapability) -> None:
        ready, files, *_ = holdings
        names = {each.model_id: each.name for each in ready} | {f.model_id: f.name for f in files}
        self._transfer.announce_far(names.items())
        self._published = holdings
        self._changes.record_published(capability)

    async def _publish_load(self) -> None:
        async with self._publishing:
            await self._tell_load(self._describe())

    async def _tell_load(self, capability: NodeCapability) -> None:
        await self._router.publish_load(encode_load(load_of(capability)))
        self._changes.load_published(capability, trio.current_time())

    async def _holdings(self) -> Holdings:
        entries = {entry.model_id: entry for entry in await trio.to_thread.run_sync(self._catalogue.list)}
        ready = () if self._leaves else self._announcements(entries, self._held())
        # A node that stops gives what it keeps until it has gone.
        loaded = self._announcements(entries, self._pool.models())
        # No call of `look` follows a request: what is kept changes with each, and is told every WHOLE_S.
        kept = prefix_announcements(self._pool.kept_prefixes(), loaded)
        told = [entry for entry in entries.values() if self._models.may_be_told(entry.model_id)]
        ready, files = within_limits(ready, self._transfer.announcements(told))
        seeing = (
            ()
            if self._leaves
            else await trio.to_thread.run_sync(_projectors, entries.values(), self._transfer.gives)
        )
        spread = self._files
        return ready, files, kept, self._placing.shares, seeing or UNSET, spread.shared, spread.fetched

    def _announcements(
        self, entries: Mapping[ModelId, CatalogueEntry], held: Mapping[ModelId, tuple[LayerRange, ...]]
    ) -> tuple[ShardAnnounce, ...]:
        return tuple(
            ShardAnnounce(
                model_id=model_id,
                name=entries[model_id].name,
                n_layers=entries[model_id].manifest.n_layers,
                ranges=_pairs(held.get(model_id, ())),
                loading=_pairs(self._placing.loading(model_id)),
                pinned=_pairs(self._placing.pinned(model_id)),
                fetched=self._placing.fetched(model_id),
                kv_type=self._kv_type(model_id),
                kernel_class=self._pool.kernel_class(model_id) or UNSET,
            )
            for model_id in sorted({*held, *self._placing.model_ids})
            if model_id in entries and (model_id in held or self._placing.loading(model_id))
        )

    def _held(self) -> dict[ModelId, tuple[LayerRange, ...]]:
        held = dict(self._pool.models())
        for model_id, gone in self._given_up:
            if left := subtract(held.pop(model_id, ()), [gone]):
                held[model_id] = left
        return held

    def _kv_type(self, model_id: ModelId) -> KvType | UnsetType:
        loaded = self._pool.loaded_with(model_id)
        return UNSET if loaded is None or loaded.kv_type is None else loaded.kv_type

    def _record(self, holdings: Holdings, capability: NodeCapability) -> NodeRecord:
        return NodeRecord(
            node_id=self._router.node_id,
            nickname=self._nickname,
            software=SOFTWARE,
            started_at=self.started_at,
            sequence=self._sequence,
            models=holdings[0],
            capability=capability,
            files=holdings[1],
            prefix_caches=holdings[2],
            shares=holdings[3],
            projectors=holdings[4],
            shared_files=holdings[5],
            fetched_files=holdings[6],
        )


def _is_for_everybody(before: Holdings, now: Holdings) -> bool:
    """Whether they differ in more than beginnings of prompts, and how far models are fetched."""
    ready, _, kept, *_ = before
    progress = {each.model_id: each.fetched for each in ready}
    same = tuple(msgspec.structs.replace(each, fetched=progress.get(each.model_id, UNSET)) for each in now[0])
    return (same, now[1], kept, *now[3:]) != before


def _projectors(entries: Iterable[CatalogueEntry], gives: bool) -> tuple[ProjectorAnnounce, ...]:
    """Those whose files are as they were; `gives`: to others, too. Blocking."""
    found: list[ProjectorAnnounce] = []
    for entry in entries:
        if (projector := entry.projector) is None or len(found) == RECORD_PROJECTORS_MAX:
            continue
        try:
            projector.check_file()
        except BadModel:
            continue
        found.append(
            ProjectorAnnounce(
                model_id=entry.model_id,
                projector=Digest(projector.blake3),
                n_embd=projector.n_embd,
                shard=MMPROJ_INDEX,
                size_bytes=projector.size_bytes if gives else UNSET,
                takes=UNSET if projector.takes == {"picture"} else tuple(sorted(projector.takes)),
            )
        )
    return tuple(found)


def _pairs(ranges: Iterable[LayerRange]) -> tuple[tuple[int, int], ...]:
    return tuple((layers.start, layers.end) for layers in ranges)[:MODEL_RANGES_MAX]
