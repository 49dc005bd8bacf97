"""One attacker under many names, at both ports of a real node: whom the node knows has a place."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data.data_plane import HANDSHAKES_MAX
from swarmllm.swarm.data.wire import HandshakeFailed, NoiseWire, noise_handshake
from swarmllm.swarm.discovery.addresses import Address, OwnAddresses
from swarmllm.swarm.libp2p.host import Host, Stream, run_libp2p
from swarmllm.swarm.libp2p.request_protocol import PROTOCOL
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import Identity, load_or_create_identity
from swarmllm.swarm.membership.peer_lists import PeerLists
from swarmllm.swarm.peers.connection_limits import CONNECTIONS_MAX
from swarmllm.swarm.settings import SwarmSettings

from .conftest import DEADLINE_S, until

pytestmark = pytest.mark.slow

N_PLACES = 3
LOOK_EVERY_S = 0.02


@asynccontextmanager
async def node(
    folder: Path, *bootstrap: str, allow: str = "", max_connections: int = CONNECTIONS_MAX
) -> AsyncIterator[Libp2pRouter]:
    settings = SwarmSettings(
        folder,
        "127.0.0.1",
        0,
        0,
        bootstrap=bootstrap,
        max_connections=max_connections,
        mdns=False,
        lists=PeerLists.of([allow] if allow else [], [], only_allowed=False),
    )
    async with open_libp2p_router(settings) as router:
        yield router


def serve(victim: Libp2pRouter) -> trio.Event:
    """Set when the first message has come."""
    arrived = trio.Event()

    async def note(_sender: str, _header: bytes, _payload: memoryview) -> None:
        arrived.set()

    async def answer(_sender: str, body: bytes) -> bytes:
        return body

    victim.serve(answer, note)
    return arrived


@pytest.fixture
def friend_id(tmp_path: Path) -> str:
    (tmp_path / "friend").mkdir()
    return load_or_create_identity(tmp_path / "friend").node_id


@asynccontextmanager
async def sybils(victim: Libp2pRouter, n_names: int) -> AsyncIterator[None]:
    """Each connects once and stays if it may; it takes questions, as a node does, and answers none."""
    where = [Address.parse(victim.addresses[0])]
    async with AsyncExitStack() as stack:
        for _ in range(n_names):
            host = Host(somebody(), ConnectionGater())
            host.serve(PROTOCOL, think)
            await stack.enter_async_context(run_libp2p(host, OwnAddresses(("127.0.0.1",), (), ()), 0))
            with trio.fail_after(DEADLINE_S), contextlib.suppress(NodeUnreachable):
                await host.dial(victim.node_id, where)
        yield


async def think(_sender: str, _stream: Stream) -> None:
    await trio.sleep_forever()


def somebody() -> Identity:
    keys = create_new_key_pair()
    return Identity(str(ID.from_pubkey(keys.public_key)), keys)


async def test_who_is_known_gets_in_where_strangers_have_every_place_and_is_not_pushed_out(
    tmp_path: Path, friend_id: str
) -> None:
    running = node(tmp_path / "victim", allow=friend_id, max_connections=N_PLACES)
    async with running as victim, sybils(victim, 2 * N_PLACES):
        serve(victim)
        await few_connections(victim)
        assert sum(victim.host.n_connections().values()) == N_PLACES
        async with node(tmp_path / "friend", *victim.addresses) as friend:
            await until(victim, lambda: friend_id in victim.connected())
            since = victim.peers()[0].connected_since
            async with sybils(victim, 2 * N_PLACES):
                await few_connections(victim)
                with trio.fail_after(DEADLINE_S):
                    await friend.request(victim.node_id, b"alive")
                assert [(p.node_id, p.connected_since) for p in victim.peers()] == [(friend_id, since)]


async def few_connections(victim: Libp2pRouter) -> None:
    with trio.fail_after(DEADLINE_S):
        # The library's own book-keeping, which it tells nobody.
        while sum(victim.host.n_connections().values()) > N_PLACES:  # noqa: ASYNC110
            await trio.sleep(LOOK_EVERY_S)


async def test_names_that_take_every_data_connection_keep_no_peer_from_its_own(
    tmp_path: Path, friend_id: str
) -> None:
    async with node(tmp_path / "victim") as victim, AsyncExitStack() as wires:
        victim.plane.connections_max = N_PLACES
        arrived = serve(victim)
        for _ in range(N_PLACES):
            wire = await knock(victim)
            wires.callback(wire.abort)
        async with node(tmp_path / "friend", *victim.addresses) as friend:
            await until(friend, lambda: victim.node_id in friend.connected())
            with trio.fail_after(DEADLINE_S):
                await friend.send(victim.node_id, b"hello")
                await arrived.wait()
            # More names: the friend, who is no more than a stranger with a connection here, stays.
            for _ in range(2 * N_PLACES):
                try:
                    wires.callback((await knock(victim)).abort)
                except HandshakeFailed:
                    continue
            assert victim.connected() == {friend_id}


async def test_silence_at_the_data_port_keeps_nobody_out(tmp_path: Path) -> None:
    async with node(tmp_path / "victim") as victim, AsyncExitStack() as silent:
        for _ in range(HANDSHAKES_MAX + 1):
            await silent.enter_async_context(await trio.open_tcp_stream("127.0.0.1", data_port(victim)))
        (await knock(victim)).abort()


async def knock(victim: Libp2pRouter) -> NoiseWire:
    """A data connection under a new name."""
    stream = await trio.open_tcp_stream("127.0.0.1", data_port(victim))
    _, wire = await noise_handshake(stream, somebody(), victim.node_id)
    return wire


def data_port(router: Libp2pRouter) -> int:
    return Address.parse(router.data_addresses[0]).port
