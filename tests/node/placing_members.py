"""Nodes that place models among themselves, with their gossip in memory, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
from fake_trust import FakeTrust

from swarmllm.config import AutoManageTable
from swarmllm.errors import NodeUnreachable
from swarmllm.models import CatalogueEntry, LayerRange, Manifest, merge, subtract
from swarmllm.models.manifest import Shard
from swarmllm.models.model_files import FileState
from swarmllm.node.model_access import Progress, Sources
from swarmllm.node.placing.auto_shard import AutoShardManager
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool import WorkerPool
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import NodeCapability, NodeRecord, ShardAnnounce, SharedModel

LAYER_BYTES = 2**20


WHOLE = LayerRange(0, 12)


DIGEST = "0" * 64


def make_entry() -> CatalogueEntry:
    shards = tuple(
        Shard(index=i, kind="layer", size_bytes=LAYER_BYTES, blake3=DIGEST, tensors=()) for i in range(12)
    )
    manifest = Manifest(
        name="m",
        architecture="arithmetic",
        n_layers=12,
        n_embd=4,
        n_vocab=10,
        context_length=100,
        cut_alignment=1,
        whole_reason="",
        tied_embedding=False,
        size_bytes=1,
        shards=shards,
    )
    return CatalogueEntry(manifest.model_id, "m", Path("/nowhere"), manifest, FileState(1, 1))


ENTRY = make_entry()


def ranges(*texts: str) -> tuple[LayerRange, ...]:
    return tuple(map(LayerRange.parse, texts))


class MemoryPool:
    """Holds whatever it is given."""

    def __init__(self) -> None:
        self.held: tuple[LayerRange, ...] = ()
        self.free: int | None = None
        """What the machine can still give."""

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        return self.held if model_id == ENTRY.model_id else ()

    def free_bytes(self) -> int | None:
        return self.free

    def models(self) -> dict[str, tuple[LayerRange, ...]]:
        return {ENTRY.model_id: self.held} if self.held else {}


class Member:
    """A manager with its node's registry; `tell` is its gossip."""

    def __init__(
        self,
        node_id: str,
        n_layers: int,
        max_pipes: int = 0,
        may_work: Callable[[str], bool] = lambda node_id: True,
    ) -> None:
        self.node_id, self.pool = node_id, MemoryPool()
        self.registry = Registry(node_id, FakeTrust(may_work))
        self.acts: list[str] = []
        self.failure: NodeUnreachable | None = None
        self.untold: set[ModelId] = set()
        """Models of which others may not hear yet."""
        self.manager = AutoShardManager(
            AutoManageTable(("m",), n_layers * LAYER_BYTES / 2**30, max_pipes),
            node_id=node_id,
            registry=self.registry,
            pool=cast(WorkerPool, self.pool),
            models=self,
            on_change=lambda: None,
        )

    async def find(self, name: str) -> CatalogueEntry:
        return ENTRY

    def may_be_told(self, model_id: ModelId) -> bool:
        return model_id not in self.untold

    async def fetch(
        self, entry: CatalogueEntry, layers: LayerRange, progress: Progress, sources: Sources = ()
    ) -> None:
        """All is here."""

    async def hold(self, entry: CatalogueEntry, layers: LayerRange, *rest: Any, **named: Any) -> None:
        self.acts.append(f"load {layers}")
        assert self.manager.loading(ENTRY.model_id) == (layers,)
        if self.failure is not None:
            raise self.failure
        self.pool.held = merge([*self.pool.held, layers])

    async def drop(self, entry: CatalogueEntry, layers: LayerRange) -> None:
        self.acts.append(f"drop {layers}")
        if self.failure is not None:
            raise self.failure
        self.pool.held = subtract(self.pool.held, [layers])

    def record(self) -> bytes:
        def pairs(held: tuple[LayerRange, ...]) -> tuple[tuple[int, int], ...]:
            return tuple((each.start, each.end) for each in held)

        announced = ShardAnnounce(
            model_id=ENTRY.model_id,
            name="m",
            n_layers=12,
            ranges=pairs(self.pool.held),
            loading=pairs(self.manager.loading(ENTRY.model_id)),
            pinned=pairs(self.manager.pinned(ENTRY.model_id)),
        )
        capability = NodeCapability(
            placed_models=self.manager.model_ids, placing_free_bytes=self.manager.free_bytes
        )
        return encode_record(
            NodeRecord(
                node_id=self.node_id, models=(announced,) if self.pool.held else (), capability=capability
            )
        )


def tell(member: Member, record: NodeRecord) -> None:
    """What another node says of itself."""
    member.registry.apply(record.node_id, encode_record(record))


def holder(node_id: str, *, ready: str = "", loading: str = "") -> NodeRecord:
    """It takes part and has no room left."""
    announced = ShardAnnounce(
        model_id=ENTRY.model_id,
        name="m",
        n_layers=12,
        ranges=tuple((each.start, each.end) for each in ranges(*ready.split())),
        loading=tuple((each.start, each.end) for each in ranges(*loading.split())),
    )
    capability = NodeCapability(placed_models=(ENTRY.model_id,))
    return NodeRecord(node_id=node_id, models=(announced,), capability=capability)


async def live(members: list[Member], n_ticks: int, since_s: float = 0.0, others: Iterable[str] = ()) -> None:
    """Gossip, then one look of everybody, `n_ticks` times; `others` are connected too."""
    for tick in range(n_ticks):
        for member in members:
            member.registry.set_reachable(
                {other.node_id for other in members} - {member.node_id} | set(others)
            )
            for other in members:
                member.registry.apply(other.node_id, other.record())
        for member in members:
            await member.manager.tick(since_s + 5.0 * tick)


def layers_of(members: list[Member]) -> list[LayerRange]:
    return [layers for member in members for layers in member.pool.held]


class SharingMember(Member):
    """Nothing is configured to be placed on it but what others share."""

    def __init__(self, node_id: str, n_layers: int, *accept: str, share: tuple[str, ...] = ()) -> None:
        super().__init__(node_id, n_layers)
        self.manager = AutoShardManager(
            AutoManageTable((), n_layers * LAYER_BYTES / 2**30, share=share, accept=accept),
            node_id=NodeId(node_id),
            registry=self.registry,
            pool=cast(WorkerPool, self.pool),
            models=self,
            on_change=lambda: None,
        )
        self.further_names: tuple[str, ...] = ()
        """Of its model."""

    async def find(self, name: str) -> CatalogueEntry:
        if name not in (ENTRY.model_id, "m", *self.further_names):
            raise NodeUnreachable("nobody has it")
        return ENTRY

    def record(self) -> bytes:
        record = decode_record(super().record())
        capability = msgspec.structs.replace(record.capability, accepts_shares_of=self.manager.accepts)
        return encode_record(
            msgspec.structs.replace(record, shares=self.manager.shares, capability=capability)
        )


SHARE = SharedModel(model_id=ENTRY.model_id, name="m")
