"""Real libp2p hosts that publish brief records: who uses a model learns the details of its nodes, from a
neighbour or from themselves, and nobody else does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from bench.common.simulated_swarm import make_manifest
from swarmllm.models import LayerRange
from swarmllm.pipeline.route.inputs import NetworkDistances, OwnLoad, route_inputs, workload
from swarmllm.scheduling.cheapest import cheapest_route
from swarmllm.scheduling.cost import NodeSpeed
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.records.details_book import IN_VAIN_MAX
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.node_load import NodeLoad, encode_load
from swarmllm_proto.record_parts import split_record
from swarmllm_proto.swarm import NodeCapability, NodeRecord, ObservedLatency, ShardAnnounce

from .conftest import until

pytestmark = pytest.mark.slow

MANIFEST = make_manifest(8)
DECODE_S = 0.0123


def record_of(node_id: NodeId, decode_s: float = DECODE_S) -> bytes:
    """It holds the model, and has run it."""
    held = ShardAnnounce(model_id=MANIFEST.model_id, name="m", n_layers=8, ranges=((0, 8),))
    seen = ObservedLatency(model_id=MANIFEST.model_id, decode_s=decode_s, prefill_s=0.001)
    capability = NodeCapability(memory_bytes_per_s=1e10, flops=1e12, observed_latencies=(seen,))
    return encode_record(NodeRecord(node_id=node_id, models=(held,), capability=capability))


@asynccontextmanager
async def host(folder: Path, name: str, *bootstrap: str, max_peers: int = 1) -> AsyncIterator[Libp2pRouter]:
    settings = SwarmSettings(
        folder / name,
        "127.0.0.1",
        0,
        0,
        bootstrap=bootstrap,
        max_peers=max_peers,
        mdns=False,
        dht="off",
        whole_records_max=1,
    )
    async with open_libp2p_router(settings) as router:
        yield router


async def test_who_uses_a_node_hears_its_load_on_the_data_connection(tmp_path: Path) -> None:
    """And nobody else does, unless it lasts; when the connection ends, it counts no more."""
    async with (
        host(tmp_path, "holder", max_peers=16) as holder,
        host(tmp_path, "user", holder.addresses[0]) as user,
        host(tmp_path, "other", holder.addresses[0]) as other,
    ):
        for each in (user, other):
            await until(each, lambda each=each: holder.node_id in each.connected())  # type: ignore[misc]
        await until(holder, lambda: len(holder.spread.book) == 3)
        record = record_of(holder.node_id)
        await holder.publish(record)
        for each in (user, other):
            await until(each, lambda each=each: holder.node_id in each.records())  # type: ignore[misc]
        await user.send(holder.node_id, b"work")
        await interested(user, holder.node_id)
        # At once, as it is then.
        await until(user, lambda: user.loads().get(holder.node_id) == encode_load(NodeLoad()))
        asked_again: list[str] = []
        for connection in user.plane.connections(holder.node_id):
            connection.loads.ask = lambda: asked_again.append("again")  # type: ignore[method-assign]
        await user.spread.details.look()
        assert asked_again == []
        for n in (1, 2):
            load = encode_load(NodeLoad(stage_requests=n))
            await holder.publish_load(load)
            await until(user, lambda load=load: user.loads().get(holder.node_id) == load)  # type: ignore[misc]
        assert holder.node_id not in other.loads()
        holder.plane.close(user.node_id, "a new one may come")
        with trio.fail_after(10):
            while user.loads().get(holder.node_id) == load:  # noqa: ASYNC110 (it is forgotten in silence)
                await trio.sleep(0.02)


async def interested(router: Libp2pRouter, *node_ids: NodeId) -> None:
    """From now on. The look that its own task takes every few seconds is taken at once."""
    sets: list[Collection[NodeId]] = [node_ids]
    router.want_details(lambda: sets)
    await router.spread.details.look()


def planned(registry: Registry, node_id: NodeId) -> NodeSpeed:
    """How fast a plan takes that node to be; there is a route over it."""
    held = {
        each: tuple(LayerRange(layers.start, layers.end) for layers in ranges)
        for each, ranges in registry.held(MANIFEST.model_id).items()
    }
    known = registry.working_nodes()
    inputs = route_inputs(
        NodeId("me"),
        MANIFEST,
        workload(MANIFEST, 10, 10),
        held,
        {each: known[each].capability for each in held},
        NetworkDistances(),
        Observations(),
        OwnLoad(),
    )
    assert cheapest_route(MANIFEST.n_layers, 1, held, inputs) is not None
    return inputs.speeds[node_id]


async def test_who_uses_a_model_learns_the_details_of_its_nodes_and_nobody_else_does(tmp_path: Path) -> None:
    async with (
        host(tmp_path, "middle", max_peers=16) as middle,
        host(tmp_path, "holder", middle.addresses[0]) as holder,
        host(tmp_path, "user", middle.addresses[0]) as user,
        host(tmp_path, "other", middle.addresses[0]) as other,
        trio.open_nursery() as nursery,
    ):
        for each in (holder, user, other):
            await until(each, lambda each=each: middle.node_id in each.connected())  # type: ignore[misc]
        await until(holder, lambda: len(holder.spread.book) == 4)
        record = record_of(holder.node_id)
        brief, _ = split_record(record)
        await holder.publish(record)
        for each in (middle, user, other):
            await until(each, lambda each=each: each.records().get(holder.node_id) == brief)  # type: ignore[misc]
        registry = Registry(user.node_id)
        await nursery.start(follow_router, registry, user)
        guessed = planned(registry, holder.node_id)
        assert not guessed.is_measured

        # One neighbour of all uses it, too, and has the details from the holder.
        await interested(middle, holder.node_id)
        await until(middle, lambda: middle.records()[holder.node_id] == record)
        await interested(user, holder.node_id)
        await until(user, lambda: user.records()[holder.node_id] == record)
        assert holder.node_id not in user.connected(), "the neighbour gave them"
        async with user.changes() as changes:
            while registry.content(holder.node_id) != record:
                with trio.move_on_after(0.05):
                    await anext(changes)
        speed = planned(registry, holder.node_id)
        assert (speed.is_measured, speed.decode_s) == (True, DECODE_S)
        assert other.records()[holder.node_id] == brief

        # What it says anew reaches who is interested, by a heartbeat and a question. The envelope stays.
        sequence = holder.spread.own.sequence
        newer = record_of(holder.node_id, 2 * DECODE_S)
        assert not await holder.publish_details(newer, soon=True)
        with trio.fail_after(30):
            while middle.spread.book.newest_details(holder.node_id) != 2:  # noqa: ASYNC110 (no event tells)
                await trio.sleep(0.05)
        held = middle.directory.records.details.get(holder.node_id)
        assert held is not None
        held.ask_at_s = 0.0
        await middle.spread.details.look()
        await until(middle, lambda: middle.records()[holder.node_id] == newer)
        assert holder.spread.own.sequence == sequence

        # Who lacks such a neighbour asks the holder.
        await interested(middle)
        await until(middle, lambda: middle.records()[holder.node_id] == brief)
        await interested(other, holder.node_id)
        asking = other.directory.records.details.get(holder.node_id)
        assert asking is not None
        asking.n_in_vain, asking.ask_at_s = IN_VAIN_MAX, 0.0
        await other.spread.details.look()
        await until(other, lambda: other.records()[holder.node_id] == newer)
        assert holder.node_id in other.host.connected()
        nursery.cancel_scope.cancel()
