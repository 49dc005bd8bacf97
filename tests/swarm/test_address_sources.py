"""How nodes find each other again: what they remember, what they tell newcomers, whether they can be
reached."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable, RemoteError
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.peer_exchange import ENOUGH_CONNECTIONS, ENOUGH_KNOWN, PeerExchange
from swarmllm.swarm.discovery.reachability import ReachabilityChecks
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.store import PeerStore, open_peer_memory
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.identifiers import Multiaddr, NodeId
from swarmllm_proto.router_messages import (
    PEERS_MAX,
    DialBack,
    DialBackRequest,
    DialBackResponse,
    KnownPeer,
    PeerExchangeRequest,
    PeerExchangeResponse,
    decode_neighbour,
    encode_neighbour,
)

from .conftest import DEADLINE_S, Libp2pSwarm, until
from .test_data_plane import ELSEWHERE, two_nodes

A, B, ME, OLD, X = (node_id_named(name) for name in ("a", "b", "me", "old", "x"))
Known = Sequence[tuple[NodeId, tuple[Multiaddr, ...]]]
WHERE = ("/ip4/192.0.2.1/tcp/8810",)


class Book:
    """What a node knows of others' addresses."""

    def __init__(self, connected: Known = (), remembered: Known = ()) -> None:
        self.connected, self.remembered = connected, remembered
        self.heard: dict[str, list[Address]] = {}
        self.n_envelopes = len(connected)

    def n_heard_of(self) -> int:
        return self.n_envelopes

    def hear(self, node_id: str, addresses: list[Address]) -> None:
        self.heard[node_id] = addresses

    def connected_addresses(self) -> Known:
        return self.connected

    def remembered_addresses(self) -> Known:
        return self.remembered


async def refuse(node_id: str, body: bytes) -> bytes:
    raise RemoteError("requests of kind 3 are not known here")


async def test_a_newcomer_learns_of_the_connected_and_the_remembered() -> None:
    teller = PeerExchange(refuse, Book([(B, WHERE), (ME, WHERE)], [(OLD, WHERE)]))

    async def ask(node_id: str, body: bytes) -> bytes:
        return teller.answer(ME, body)

    hearing = Book()
    await PeerExchange(ask, hearing).learn_from(A)
    there = [Address("192.0.2.1", 8810)]
    assert hearing.heard == {B: there, OLD: there}
    limited = decode_neighbour(
        teller.answer(ME, encode_neighbour(PeerExchangeRequest(n_max=1))), PeerExchangeResponse
    )
    assert [peer.node_id for peer in limited.peers] == [B]


async def test_who_knows_enough_or_gets_nonsense_hears_nothing() -> None:
    hearing = Book()

    async def nonsense(node_id: str, body: bytes) -> bytes:
        return b"\xc1"

    async def unusable(node_id: str, body: bytes) -> bytes:
        peers = (KnownPeer(node_id=X, addresses=("/dns4/example.org/tcp/1",)),)
        return encode_neighbour(PeerExchangeResponse(peers=peers))

    async def much(node_id: str, body: bytes) -> bytes:
        pytest.fail("asked although it knows enough")

    many = [(node_id_named(str(n)), WHERE) for n in range(ENOUGH_CONNECTIONS)]
    await PeerExchange(nonsense, hearing).learn_from(A)
    await PeerExchange(refuse, hearing).learn_from(A)
    await PeerExchange(much, Book(many)).learn_from(A)
    informed = Book(many[:1])
    informed.n_envelopes = ENOUGH_KNOWN
    await PeerExchange(much, informed).learn_from(A)
    assert hearing.heard == {}
    await PeerExchange(unusable, hearing).learn_from(A)
    assert hearing.heard == {X: []}
    with pytest.raises(RequestRefused):
        PeerExchange(refuse, hearing).answer(A, b"\xc1")
    too_many = tuple(KnownPeer(node_id=X, addresses=WHERE) for _ in range(PEERS_MAX + 1))
    with pytest.raises(Exception, match="length"):
        decode_neighbour(encode_neighbour(PeerExchangeResponse(peers=too_many)), PeerExchangeResponse)


