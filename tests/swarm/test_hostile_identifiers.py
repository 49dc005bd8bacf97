"""Well-formed messages with identifiers that are none: refused where they arrive, and counted against the
node that sent them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from swarmllm.errors import NodeUnreachable, RemoteError
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.peer_exchange import PeerExchange
from swarmllm.swarm.discovery.reachability import ReachabilityChecks
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.libp2p.gossip import HEALTH, MODELS
from swarmllm.swarm.membership.identity import Identity, load_or_create_identity, verify
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.records.exchange import KIND_ENVELOPES
from swarmllm.swarm.records.spread import RecordSpread
from swarmllm.swarm.router import UnreadableRequest
from swarmllm_proto.envelope import Envelope, Heartbeat, unseal
from swarmllm_proto.identifiers import Multiaddr, NodeId
from swarmllm_proto.router_messages import KnownPeer, PeerExchangeResponse, encode_neighbour

from .conftest import Libp2pSwarm, until
from .handlers import Listener
from .test_address_sources import Book

NO_ID = "0OIl0OIl0OIl"
DEAD_END = "/ip4/127.0.0.1/tcp/9"
FORWARDER = node_id_named("forwarder")


class Notes:
    def __init__(self) -> None:
        self.told: list[tuple[str, TrustEvent, str]] = []

    def __call__(self, node_id: str, event: TrustEvent, detail: str = "") -> None:
        self.told.append((node_id, event, detail))

    @property
    def blamed(self) -> set[str]:
        assert all(event is TrustEvent.BROKE_PROTOCOL for _, event, _ in self.told)
        return {node_id for node_id, _, _ in self.told}


@pytest.fixture
def author(tmp_path: Path) -> Identity:
    (tmp_path / "author").mkdir()
    return load_or_create_identity(tmp_path / "author")


class NothingGetsThrough(Listener):
    def heard(self, envelope: Envelope) -> None:
        pytest.fail("it got through")


def spread_of(nursery: trio.Nursery, tmp_path: Path, note: Notes, ask: Any = None) -> RecordSpread:
    me = load_or_create_identity(tmp_path)
    return RecordSpread(
        me,
        verify,
        1,
        nursery,
        ChangeFeed(),
        ask=ask,
        connected={FORWARDER},
        listener=NothingGetsThrough(),
        note=note,
    )


def forged(author: Identity, kind: type = Envelope, **changes: Any) -> bytes:
    """Sealed by the author, whatever it says."""
    fields = {"beat": 1} if kind is Heartbeat else {"addresses": [], "data_addresses": [], "record": b""}
    domain = f"swarmllm {kind.__name__.lower()} 1:".encode()
    statement = {"v": 1, "node_id": author.node_id, "started_at_ms": 1, "sequence": 1, **fields, **changes}
    body = msgspec.msgpack.encode(statement)
    return msgspec.msgpack.encode([body, author.sign(domain + body)])


LIES: dict[str, dict[str, Any]] = {
    "addresses[1]": {"addresses": (DEAD_END, f"{DEAD_END}/p2p/{NO_ID}/p2p-circuit")},
    "data_addresses[0]": {"data_addresses": ("/ip4/999.0.0.1/tcp/1",)},
    "addresses[0]": {"addresses": ("/dns4/my..host/tcp/1",)},
}


def test_what_is_forged_here_differs_in_nothing_else(author: Identity) -> None:
    envelope = Envelope(node_id=author.node_id, started_at_ms=1, sequence=1)
    assert unseal(forged(author), Envelope, verify) == envelope
    assert unseal(forged(author, Heartbeat), Heartbeat, verify).beat == 1


@pytest.mark.parametrize("field", LIES)
async def test_a_signed_envelope_with_an_address_that_is_none_is_blamed_on_its_author(
    tmp_path: Path, author: Identity, field: str
) -> None:
    note = Notes()
    sealed = forged(author, **LIES[field])
    async with trio.open_nursery() as nursery:
        spread = spread_of(nursery, tmp_path, note)
        assert not spread.validate(MODELS, sealed)
        assert note.blamed == {author.node_id}
        assert all(field in detail for *_, detail in note.told)
        assert spread.envelope(author.node_id) is None


async def test_the_subject_of_a_forged_envelope_is_not_blamed(tmp_path: Path, author: Identity) -> None:
    note = Notes()
    victim = node_id_named("victim")
    lies = [LIES["addresses[1]"] | {"node_id": victim}, {"node_id": victim}, {"node_id": NO_ID}]
    async with trio.open_nursery() as nursery:
        spread = spread_of(nursery, tmp_path, note)
        for lie in lies:
            assert not spread.validate(MODELS, forged(author, **lie))
        assert not spread.validate(HEALTH, forged(author, Heartbeat, node_id=victim))
    assert note.blamed == set()


async def test_another_version_is_nobodys_fault(tmp_path: Path, author: Identity) -> None:
    note = Notes()
    async with trio.open_nursery() as nursery:
        spread = spread_of(nursery, tmp_path, note)
        assert spread.validate(MODELS, forged(author, v=2, **LIES["addresses[1]"])) is None
        assert spread.validate(MODELS, forged(author, v=2)) is None
    assert note.blamed == set()


async def test_a_neighbour_whose_answer_names_no_ids_is_blamed(tmp_path: Path, author: Identity) -> None:
    note = Notes()
    digests = msgspec.msgpack.encode([(NO_ID, 1, 1, 0.0)])
    envelopes = msgspec.msgpack.encode([forged(author, **LIES["addresses[1]"])])

    async def ask(node_id: str, kind: int, body: bytes) -> bytes:
        return envelopes if kind == KIND_ENVELOPES else digests

    async with trio.open_nursery() as nursery:
        spread = spread_of(nursery, tmp_path, note, ask)
        with pytest.raises(RemoteError):
            await spread.exchange.synchronise(FORWARDER)
        assert note.blamed == {FORWARDER}
        await spread.exchange.fetch(FORWARDER, {author.node_id: 0.0})
        assert note.blamed == {FORWARDER, author.node_id}
        with pytest.raises(UnreadableRequest, match=r"\[0\]"):
            spread.exchange.answer(KIND_ENVELOPES, msgspec.msgpack.encode([NO_ID]))


@pytest.mark.parametrize(
    ("node_id", "address", "field"),
    [
        (NO_ID, DEAD_END, "peers[1].node_id"),
        (node_id_named("c"), f"/ip4/192.0.2.1/tcp/1/p2p/{NO_ID}", "addresses[0]"),
    ],
    ids=["id", "relay"],
)
async def test_a_peer_exchange_with_an_id_that_is_none_teaches_nothing(
    node_id: NodeId, address: str, field: str
) -> None:
    note, book = Notes(), Book()
    peers = [
        {"node_id": node_id_named("b"), "addresses": [DEAD_END]},
        {"node_id": node_id, "addresses": [address]},
    ]

    async def ask(node_id: str, body: bytes) -> bytes:
        empty = msgspec.msgpack.decode(encode_neighbour(PeerExchangeResponse(peers=())))
        return msgspec.msgpack.encode(empty | {"peers": peers})

    exchange = PeerExchange(ask, book, note)
    await exchange.learn_from(FORWARDER)
    assert book.heard == {}
    assert note.blamed == {FORWARDER}
    assert field in note.told[0][2]
    with pytest.raises(UnreadableRequest):
        exchange.answer(FORWARDER, b"\xc1")


async def test_a_dial_back_from_nowhere_is_blamed_and_another_peer_is_asked() -> None:
    note = Notes()

    async def ask(node_id: str, body: bytes) -> bytes:
        return msgspec.msgpack.encode({"observed_ip": "somewhere"})

    checks = ReachabilityChecks(ask, {FORWARDER}, random.Random(1), note)
    assert not await checks.check()
    assert note.blamed == {FORWARDER}
    assert "observed_ip" in note.told[0][2]


async def test_a_member_that_names_no_ids_ends_nobody_who_meets_it(libp2p_swarm: Libp2pSwarm) -> None:
    """Its signed envelope names a relay without an id, its answer to a peer exchange a peer without one. The
    third node hears of it from both others."""
    hostile = await libp2p_swarm.start("hostile")
    lie = forged(hostile._identity, started_at_ms=2**52, sequence=9, **LIES["addresses[1]"])
    hostile.spread._book.write_own(hostile.spread.own, lie, trio.current_time())
    peers = (
        KnownPeer(node_id=NodeId(NO_ID), addresses=(Multiaddr(DEAD_END), Multiaddr("/ip4/127.0.0.1/tcp/10"))),
    )
    hostile._peer_exchange.answer = lambda sender, body: encode_neighbour(  # type: ignore[method-assign]
        PeerExchangeResponse(peers=peers)
    )
    victim = await libp2p_swarm.start("victim")
    await until(victim, lambda: hostile.node_id in victim.connected())
    assert hostile.spread._gossip is not None
    await hostile.spread._gossip.publish(MODELS, lie)
    third = await libp2p_swarm.start("third")
    await until(third, lambda: victim.node_id in third.connected())
    for node in (victim, third):
        assert node.spread.envelope(hostile.node_id) is None
        assert not node.host.is_connected(NodeId(NO_ID))
        with pytest.raises(NodeUnreachable):
            await node.host.dial(node_id_named("somebody"), [])
