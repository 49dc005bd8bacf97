"""Two nodes that nobody can dial meet through a third that carries what it cannot read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery import reachability
from swarmllm.swarm.discovery.dht.messages import RELAY_KEY
from swarmllm.swarm.discovery.relay import client, service
from swarmllm.swarm.discovery.relay.client import RelayUse
from swarmllm.swarm.discovery.relay.messages import (
    HOP,
    MESSAGE_MAX_BYTES,
    STOP,
    Hop,
    Status,
    Stop,
    decode_hop,
    decode_stop,
    encode_hop,
    encode_stop,
)
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.membership.network_key import NetworkFile, new_secret, private_network
from swarmllm.swarm.peers.reachable import IDLE_S
from swarmllm.swarm.settings import RELAY_LIMITS, RelayLimits, SwarmSettings
from swarmllm_proto.identifiers import NodeId

from ..conftest import DEADLINE_S, until
from ..dht.swarm_of import contacts
from ..hostile import stranger

pytestmark = pytest.mark.slow

NOWHERE = "127.77.0.1"
"""On this machine, and nobody listens there."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(reachability, "_FIRST_CHECK_S", 0.2)
    monkeypatch.setattr(reachability, "_RETRY_S", 0.2)
    monkeypatch.setattr(reachability, "DIAL_BACK_EVERY_S", 0.1)


@asynccontextmanager
async def node(
    folder: Path,
    name: str,
    *bootstrap: str,
    hidden: bool = True,
    relays: bool = False,
    punches: bool = False,
    secret: bytes | None,
    limits: RelayLimits = RELAY_LIMITS,
    max_peers: int = 16,
) -> AsyncIterator[Libp2pRouter]:
    home = folder / name
    home.mkdir()
    if secret is not None:
        NetworkFile(home).change(lambda _: private_network(secret))
    settings = SwarmSettings(
        home,
        "127.0.0.1",
        0,
        0,
        bootstrap=bootstrap,
        mdns=False,
        announce=(NOWHERE,) if hidden else (),
        relay_service=relays,
        relay_limits=limits,
        max_peers=max_peers,
        hole_punching=punches,
    )
    async with open_libp2p_router(settings) as router:
        yield router


@pytest.mark.parametrize("is_private", [False, True], ids=["open", "private"])
async def test_hidden_nodes_talk_through_a_relay_on_both_planes(tmp_path: Path, is_private: bool) -> None:
    secret = new_secret() if is_private else None
    arrived = trio.Event()
    payloads: list[bytes] = []

    async def answer(sender: str, body: bytes) -> bytes:
        return sender.encode() + body

    async def take(sender: str, header: bytes, payload: memoryview) -> None:
        payloads.append(bytes(payload))
        if header == b"last":
            arrived.set()

    async with (
        node(tmp_path, "relay", hidden=False, relays=True, secret=secret) as relay,
        node(tmp_path, "a", relay.addresses[0], secret=secret) as a,
        node(tmp_path, "b", relay.addresses[0], secret=secret) as b,
    ):
        a.serve(answer, take)
        await until(b, lambda: a.node_id in b.connected())
        await until(a, lambda: b.node_id in a.connected())
        assert not a.host.is_direct(b.node_id)
        with trio.fail_after(DEADLINE_S):
            assert await b.request(a.node_id, b"?") == b.node_id.encode() + b"?"
            sent = [bytes([n]) * 300_000 for n in range(20)]
            for n, payload in enumerate(sent):
                await b.send(a.node_id, b"last" if n == 19 else b"more", payload)
            await arrived.wait()
        assert payloads == sent
        assert {peer.node_id: peer.data_plane for peer in b.peers()}[a.node_id] == "relay"
        relay_service = relay.wide_area.relay_service
        assert relay_service is not None
        # Two, where each dialled the other at the same moment.
        assert relay_service.book.n_circuits in (1, 2)
        with trio.fail_after(DEADLINE_S):
            # Both, though one reservation was enough to meet. It has no event.
            while relay_service.book.holders() != {a.node_id, b.node_id}:  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert a.wide_area.relaying.relays == (relay.node_id,)
        assert any("/p2p-circuit/p2p/" in text for text in a.addresses)
        circuits = [each.wide_area.relaying.circuits for each in (a, b)]
        assert [each.carriers() for each in circuits] == [{relay.node_id}] * 2
        for connection in circuits[0]._connections:
            await connection.close()
        assert circuits[0].carriers() == set()
        assert (a.wide_area.relayed(), relay.wide_area.relayed()) == ({relay.node_id}, {a.node_id, b.node_id})


