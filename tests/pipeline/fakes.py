"""A swarm in one process: real pipelines over the in-memory router, on a model that is arithmetic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import trio
from deadlines import DEADLINE_S
from msgspec import UNSET

from bench.common.arithmetic import fake_entry
from swarmllm.errors import WorkerError
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.in_memory.router import InMemoryRouter
from swarmllm.swarm.in_memory.signer import InMemorySigner
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import (
    NodeCapability,
    NodeRecord,
    ObservedLatency,
    ProjectorAnnounce,
    ShardAnnounce,
)

DEFAULTS = PipelineSettings()


def computes(model_id: str, layer_s: float) -> NodeCapability:
    """What a node says that takes so long for a row of a layer, in prefill as in decode."""
    latency = ObservedLatency(model_id=model_id, decode_s=layer_s, prefill_s=layer_s)
    return NodeCapability(observed_latencies=(latency,))


class FakeCatalogue:
    def __init__(self, entry: CatalogueEntry) -> None:
        self.entry = entry

    def get(self, name_or_id: str) -> CatalogueEntry:
        if name_or_id not in (self.entry.model_id, self.entry.name):
            raise WorkerError("unknown model")
        return self.entry


def nickname_of(node_id: str) -> str:
    """ "nick-b" of the node whose id `node_ids` calls B."""
    return f"nick-{node_id[9]}"


@dataclass
class FakeNode:
    node_id: str
    router: InMemoryRouter
    registry: Registry
    pool: Any
    pipelines: Pipelines
    stop: Callable[[], None]
    trust: Trust
    observations: Observations
    commits: bool = False
    """To its rows."""
    picture_runs: bool = True
    """It says that it knows them."""

    def capability(self, said: NodeCapability) -> NodeCapability:
        return msgspec.structs.replace(
            said, commits=self.commits or UNSET, picture_runs=self.picture_runs or UNSET
        )

    async def announce(self, entry: CatalogueEntry, ranges: Sequence[LayerRange]) -> None:
        announced = ShardAnnounce(
            model_id=entry.model_id,
            name=entry.name,
            n_layers=entry.manifest.n_layers,
            ranges=tuple((layers.start, layers.end) for layers in ranges),
            kernel_class=self.pool.kernel_class(entry.model_id) or UNSET,
        )
        record = NodeRecord(
            node_id=self.node_id,
            nickname=nickname_of(self.node_id),
            models=(announced,) if ranges else (),
            capability=self.capability(NodeCapability()),
        )
        await self.router.publish(encode_record(record))

    async def announce_kv(self, kv_type: str) -> None:
        """The same as before, and in which type it keeps keys and values."""
        record = self.registry.node(self.node_id)
        assert record is not None
        models = tuple(msgspec.structs.replace(each, kv_type=kv_type) for each in record.models)
        newer = msgspec.structs.replace(record, sequence=record.sequence + 1, models=models)
        await self.router.publish(encode_record(newer))

    async def announce_projectors(self, *announced: ProjectorAnnounce) -> None:
        """The same as before, and with what it encodes pictures."""
        record = self.registry.node(self.node_id)
        assert record is not None
        newer = msgspec.structs.replace(record, sequence=record.sequence + 1, projectors=announced or UNSET)
        await self.router.publish(encode_record(newer))

    async def say(self, capability: NodeCapability) -> None:
        """What it has announced stays; its load and speed are this from now on."""
        record = self.registry.node(self.node_id)
        assert record is not None
        newer = msgspec.structs.replace(
            record, sequence=record.sequence + 1, capability=self.capability(capability)
        )
        await self.router.publish(encode_record(newer))


class Swarm:
    """Nodes "a", "b" ... of one in-memory network."""

    def __init__(
        self,
        network: InMemoryNetwork,
        entry: CatalogueEntry,
        start: Callable[[str, Any], Awaitable[FakeNode]],
    ) -> None:
        self.network = network
        self.entry = entry
        self.nodes: dict[str, FakeNode] = {}
        self._start = start

    def __getitem__(self, node_id: str) -> FakeNode:
        return self.nodes[node_id]

    async def start(self, node_id: str, pool: Any) -> None:
        """A new node, or one that was killed, with a memory as empty as `pool`."""
        node = await self._start(node_id, pool)
        await node.announce(self.entry, pool.loaded(self.entry.model_id))
        self.nodes[node_id] = node

    def kill(self, node_id: str) -> None:
        self.network.kill(node_id)
        self.nodes.pop(node_id).stop()

    async def tell(self, listener: str, said: Mapping[str, NodeCapability]) -> None:
        """Wait until `listener` knows what these nodes say of themselves."""
        for node_id, capability in said.items():
            await self[node_id].say(capability)
        said = {node_id: self[node_id].capability(capability) for node_id, capability in said.items()}
        known = self[listener].registry
        with trio.fail_after(DEADLINE_S):
            while any(known.nodes()[node_id].capability != said[node_id] for node_id in said):
                await trio.lowlevel.checkpoint()

    async def quiet(self) -> None:
        """Wait until no node has a request or a slot left."""
        with trio.fail_after(DEADLINE_S):
            while any(_busy(node) for node in self.nodes.values()):
                await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_swarm(
    holdings: Mapping[str, Any],
    *,
    settings: PipelineSettings | Mapping[str, PipelineSettings] = DEFAULTS,
    entry: CatalogueEntry | None = None,
    committing: Collection[str] | None = (),
) -> AsyncIterator[Swarm]:
    """A connected swarm in which everybody knows what everybody holds. `holdings`: by node id. `committing`:
    nodes that sign for their rows; None: all."""
    entry = entry or fake_entry()
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(InMemoryNetwork())
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)

        async def start(node_id: str, pool: Any) -> FakeNode:
            own = settings[node_id] if isinstance(settings, Mapping) else settings
            commits = committing is None or node_id in committing
            return await _start_node(nursery, network.add(node_id), pool, entry, own, commits=commits)

        swarm = Swarm(network, entry, start)
        for node_id, pool in holdings.items():
            await swarm.start(node_id, pool)
        with trio.fail_after(DEADLINE_S):
            while any(len(node.registry.nodes()) < len(holdings) for node in swarm.nodes.values()):
                await trio.lowlevel.checkpoint()
        yield swarm


async def _start_node(
    nursery: trio.Nursery,
    router: InMemoryRouter,
    pool: Any,
    entry: CatalogueEntry,
    settings: PipelineSettings,
    *,
    commits: bool,
) -> FakeNode:
    trust = Trust()
    registry = Registry(router.node_id, trust)
    catalogue = cast(Catalogue, FakeCatalogue(entry))
    signer = InMemorySigner(router.node_id) if commits else None
    parts = (router, registry, pool, catalogue, router.node_id, settings)
    observations = Observations()
    # A pool that gives and takes KV.
    kept = pool if settings.prefix_fetch.is_on else None
    pipelines = Pipelines(*parts, trust=trust, signer=signer, kept=kept, observations=observations)
    scope = trio.CancelScope()

    async def run(*, task_status: Any) -> None:
        with scope:
            async with trio.open_nursery() as own:
                await own.start(follow_router, registry, router)
                await own.start(pipelines.run)
                task_status.started()

    await nursery.start(run)
    return FakeNode(
        router.node_id, router, registry, pool, pipelines, scope.cancel, trust, observations, commits
    )


def _busy(node: FakeNode) -> bool:
    statistics = node.pipelines.statistics()
    return bool(
        statistics.active_generations or statistics.active_stage_requests or getattr(node.pool, "slots", None)
    )
