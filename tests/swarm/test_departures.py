"""Nodes that left: how long they are shown, and that their number is bounded."""

from __future__ import annotations

import trio
import trio.testing
from node_ids import NODE_A, NODE_B, node_id_named

from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.records.departures import (
    DEPARTED_MAX,
    FORGET_S,
    GAVE_UP_MAX,
    GAVE_UP_S,
    RECENT_S,
    Departures,
)
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce

SHARD = ShardAnnounce(model_id="a" * 64, name="guide", n_layers=12, ranges=((8, 12),))
RECORD = NodeRecord(node_id=NODE_B, nickname="attic", models=(SHARD,))
NOTHING = NodeRecord(node_id=NODE_B, nickname="attic", sequence=1)


def test_a_node_is_recent_then_one_that_left_then_forgotten() -> None:
    departures = Departures()
    departures.left(NODE_B, RECORD, 10.0, 1000.0)
    (left,) = departures.view(10.0)
    assert (left.node_id, left.nickname, left.models) == (NODE_B, "attic", (("guide", ((8, 12),)),))
    assert left.left_at == 1000.0
    assert left.is_recent(10 + RECENT_S - 1)
    assert not left.is_recent(10 + RECENT_S)
    assert departures.view(10 + FORGET_S - 1) == (left,)
    assert departures.view(10 + FORGET_S) == ()


def test_the_latest_come_first_and_too_many_push_out_the_oldest() -> None:
    departures = Departures()
    nodes = [node_id_named(str(index)) for index in range(DEPARTED_MAX + 2)]
    for second, node_id in enumerate(nodes):
        departures.left(node_id, None, float(second), 0.0)
    assert [each.node_id for each in departures.view(100.0)] == nodes[:1:-1]
    departures.left(nodes[2], None, 100.0, 0.0)
    assert departures.view(100.0)[0].node_id == nodes[2]


def test_what_a_node_gave_up_before_it_left_counts_as_held_for_a_while() -> None:
    departures = Departures()

    def held_when_it_leaves(now_s: float) -> object:
        departures.left(NODE_B, NOTHING, now_s, 0.0)
        return departures.view(now_s)[0].models

    departures.record_replaced(NODE_B, None, RECORD, 0.0)
    assert held_when_it_leaves(1.0) == ()
    departures.record_replaced(NODE_B, RECORD, NOTHING, 10.0)
    departures.record_replaced(NODE_B, NOTHING, NOTHING, 20.0)
    assert held_when_it_leaves(10 + GAVE_UP_S - 1) == (("guide", ((8, 12),)),)
    assert held_when_it_leaves(10 + GAVE_UP_S - 1) == ()
    departures.record_replaced(NODE_B, RECORD, NOTHING, 2000.0)
    assert held_when_it_leaves(2000 + GAVE_UP_S) == ()
    departures.record_replaced(NODE_B, RECORD, NOTHING, 3000.0)
    departures.record_replaced(NODE_B, NOTHING, RECORD, 3001.0)
    assert held_when_it_leaves(3002.0) == ()
    departures.record_replaced(NODE_B, RECORD, NOTHING, 4000.0)
    for number in range(GAVE_UP_MAX):
        departures.record_replaced(node_id_named(str(number)), RECORD, NOTHING, 4000.0)
    assert held_when_it_leaves(4000.0) == ()


async def test_a_node_that_comes_back_has_not_left() -> None:
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        router, other = network.add(NODE_A), network.add(NODE_B)
        registry = Registry(NODE_A)
        await nursery.start(follow_router, registry, router)
        await other.publish(encode_record(RECORD))
        await trio.testing.wait_all_tasks_blocked()
        await other.publish(encode_record(NOTHING))
        await trio.testing.wait_all_tasks_blocked()
        assert registry.departures.view(trio.current_time()) == ()
        network.cut(NODE_A, NODE_B)
        await trio.testing.wait_all_tasks_blocked()
        (left,) = registry.departures.view(trio.current_time())
        assert (left.node_id, left.nickname) == (NODE_B, "attic")
        assert left.models == (("guide", ((8, 12),)),)
        network.heal(NODE_A, NODE_B)
        await trio.testing.wait_all_tasks_blocked()
        assert registry.departures.view(trio.current_time()) == ()
        nursery.cancel_scope.cancel()