async def test_a_relay_that_a_hidden_node_has_never_met_is_found_by_the_dht(tmp_path: Path) -> None:
    how: Any = {"secret": None, "max_peers": 1}
    async with (
        node(tmp_path, "known", hidden=False, secret=None) as known,
        node(tmp_path, "relay", known.addresses[0], hidden=False, relays=True, **how) as relay,
    ):
        await until(relay, lambda: known.node_id in relay.connected())
        with trio.fail_after(DEADLINE_S):
            while not known.wide_area.dht.core.providers.find(RELAY_KEY, trio.current_time()):  # noqa: ASYNC110
                await trio.sleep(0.05)
        async with node(tmp_path, "a", known.addresses[0], **how) as a:
            with trio.fail_after(DEADLINE_S):
                while a.wide_area.relaying.relays != (relay.node_id,):  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert known.wide_area.relay_service is None
            now = trio.current_time()
            assert a._unused.idle(now) == a._unused.idle(now + 2 * IDLE_S) == [], (
                "a reservation is a use while it lasts"
            )
            a.directory.wide_area.relays.drop(relay.node_id)
            assert a._unused.idle(now + 2 * IDLE_S) == [relay.node_id]


async def test_both_ends_turn_to_a_direct_connection_without_losing_a_message(tmp_path: Path) -> None:
    """Here nothing is in the way but that neither can be found: the observed address is the right one."""
    taken: list[int] = []
    over = trio.Event()

    async def take(sender: str, header: bytes, payload: memoryview) -> None:
        taken.append(int(header))
        if len(payload):
            over.set()

    async with (
        node(tmp_path, "relay", hidden=False, relays=True, secret=None) as relay,
        node(tmp_path, "a", relay.addresses[0], punches=True, secret=None) as a,
        node(tmp_path, "b", relay.addresses[0], punches=True, secret=None) as b,
    ):
        a.serve(_no_requests, take)
        await until(b, lambda: a.node_id in b.connected())
        with trio.fail_after(DEADLINE_S):
            n = 0
            # The ports of data and of libp2p get their holes beside each other: either may come first.
            while not (
                a.plane.has_direct(b.node_id)
                and b.plane.status(a.node_id).kind == "direct"
                and a.host.is_direct(b.node_id)
                and b.host.is_direct(a.node_id)
            ):
                await b.send(a.node_id, str(n).encode())
                n += 1
                await trio.sleep(0.01)
            for _ in range(100):
                await b.send(a.node_id, str(n).encode())
                n += 1
            await b.send(a.node_id, str(n).encode(), b"last")
            await over.wait()
        assert taken == list(range(n + 1))
        neighbour = b.plane._neighbours.get(a.node_id)
        sending = neighbour and neighbour.sending
        assert sending is not None
        assert sending.wire_kind == "direct"


async def _no_requests(sender: str, body: bytes) -> bytes:
    raise AssertionError("only messages")


async def _opened(host: Any, victim: Libp2pRouter, protocol: str) -> Any:
    return await host.new_stream(ID.from_base58(victim.node_id), [TProtocol(protocol)])


async def _asked(host: Any, victim: Libp2pRouter, question: Hop) -> Hop:
    stream = await _opened(host, victim, HOP)
    await stream.write(framed(encode_hop(question)))
    with trio.fail_after(DEADLINE_S):
        return decode_hop(await read_framed(stream, MESSAGE_MAX_BYTES))


async def _ended(stream: Any) -> None:
    with trio.fail_after(DEADLINE_S):
        while True:
            try:
                if not await stream.read(4096):
                    return
            except Exception:
                return