async def test_a_check_asks_another_peer_where_one_does_not_answer() -> None:
    asked: list[str] = []

    async def ask(node_id: str, body: bytes) -> bytes:
        decode_neighbour(body, DialBackRequest)
        asked.append(node_id)
        if len(asked) == 1:
            raise NodeUnreachable("gone")
        return encode_neighbour(DialBackResponse(control=(DialBack(address=WHERE[0], reached=True),)))

    checks = ReachabilityChecks(ask, {A, B, X}, random.Random(1))
    assert await checks.check()
    assert checks.result is not None
    assert checks.result.asked == asked[1]
    assert (checks.result.control, checks.result.data) == (((WHERE[0], True),), ())
    assert not await ReachabilityChecks(ask, (), random.Random(1)).check()


async def test_who_is_refused_asks_again_ever_more_rarely_and_who_is_alone_waits_for_peers(
    autojump_clock: MockClock,
) -> None:
    connected: set[NodeId] = set()
    asked_at_s: list[float] = []

    async def ask(node_id: str, body: bytes) -> bytes:
        asked_at_s.append(trio.current_time())
        raise RemoteError("others are being dialled back")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ReachabilityChecks(ask, connected, random.Random(1)).run)
        await trio.sleep(300.0)
        connected.add(A)
        met_at_s = trio.current_time()
        await trio.sleep(600.0)
        nursery.cancel_scope.cancel()
    assert asked_at_s[0] - met_at_s <= 10.0
    waits_s = [later - sooner for sooner, later in itertools.pairwise(asked_at_s)]
    assert waits_s[0] <= 10.0
    assert waits_s == sorted(waits_s)
    assert 45.0 <= waits_s[-1] <= 65.0


@pytest.mark.slow
async def test_a_peer_dials_back_and_says_which_addresses_lead_here(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        with trio.fail_after(DEADLINE_S):
            while a.reachability is None:  # noqa: ASYNC110 (it comes once in ten minutes and has no event)
                await trio.sleep(0.05)
    assert a.reachability.asked == b.node_id
    assert a.reachability.control == tuple((text.partition("/p2p")[0], True) for text in a.addresses)
    assert a.reachability.data == tuple((text, True) for text in a.data_addresses)
    assert a.reachability.observed_ip == "127.0.0.1"


@pytest.mark.slow
async def test_an_address_that_leads_nowhere_is_said_to(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, _):
        with trio.fail_after(DEADLINE_S):
            while a.reachability is None:  # noqa: ASYNC110
                await trio.sleep(0.05)
    assert [reached for _, reached in (*a.reachability.control, *a.reachability.data)] == [False, False]


@pytest.mark.slow
async def test_a_node_finds_its_peers_again_without_the_one_it_met_them_through(
    libp2p_swarm: Libp2pSwarm, tmp_path: Path
) -> None:
    """b knows c only through a, then all restart but a, and nobody is told any address."""
    nodes = {name: await libp2p_swarm.start(name) for name in "abc"}
    b, c = nodes["b"], nodes["c"]
    await until(b, lambda: c.node_id in b.connected())
    for name in "bca":
        await libp2p_swarm.stop(name)
    known = dict(open_peer_memory(tmp_path / "b", "").known)
    assert set(known) >= {c.node_id}
    # Its port is another one in its next life: what b remembers is where c is now.
    libp2p_swarm.forget_bootstrap()
    c = await libp2p_swarm.start("c")
    where = [address.partition("/p2p")[0] for address in c.addresses]
    PeerStore(tmp_path / "b").keep_peers("", [(c.node_id, where)], 1e10)
    libp2p_swarm.forget_bootstrap()
    b = await libp2p_swarm.start("b")
    await until(b, lambda: b.connected() == {c.node_id})
