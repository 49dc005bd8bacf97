"""Looking for a model beyond the connected nodes, and what this node says of itself out there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import trio
from node_ids import A, B
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.messages import RELAY_KEY, Contact, model_key, name_key
from swarmllm.swarm.discovery.dht.table import KEYS_PER_NODE
from swarmllm.swarm.discovery.wide_area import (
    _REMEMBERED_MAX,
    _SEEKING_MAX,
    PUNCHED_MAX,
    RELAYS_MET,
    SEEK_AGAIN_S,
    SEEK_S,
    WideArea,
    _Node,
)
from swarmllm.swarm.router import Reachability
from swarmllm_proto.identifiers import ModelId, NodeId

from .swarm_of import contacts

HOLDERS = contacts(3, seed=11)
MODEL = ModelId("ab" * 32)


class Stand:
    """A DHT that names who is said to have a key, and a router that meets whom it can."""

    def __init__(self) -> None:
        self.named: dict[bytes, list[Contact]] = {}
        self.asked: list[bytes] = []
        self.provided: list[bytes] = []
        self.takes_s = 0.0
        self.dead: set[str] = set()
        self.linked: set[NodeId] = set()
        self.met: list[tuple[NodeId, list[Address]]] = []
        self.passed_by: list[NodeId] = []
        self.direct: list[NodeId] = []
        self.reachability: Reachability | None = None
        stand: Any = self
        self.area = WideArea(stand, stand, stand, None)

    def provide(self, keys: list[bytes]) -> None:
        self.provided = keys

    async def find_providers(self, key: bytes, *, n_enough: int = 1) -> list[Contact]:
        self.asked.append(key)
        await trio.sleep(self.takes_s)
        return self.named.get(key, [])

    def connected(self) -> frozenset[NodeId]:
        return frozenset(self.linked)

    async def meet(self, node_id: NodeId, addresses: list[Address], timeout_s: float) -> NodeId:
        self.met.append((node_id, addresses))
        if node_id in self.dead:
            raise NodeUnreachable("nothing answers")
        self.linked.add(node_id)
        return node_id

    def met_in_passing(self, node_id: NodeId) -> None:
        self.passed_by.append(node_id)

    async def turned_direct(self, node_id: NodeId) -> None:
        self.direct.append(node_id)

    def statistics(self) -> str:
        return "of the DHT"


async def test_a_name_is_sought_and_those_that_are_named_are_met() -> None:
    stand = Stand()
    stand.named[name_key("guide")] = HOLDERS
    stand.dead = {HOLDERS[0].node_id}
    stand.linked = {NodeId(HOLDERS[1].node_id)}
    assert await stand.area.seek("guide")
    assert sorted(stand.met) == sorted((c.node_id, list(c.addresses)) for c in (HOLDERS[0], HOLDERS[2]))
    assert stand.area.statistics() == "of the DHT"


async def test_nodes_that_volunteer_as_relays_are_met_and_go_where_they_are_of_no_use(
    autojump_clock: MockClock,
) -> None:
    stand = Stand()
    named = contacts(RELAYS_MET + 2, seed=12)
    stand.named[RELAY_KEY] = named
    await stand.area.meet_relays()
    assert len(stand.linked) == RELAYS_MET
    assert stand.linked <= {contact.node_id for contact in named}
    assert set(stand.passed_by) == stand.linked
    stand.takes_s = 10 * SEEK_S
    await stand.area.meet_relays()
    assert trio.current_time() <= 2 * SEEK_S


def test_a_relay_announces_itself_with_its_models_and_no_model_is_named_like_it() -> None:
    stand: Any = Stand()
    assert list(stand.provided) == []
    area = WideArea(stand, stand, stand, stand)
    assert list(stand.provided) == [RELAY_KEY]
    area.announce([(MODEL, "guide")])
    assert list(stand.provided) == [RELAY_KEY, model_key(MODEL), name_key("guide")]
    assert name_key("relay") != RELAY_KEY


def test_connections_with_relays_and_with_those_that_use_this_one_are_no_idle_ones() -> None:
    stand: Any = Stand()
    relay, carrier, guest = (contact.node_id for contact in contacts(3, seed=13))
    stand.relays = (relay,)
    stand.circuits = SimpleNamespace(carriers=lambda: {carrier})
    stand.book = SimpleNamespace(users=lambda: {guest})
    assert WideArea(stand, stand, stand, None).relayed() == {relay, carrier}
    assert WideArea(stand, stand, stand, stand).relayed() == {relay, carrier, guest}


async def test_an_id_is_sought_as_such(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.named[model_key(MODEL)] = HOLDERS[:1]
    assert await stand.area.seek(MODEL)
    assert model_key(MODEL) in stand.asked


async def test_what_was_sought_in_vain_is_not_sought_again_at_once(autojump_clock: MockClock) -> None:
    stand = Stand()
    assert not await stand.area.seek("guide")
    n_asked = len(stand.asked)
    stand.named[name_key("guide")] = HOLDERS
    await trio.sleep(SEEK_AGAIN_S - 0.1)
    assert not await stand.area.seek("guide")
    assert len(stand.asked) == n_asked
    await trio.sleep(0.1)
    assert await stand.area.seek("guide")
    assert await stand.area.seek("guide") is False, "all of them are connected"


async def test_a_search_where_nobody_can_be_met_is_in_vain(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.named[name_key("guide")] = HOLDERS
    stand.dead = {contact.node_id for contact in HOLDERS}
    assert not await stand.area.seek("guide")
    assert len(stand.met) == len(HOLDERS)


async def test_a_search_ends_in_time_and_so_many_go_on_at_once(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.takes_s = 10 * SEEK_S
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(_SEEKING_MAX + 1):
            nursery.start_soon(stand.area.seek, f"m{number}")
        await trio.testing.wait_all_tasks_blocked()
        assert len(stand.asked) == _SEEKING_MAX
    assert trio.current_time() - began_s == 2 * SEEK_S


async def test_of_names_that_were_sought_in_vain_the_latest_are_remembered(autojump_clock: MockClock) -> None:
    stand = Stand()
    names = [f"m{number}" for number in range(_REMEMBERED_MAX + 1)]
    for name in names:
        await stand.area.seek(name)
    stand.asked.clear()
    for name in (names[-1], names[1]):
        await stand.area.seek(name)
    assert stand.asked == []
    await stand.area.seek(names[0])
    assert stand.asked != [], "that it was in vain is forgotten"


def test_a_model_is_announced_by_its_id_and_by_its_name_and_not_too_many() -> None:
    stand = Stand()
    stand.area.announce([(MODEL, "guide"), (ModelId("cd" * 32), "guide")])
    assert stand.provided == [model_key(MODEL), name_key("guide"), model_key(ModelId("cd" * 32))]
    stand.area.announce((ModelId(f"{number:064x}"), f"m{number}") for number in range(KEYS_PER_NODE))
    assert len(stand.provided) == KEYS_PER_NODE


FOUND = Reachability(checked_at=0.0, asked=B, control=(), data=(), observed_ip="")
TEXTS = tuple(f"/ip4/192.0.2.1/tcp/{port}" for port in range(1, PUNCHED_MAX + 3))


class Seen:
    """What this node knows of others and of itself."""

    node_id = A
    port = 8810

    def __init__(self) -> None:
        self.own: Any = None
        self.records: dict[str, Any] = {}
        self.told: list[tuple[str, ...]] = []

    def envelope(self, node_id: str) -> Any:
        return self.records.get(node_id)

    def connected(self) -> set[str]:
        return {B, "dialled a moment ago"}

    def lets_in(self, node_id: str) -> bool:
        return node_id == B

    async def reach_through(self, addresses: tuple[str, ...]) -> None:
        self.told.append(addresses)


@asynccontextmanager
async def node(*, uses_relays: bool = True) -> AsyncIterator[tuple[_Node, Seen, Stand]]:
    seen, user = Seen(), Stand()
    seen_as, user_as = (seen, user)
    host: Any = seen_as
    router: Any = user_as
    yield _Node(host, host, host, router, uses_relays=uses_relays), seen, user


async def test_a_node_counts_on_being_reached_until_a_peer_has_tried_in_vain() -> None:
    async with node() as (it, _, user):
        assert it.serves()
        assert not it.is_hidden()
        user.reachability = replace(FOUND, control=(("x", False), ("y", True)))
        assert it.serves()
        user.reachability = replace(FOUND, control=(("x", False),))
        assert not it.serves()
        assert it.is_hidden()
    async with node(uses_relays=False) as (it, _, user):
        user.reachability = replace(FOUND, control=(("x", False),))
        assert not it.is_hidden()


async def test_whereabouts_are_those_of_records_and_its_own_of_its_own() -> None:
    async with node() as (it, seen, _):
        assert it.addresses_of(B) == it.addresses_of(A) == ()
        seen.records[B] = SimpleNamespace(addresses=(*TEXTS, "/dns4/example.org/tcp/1"))
        seen.own = SimpleNamespace(addresses=TEXTS[:1])
        assert it.addresses_of(A) == (Address("192.0.2.1", 1),)
        assert it.addresses(B) == (*TEXTS, "/dns4/example.org/tcp/1")
        assert len(it.addresses_of(B)) == len(TEXTS)
        assert it.known_addresses(B) == it.addresses_of(B)[:PUNCHED_MAX]


async def test_where_others_see_it_come_from_is_its_first_address() -> None:
    async with node() as (it, seen, user):
        seen.own = SimpleNamespace(addresses=TEXTS)
        assert it.own_addresses() == it.addresses_of(A)[:PUNCHED_MAX]
        user.reachability = FOUND
        assert it.own_addresses()[0] == Address("192.0.2.1", 1)
        user.reachability = replace(FOUND, observed_ip="198.51.100.7")
        assert it.own_addresses()[0] == Address("198.51.100.7", Seen.port)
        assert len(it.own_addresses()) == PUNCHED_MAX
        user.reachability = replace(FOUND, observed_ip="192.0.2.1")
        seen.own = SimpleNamespace(addresses=(f"/ip4/192.0.2.1/tcp/{Seen.port}",))
        assert it.own_addresses() == (Address("192.0.2.1", Seen.port),)


async def test_it_says_who_is_connected_and_hands_on_what_it_is_told() -> None:
    async with node() as (it, seen, user):
        user.linked = {B}
        assert set(it.connected()) == {B, "dialled a moment ago"}
        assert set(it.counted()) == {B}
        assert it.lets_in(B)
        assert not it.lets_in(A)
        it.met_in_passing(B)
        await it.turned_direct(B)
        await it.tell(TEXTS)
        assert (user.passed_by, user.direct, seen.told) == ([B], [B], [TEXTS])