async def test_a_relay_refuses_what_it_should_and_outlives_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "READ_S", 1.5)
    nobody = contacts(1)[0].node_id
    async with (
        node(tmp_path, "relay", hidden=False, relays=True, secret=None, limits=RelayLimits(1)) as relay,
        stranger(relay) as one,
        stranger(relay) as other,
    ):
        for attack in (
            b"\xff\xff\xff\xff\xff",
            b"\xff\x7f",
            framed(b"\xff junk"),
            framed(b"\x08\x09"),
            b"\x05half",
        ):
            stream = await _opened(one, relay, HOP)
            await stream.write(attack)
            await _ended(stream)
        assert (await _asked(one, relay, Hop("connect", nobody))).status is Status.NO_RESERVATION
        assert (await _asked(one, relay, Hop("status"))).status is Status.UNEXPECTED_MESSAGE
        reserved = await _asked(one, relay, Hop("reserve"))
        assert reserved.status is Status.OK
        assert reserved.expires_at > 0
        assert (await _asked(other, relay, Hop("reserve"))).status is Status.RESERVATION_REFUSED
        assert (
            await _asked(one, relay, Hop("connect", str(one.get_id())))
        ).status is Status.PERMISSION_DENIED
        # It reserved and does not answer when it is called.
        assert (
            await _asked(other, relay, Hop("connect", str(one.get_id())))
        ).status is Status.CONNECTION_FAILED
        assert relay.wide_area.relay_service is not None
        assert relay.wide_area.relay_service.book.n_circuits == 0


async def test_a_relay_that_was_not_asked_brings_nobody(tmp_path: Path) -> None:
    async with node(tmp_path, "victim", hidden=False, secret=None) as victim, stranger(victim) as host:
        for question in (Stop("connect", contacts(1)[0].node_id), Stop("status", status=Status.OK)):
            stream = await _opened(host, victim, STOP)
            await stream.write(framed(encode_stop(question)))
            with trio.fail_after(DEADLINE_S):
                answer = decode_stop(await read_framed(stream, MESSAGE_MAX_BYTES))
            assert answer.status in (Status.PERMISSION_DENIED, Status.UNEXPECTED_MESSAGE)
        stream = await _opened(host, victim, STOP)
        await stream.write(b"\xff\xff\xff\xff")
        await _ended(stream)
        assert victim.host.connected() == {str(host.get_id())}


async def test_a_relays_other_end_must_be_who_was_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay itself plays the node that dials, under another name than it proves."""
    # A look would find that the victim needs no relay.
    monkeypatch.setattr(client, "LOOK_EVERY_S", 3600.0)
    async with node(tmp_path, "victim", hidden=False, secret=None) as victim, stranger(victim) as host:
        relay_id = str(host.get_id())
        now = trio.current_time()
        victim.directory.wide_area.relays.put(NodeId(relay_id), RelayUse(now, now + 60))
        stream = await _opened(host, victim, STOP)
        await stream.write(framed(encode_stop(Stop("connect", contacts(1)[0].node_id))))
        with trio.fail_after(DEADLINE_S):
            answer = decode_stop(await read_framed(stream, MESSAGE_MAX_BYTES))
        assert answer == Stop("status", status=Status.OK)
        await stream.write(b"\x13/multistream/1.0.0\n\x07/noise\n" + bytes(64))
        await _ended(stream)
        assert victim.host.connected() == {relay_id}


async def test_transfers_leave_half_of_what_a_relay_carries_to_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried_bytes, piece = 4 * 2**20, bytes(2**18)
    monkeypatch.setattr(service, "CIRCUIT_BYTES", carried_bytes)
    monkeypatch.setattr(client, "CIRCUIT_BYTES", carried_bytes)
    arrived = trio.Event()

    async def answer(sender: str, body: bytes) -> bytes:
        return piece

    async def take(sender: str, header: bytes, payload: memoryview) -> None:
        arrived.set()

    async with (
        node(tmp_path, "relay", hidden=False, relays=True, secret=None) as relay,
        node(tmp_path, "a", relay.addresses[0], secret=None) as a,
        node(tmp_path, "b", relay.addresses[0], secret=None) as b,
    ):
        a.serve(answer, take)
        await until(b, lambda: a.node_id in b.connected())
        await until(a, lambda: b.node_id in a.connected())
        with trio.fail_after(DEADLINE_S):
            n_bytes = 0
            refusal = ""
            while not refusal:
                try:
                    n_bytes += len(await b.fetch(a.node_id, b"piece"))
                except NodeUnreachable as error:
                    refusal = error.message
            assert refusal == f"the relay to node {a.node_id} carries no more transfers"
            assert 0.25 * carried_bytes < n_bytes < 0.75 * carried_bytes
            await b.send(a.node_id, b"a token")
            await arrived.wait()
        assert b.plane.status(a.node_id).kind == "relay"
