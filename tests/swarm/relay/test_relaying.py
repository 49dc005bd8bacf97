"""When a node asks for reservations, renews them, lets them lapse, and its way to a hidden node."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.relay import client
from swarmllm.swarm.discovery.relay.client import (
    ACCEPTING_MAX,
    ANSWER_S,
    ASK_AGAIN_S,
    FIND_FIRST_S,
    FIND_MAX_S,
    LOOK_EVERY_S,
    RELAYS,
    Relaying,
    RelayUse,
)
from swarmllm.swarm.discovery.wide_area import _Node
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId

from ..dht.swarm_of import contacts

RESERVED_S = 3600.0
ME, HIDDEN, *OTHERS = [contact.node_id for contact in contacts(8)]


class Circuits:
    """As many relays as `willing`; each reservation lasts an hour."""

    def __init__(self, willing: set[str]) -> None:
        self.willing = willing
        self.relays: Parts[RelayUse] = Parts.alone()
        self.asked: list[str] = []
        self.ways: list[tuple[str, str]] = []

    async def reserve(self, relay_id: str) -> None:
        self.asked.append(relay_id)
        if relay_id not in self.willing:
            raise NodeUnreachable("no relay")
        use = self.relays.get(NodeId(relay_id))
        assert use is not None
        use.reserved_until_s = trio.current_time() + RESERVED_S

    async def connect(self, relay_id: str, node_id: str) -> None:
        self.ways.append((relay_id, node_id))
        if relay_id not in self.willing:
            raise NodeUnreachable("no relay")


class Host:
    node_id = ME

    def __init__(self, connected: set[str]) -> None:
        self.reached = connected
        self.dialled: list[tuple[str, list[Address]]] = []

    def is_connected(self, node_id: str) -> bool:
        return node_id in self.reached

    async def dial(self, node_id: str, addresses: list[Address], *, may_detour: bool = True) -> None:
        assert not may_detour
        self.dialled.append((node_id, addresses))


class Scene:
    def __init__(self, willing: set[str], connected: set[str]) -> None:
        self.circuits = Circuits(willing)
        self.host = Host(connected)
        self.cannot_be_dialled = True
        self.connected = connected
        self.told: list[tuple[str, ...]] = []
        self.volunteers: set[str] = set()
        """Named by the DHT."""
        self.searched_at_s: list[float] = []
        self.known: dict[str, tuple[str, ...]] = {}
        self.relaying = Relaying(
            self.host,  # type: ignore[arg-type]
            self.circuits,  # type: ignore[arg-type]
            self,
            random.Random(0),
        )

    def is_hidden(self) -> bool:
        return self.cannot_be_dialled

    def counted(self) -> set[NodeId]:
        return {NodeId(each) for each in self.connected}

    def addresses(self, node_id: str) -> tuple[str, ...]:
        return self.known.get(node_id, (f"/ip4/192.0.2.1/tcp/{len(node_id)}",))

    async def tell(self, addresses: tuple[str, ...]) -> None:
        self.told.append(addresses)

    async def meet_relays(self) -> None:
        self.searched_at_s.append(trio.current_time())
        self.connected |= self.volunteers


async def test_a_hidden_node_asks_until_it_has_enough_and_tells(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(set(OTHERS), set(OTHERS))
    await scene.relaying.look()
    assert len(scene.relaying.relays) == RELAYS == len(scene.circuits.asked)
    (told,) = scene.told
    assert told == tuple(f"/ip4/192.0.2.1/tcp/52/p2p/{r}/p2p-circuit" for r in scene.relaying.relays)
    await scene.relaying.look()
    assert len(scene.circuits.asked) == RELAYS
    assert len(scene.told) == 1


async def test_a_node_that_can_be_dialled_asks_nobody(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(set(OTHERS), set(OTHERS))
    scene.cannot_be_dialled = False
    await scene.relaying.look()
    assert scene.circuits.asked == scene.told == []


async def test_a_node_of_whose_connected_ones_none_is_a_relay_looks_for_one(
    autojump_clock: trio.abc.Clock,
) -> None:
    scene = Scene(set(OTHERS[2:3]), set(OTHERS[:2]))
    scene.volunteers = set(OTHERS[2:3])
    await scene.relaying.look()
    assert scene.relaying.relays == ()
    await trio.sleep(LOOK_EVERY_S)
    await scene.relaying.look()
    assert set(scene.relaying.relays) == scene.volunteers
    assert len(scene.told) == 1
    for _ in range(10):
        await trio.sleep(FIND_FIRST_S)
        await scene.relaying.look()
    assert len(scene.searched_at_s) == 1, "one is enough to be reached"


async def test_a_search_for_relays_in_vain_is_repeated_more_and_more_rarely(
    autojump_clock: trio.abc.Clock,
) -> None:
    scene = Scene(set(), set())
    with trio.move_on_after(4 * FIND_MAX_S):
        await scene.relaying.run()
    waits_s = [later - sooner for sooner, later in itertools.pairwise(scene.searched_at_s)]
    assert waits_s[0] >= FIND_FIRST_S
    assert waits_s == sorted(waits_s)
    assert FIND_MAX_S <= waits_s[-1] <= FIND_MAX_S + 2 * LOOK_EVERY_S


async def test_a_node_that_loses_its_relay_looks_for_another_soon(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(set(OTHERS[:1]), set())
    for _ in range(100):
        await scene.relaying.look()
        await trio.sleep(FIND_FIRST_S)
    scene.connected |= set(OTHERS[:1])
    await scene.relaying.look()
    assert scene.relaying.relays == (OTHERS[0],)
    await trio.sleep(FIND_MAX_S)
    scene.connected.clear()
    n_before = len(scene.searched_at_s)
    for _ in range(3):
        await trio.sleep(FIND_FIRST_S)
        await scene.relaying.look()
    assert len(scene.searched_at_s) - n_before >= 2


async def test_a_node_that_can_be_dialled_looks_for_no_relay() -> None:
    scene = Scene(set(), set())
    scene.cannot_be_dialled = False
    await scene.relaying.look()
    assert scene.searched_at_s == []


async def test_who_is_no_relay_is_left_alone_for_a_while(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene(set(), set(OTHERS[:2]))
    await scene.relaying.look()
    await scene.relaying.look()
    assert sorted(scene.circuits.asked) == sorted(OTHERS[:2])
    await trio.sleep(ASK_AGAIN_S)
    await scene.relaying.look()
    assert len(scene.circuits.asked) == 4


async def test_reservations_are_renewed_in_half_of_their_time(autojump_clock: trio.abc.Clock) -> None:
    scene = Scene({OTHERS[0]}, {OTHERS[0]})
    await scene.relaying.look()
    await trio.sleep(RESERVED_S / 2 - 1)
    await scene.relaying.look()
    assert len(scene.circuits.asked) == 1
    await trio.sleep(1)
    await scene.relaying.look()
    assert len(scene.circuits.asked) == 2
    assert len(scene.told) == 1


async def test_a_relay_that_is_lost_is_told_no_more_and_lapsed_ones_neither(
    autojump_clock: trio.abc.Clock,
) -> None:
    scene = Scene({OTHERS[0]}, {OTHERS[0]})
    await scene.relaying.look()
    scene.connected = set()
    await scene.relaying.look()
    assert scene.told[-1] == ()
    scene.connected = {OTHERS[0]}
    await trio.sleep(ASK_AGAIN_S)
    await scene.relaying.look()
    assert scene.told[-1]
    scene.cannot_be_dialled = False
    await trio.sleep(RESERVED_S + LOOK_EVERY_S)
    await scene.relaying.look()
    assert scene.told[-1] == ()


async def test_the_detour_takes_connected_relays_first_and_dials_others() -> None:
    near, far = OTHERS[:2]
    scene = Scene({far}, {near})
    scene.known[HIDDEN] = (
        "/ip4/192.0.2.5/tcp/1",
        f"/ip4/192.0.2.2/tcp/8810/p2p/{far}/p2p-circuit",
        f"/ip4/192.0.2.3/tcp/8810/p2p/{near}/p2p-circuit",
        f"/ip4/192.0.2.4/tcp/8810/p2p/{ME}/p2p-circuit",
    )
    await scene.relaying.detour(HIDDEN)
    assert scene.circuits.ways == [(near, HIDDEN), (far, HIDDEN)]
    assert scene.host.dialled == [(far, [Address("192.0.2.2", 8810)])]


@pytest.mark.parametrize("known", [(), ("/ip4/192.0.2.5/tcp/1",)])
async def test_without_a_relay_there_is_no_detour(known: tuple[str, ...]) -> None:
    scene = Scene(set(), set())
    scene.known[HIDDEN] = known
    with pytest.raises(NodeUnreachable):
        await scene.relaying.detour(HIDDEN)


class Listening:
    """A host that hands the streams which come to `handler`."""

    handler: Any = None

    def serve(self, protocol: str, handler: Any) -> None:
        self.handler = handler


class Silent:
    """A stream on which nothing comes."""

    def __init__(self) -> None:
        self.reset_at_s: float | None = None

    async def read(self, n: int) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def reset(self) -> None:
        self.reset_at_s = trio.current_time()


async def test_so_many_connections_through_relays_are_taken_at_a_time_also_after_others_failed(
    autojump_clock: trio.abc.Clock,
) -> None:
    host = Listening()
    client.Circuits(host)  # type: ignore[arg-type]
    for _ in range(2):
        began_s = trio.current_time()
        streams = [Silent() for _ in range(ACCEPTING_MAX + 3)]
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(host.handler, OTHERS[0], stream)
        took_s = sorted((each.reset_at_s or 0.0) - began_s for each in streams)
        assert took_s == pytest.approx([0.0] * 3 + [ANSWER_S] * ACCEPTING_MAX)


@pytest.mark.parametrize(
    ("control", "hides", "serves"),
    [(None, False, True), ([("a", False)], True, False), ([("a", False), ("b", True)], False, True)],
    ids=["nobody has tried", "in vain", "one address answers"],
)
def test_a_node_is_hidden_once_others_have_tried_all_its_addresses_in_vain(
    control: list[tuple[str, bool]] | None, hides: bool, serves: bool
) -> None:
    found = None if control is None else SimpleNamespace(control=control)
    for uses_relays in (True, False):
        user: Any = SimpleNamespace(reachability=found)
        parts: Any = None
        node = _Node(parts, parts, parts, user, uses_relays=uses_relays)
        assert node.is_hidden() is (hides and uses_relays)
        assert node.serves() is serves
