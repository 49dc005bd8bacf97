"""When a node asks others in the DHT, whom, and how often; between nodes that reach each other in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import MockClock

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.dht import (
    ANNOUNCE_EVERY_S,
    EAGER_CONTACTS,
    ENOUGH_PROVIDERS,
    UNHURRIED_S,
    Dht,
)
from swarmllm.swarm.discovery.dht.messages import Contact, name_key
from swarmllm.swarm.discovery.dht.serving import DhtNode
from swarmllm.swarm.discovery.dht.table import EXPIRY_S, ProviderBook
from swarmllm.swarm.router import DhtMode
from swarmllm_proto.identifiers import NodeId

from ..memory_hosts import MemoryNetwork
from .swarm_of import HERE, contacts

KEY, OTHER_KEY = name_key("guide"), name_key("other")
SOON_S = 30.0
"""Enough for a round of everybody."""


class Node(DhtNode):
    def __init__(self, network: MemoryNetwork, node_id: NodeId, mode: DhtMode) -> None:
        self.host = network.host(node_id)
        self.let_in = True
        self.knows_all = False
        self.passed_by: list[NodeId] = []
        host: Any = self.host
        self.dht = Dht(host, network.nursery, self, mode=mode)
        network.nursery.start_soon(self.dht.run)

    def addresses_of(self, node_id: NodeId) -> tuple[Address, ...]:
        return HERE

    def connected(self) -> set[NodeId]:
        return self.host.peers

    def lets_in(self, node_id: NodeId) -> bool:
        return self.let_in

    def knows_the_swarm(self) -> bool:
        return self.knows_all

    def met_in_passing(self, node_id: NodeId) -> None:
        self.passed_by.append(node_id)

    @property
    def node_id(self) -> NodeId:
        return self.host.node_id

    @property
    def n_held(self) -> int:
        return len(self.dht.core.providers)


class Nodes:
    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._ids = [NodeId(contact.node_id) for contact in contacts(40, seed=7)]
        self.made: list[Node] = []

    def start(self, mode: DhtMode = "on") -> Node:
        made = Node(self._network, self._ids[len(self.made)], mode)
        self.made.append(made)
        return made

    async def introduce(self, one: Node, other: Node) -> None:
        await one.host.dial(other.node_id, list(HERE))
        one.dht.met(other.node_id)
        other.dht.met(one.node_id)
        await trio.sleep(SOON_S)


@asynccontextmanager
async def nodes() -> AsyncIterator[Nodes]:
    async with trio.open_nursery() as nursery:
        yield Nodes(MemoryNetwork(nursery))
        nursery.cancel_scope.cancel()


async def test_whoever_is_met_is_asked_once_and_known(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        one, other = made.start(), made.start()
        await made.introduce(one, other)
        assert other.node_id in one.dht.core.table
        assert one.node_id in other.dht.core.table
        n_asked = len(one.host.asked_of)
        await trio.sleep(SOON_S)
        assert len(one.host.asked_of) == n_asked, "nothing is new"


async def test_few_are_asked_at_once_and_the_others_one_by_one_while_they_are_there(
    autojump_clock: MockClock,
) -> None:
    async with nodes() as made:
        one, others = made.start(), [made.start() for _ in range(EAGER_CONTACTS + 3)]
        for other in others:
            await one.host.dial(other.node_id, list(HERE))
            one.dht.met(other.node_id)
        await trio.sleep(1.0)
        assert len(one.dht.core.table) == EAGER_CONTACTS + 1
        gone = others[-2]
        one.host.peers.discard(gone.node_id)
        await trio.sleep(UNHURRIED_S)
        assert len(one.dht.core.table) == EAGER_CONTACTS + 2
        await trio.sleep(10 * UNHURRIED_S)
        assert len(one.dht.core.table) == EAGER_CONTACTS + 2
        assert gone.node_id not in one.dht.core.table


async def test_what_is_here_is_told_at_once_and_again_before_it_is_forgotten(
    autojump_clock: MockClock,
) -> None:
    async with nodes() as made:
        one, other = made.start(), made.start()
        await made.introduce(one, other)
        one.dht.provide([KEY, OTHER_KEY])
        await trio.sleep(SOON_S)
        assert other.n_held == 2
        assert one.dht.statistics().n_announced == 2
        await trio.sleep(2 * EXPIRY_S)
        assert other.n_held == 2
        one.dht.provide([KEY])
        await trio.sleep(2 * EXPIRY_S)
        assert other.n_held == 1, "what is here no more is forgotten there"
        assert [c.node_id for c in await other.dht.find_providers(KEY)] == [one.node_id]
        assert await other.dht.find_providers(OTHER_KEY) == []


async def test_a_key_is_told_once_an_hour_and_another_one_at_once(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        one, other = made.start(), made.start()
        await made.introduce(one, other)
        one.dht.provide([KEY])
        await trio.sleep(SOON_S)
        told_at = dict(one.dht._provided_at_s)
        await trio.sleep(ANNOUNCE_EVERY_S - 4 * SOON_S)
        assert one.dht._provided_at_s == told_at
        one.dht.provide([KEY, OTHER_KEY])
        await trio.sleep(SOON_S)
        assert one.dht._provided_at_s[KEY] == told_at[KEY]
        assert other.n_held == 2


async def test_one_that_knows_nobody_tells_when_it_has_met_somebody(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        one, other = made.start(), made.start()
        one.dht.provide([KEY])
        await trio.sleep(SOON_S)
        assert one.dht._provided_at_s == {}
        await made.introduce(one, other)
        assert other.n_held == 1


async def test_in_a_table_that_has_doubled_others_are_nearest(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        one = made.start()
        one.dht.provide([KEY])
        others = [made.start() for _ in range(4)]
        for other in others[:2]:
            await made.introduce(one, other)
        assert [other.n_held for other in others] == [1, 1, 0, 0]
        for other in others[2:]:
            await made.introduce(one, other)
        assert [other.n_held for other in others] == [1] * 4


async def test_a_search_that_knows_enough_asks_nobody(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        one, other = made.start(), made.start()
        await made.introduce(one, other)
        known = contacts(ENOUGH_PROVIDERS, seed=3)
        for contact in known[:-1]:
            one.dht.core.providers.add(KEY, contact, trio.current_time())
        other.dht.core.providers.add(KEY, known[-1], trio.current_time())
        n_asked = len(one.host.asked_of)
        assert len(await one.dht.find_providers(KEY, n_enough=len(known) - 1)) == len(known) - 1
        assert len(one.host.asked_of) == n_asked
        assert len(await one.dht.find_providers(KEY)) == len(known)
        assert len(one.host.asked_of) == n_asked + 1
        assert one.dht.statistics().n_lookups == 2


async def test_a_search_ends_with_the_answer_that_names_enough(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        seeker = made.start()
        others = [made.start() for _ in range(6)]
        for other in others:
            await made.introduce(seeker, other)
            for contact in contacts(2, seed=5):
                other.dht.core.providers.add(KEY, contact, trio.current_time())
        n_asked = len(seeker.host.asked_of)
        assert len(await seeker.dht.find_providers(KEY, n_enough=2)) == 2
        assert 1 <= len(seeker.host.asked_of) - n_asked <= 3, "those that were under way at once"
        n_asked = len(seeker.host.asked_of)
        assert len(await seeker.dht.find_providers(KEY, n_enough=3)) == 2
        assert len(seeker.host.asked_of) - n_asked == len(others)


async def test_a_node_never_finds_itself(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        one, other = made.start(), made.start()
        await made.introduce(one, other)
        one.dht.provide([KEY])
        await trio.sleep(SOON_S)
        other.dht.provide([KEY])
        await trio.sleep(SOON_S)
        assert [c.node_id for c in await one.dht.find_providers(KEY)] == [other.node_id]


async def test_one_that_does_not_answer_is_forgotten_until_it_is_met_again(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        one, other = made.start(), made.start()
        await made.introduce(one, other)
        del other.host.handlers[next(iter(other.host.handlers))]
        assert await one.dht.find_providers(KEY) == []
        assert other.node_id not in one.dht.core.table


async def test_a_client_asks_and_does_not_answer_and_one_that_is_off_does_neither(
    autojump_clock: MockClock,
) -> None:
    async with nodes() as made:
        server, client, off = made.start(), made.start("client"), made.start("off")
        await made.introduce(client, server)
        await made.introduce(off, server)
        assert server.node_id in client.dht.core.table
        assert len(server.dht.core.table) == 0
        assert (len(off.dht.core.table), off.host.asked_of) == (0, [])
        off.dht.core.table.answered(Contact(server.node_id, HERE), trio.current_time())
        assert await off.dht.find_providers(KEY) == []
        assert off.dht.statistics().n_lookups == 0


async def test_it_says_whom_it_has_dialled_for_a_question(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        seeker, middle, far = made.start(), made.start(), made.start()
        await made.introduce(middle, far)
        await made.introduce(seeker, middle)
        assert seeker.host.dialled[1:] == [far.node_id]
        assert seeker.passed_by == [far.node_id]
        assert (middle.passed_by, far.passed_by) == ([], [])


async def test_who_is_not_let_in_is_not_asked(autojump_clock: MockClock) -> None:
    async with nodes() as made:
        one, other = made.start(), made.start()
        one.let_in = False
        await made.introduce(one, other)
        assert one.host.asked_of == []
        assert other.node_id not in one.dht.core.table
        assert one.node_id in other.dht.core.table


async def test_where_all_know_each_other_nobody_is_dialled_unless_somebody_waits_for_the_result(
    autojump_clock: MockClock,
) -> None:
    async with nodes() as made:
        one, middle, far = made.start(), made.start(), made.start()
        one.knows_all = True
        one.dht.provide([KEY])
        far.dht.provide([OTHER_KEY])
        await made.introduce(middle, far)
        await made.introduce(one, middle)
        assert one.host.dialled[1:] == []
        assert (middle.n_held, far.n_held) == (2, 0), "it is told to those with whom there is a connection"
        middle.dht.core.providers = ProviderBook()
        assert [c.node_id for c in await one.dht.find_providers(OTHER_KEY)] == [far.node_id]
        assert one.host.dialled[1:] == [far.node_id]


async def test_a_slow_answer_costs_no_connection_and_one_that_never_comes_does(
    autojump_clock: MockClock,
) -> None:
    """The machines may be short of processor time, and others use the connection."""
    async with nodes() as made:
        one, other = made.start(), made.start()
        await one.host.dial(other.node_id, list(HERE))
        one.host.opens_streams = False
        one.dht.met(other.node_id)
        await trio.sleep(SOON_S)
        assert one.host.closed == []
        await trio.sleep(2 * SOON_S)
        assert one.host.closed == [other.node_id]
