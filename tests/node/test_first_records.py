"""What a node waits for before it plans with others: their records, after the start and after connections."""

from __future__ import annotations

import trio
import trio.testing
from node_ids import A, B

from swarmllm.node.joining import JOINING_S, Joining
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import NodeRecord


async def test_it_waits_for_the_record_of_a_node_that_has_connected(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with InMemoryNetwork() as network:
        router, registry = network.add(A), Registry(A)
        network.add(B)
        joining = Joining(router, registry, meets_others=False)
        began_s = trio.current_time()

        async def say_something() -> None:
            await trio.sleep(2)
            registry.apply(B, encode_record(NodeRecord(node_id=B)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(say_something)
            await joining.hear_peers()
        assert 2 <= trio.current_time() - began_s < 3


async def test_one_that_says_nothing_holds_nobody_up_for_long(autojump_clock: trio.testing.MockClock) -> None:
    async with InMemoryNetwork() as network:
        router = network.add(A)
        network.add(B)
        joining = Joining(router, Registry(A), meets_others=False)
        began_s = trio.current_time()
        await joining.hear_peers()
        assert JOINING_S - 1 <= trio.current_time() - began_s <= JOINING_S + 1
        again_s = trio.current_time()
        await joining.hear_peers()
        assert trio.current_time() == again_s


async def test_a_node_that_is_to_meet_others_waits_for_the_first_and_one_alone_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with InMemoryNetwork() as network:
        router = network.add(A)
        began_s = trio.current_time()
        await Joining(router, Registry(A), meets_others=False).hear_peers()
        assert trio.current_time() == began_s
        await Joining(router, Registry(A), meets_others=True).hear_peers()
        assert JOINING_S <= trio.current_time() - began_s < JOINING_S + 1
