"""What libp2p's own protocols may be fed with: identify, ping, gossip's control messages, names that are not
one's own, connections without end. One attack per test; nobody else notices any of them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p import guards as host_guards
from swarmllm.swarm.libp2p.gossip import HEALTH, MODELS
from swarmllm.swarm.libp2p.request_protocol import PROTOCOL
from swarmllm.swarm.libp2p_router import Libp2pRouter
from swarmllm.swarm.peers import liveness

from .conftest import DEADLINE_S, Libp2pSwarm, meet, until
from .hostile import stranger, works_before_and_after

pytestmark = pytest.mark.slow

PUSH = TProtocol("/ipfs/id/push/1.0.0")
PING = TProtocol("/ipfs/ping/1.0.0")
GOSSIP = TProtocol("/meshsub/1.1.0")
LOOK_EVERY_S = 0.02


async def opened(host: Any, victim: Libp2pRouter, protocol: TProtocol) -> Any:
    with trio.fail_after(DEADLINE_S):
        return await host.new_stream(ID.from_base58(victim.node_id), [protocol])


async def read_to_the_end(read: Callable[[int], Awaitable[bytes]]) -> None:
    with trio.fail_after(DEADLINE_S):
        while await read(1000):
            pass


async def comes_true(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_S):
        # The library's own state, which it tells nobody.
        while not condition():  # noqa: ASYNC110
            await trio.sleep(LOOK_EVERY_S)


def descriptions() -> dict[str, bytes]:
    address = Multiaddr("/ip4/192.0.2.1/tcp/1").to_bytes()
    other = create_new_key_pair().public_key.serialize()
    return {
        "no protobuf": b"\xff" * 100,
        "empty": b"",
        "10,000 protocols": Identify(protocols=[f"/{n}" for n in range(10_000)]).SerializeToString(),
        "5,000 addresses": Identify(listen_addrs=[address] * 5_000).SerializeToString(),
        "addresses of junk": Identify(listen_addrs=[b"\xff\xff", b"", b"\x04"]).SerializeToString(),
        "another's key": Identify(public_key=other).SerializeToString(),
        "a key of junk": Identify(public_key=b"\x08\x01\x12\xff\xff").SerializeToString(),
        "a record of junk": Identify(signedPeerRecord=b"\x0a\xff").SerializeToString(),
        "observed junk": Identify(observed_addr=b"\xff" * 20).SerializeToString(),
    }


async def test_identify_may_be_told_anything(libp2p_swarm: Libp2pSwarm) -> None:
    """It asks nobody, and takes what is pushed."""
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        for told in descriptions().values():
            for sent in (encode_varint_prefixed(told), encode_varint_prefixed(told)[:-1], b"\xff" * 11):
                stream = await opened(host, victim, PUSH)
                await stream.write(sent)
                await stream.close()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert host.get_id().to_base58() not in victim.connected()


async def test_of_peers_that_left_little_is_kept(
    libp2p_swarm: Libp2pSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps all that a peer ever told of itself."""
    monkeypatch.setattr(host_guards, "DEPARTED_MAX", 3)
    async with works_before_and_after(libp2p_swarm) as victim:
        store = victim.host.libp2p_host.get_peerstore()
        for _ in range(8):
            async with stranger(victim) as host:
                stream = await opened(host, victim, PUSH)
                await stream.write(encode_varint_prefixed(descriptions()["10,000 protocols"]))
                await stream.close()
            node_id = host.get_id().to_base58()
            await comes_true(lambda node_id=node_id: not victim.host.is_connected(node_id))
        for _ in range(8):
            nobody = str(ID.from_pubkey(create_new_key_pair().public_key))
            with pytest.raises(NodeUnreachable):
                await victim.host.dial(nobody, [Address("127.0.0.1", 1)])
        staying = 2  # The victim itself, and its friend.
        await comes_true(lambda: len(store.peer_ids()) <= staying + host_guards.DEPARTED_MAX)


async def test_pings_that_nobody_takes_back(libp2p_swarm: Libp2pSwarm) -> None:
    async with (
        works_before_and_after(libp2p_swarm) as victim,
        stranger(victim) as host,
        trio.open_nursery() as nursery,
    ):
        for sent in (bytes(32 * 1_000), bytes(31), b""):
            # The library takes two at a time, and may refuse the third while it still agrees on the protocol.
            with suppress(StreamFailure):
                stream = await opened(host, victim, PING)
                nursery.start_soon(_write_and_ignore, stream.write, sent)
        await trio.testing.wait_all_tasks_blocked(0.1)
        nursery.cancel_scope.cancel()


async def _write_and_ignore(write: Callable[[bytes], Awaitable[None]], sent: bytes) -> None:
    try:
        await write(sent)
    except StreamError:
        return


def controls() -> dict[str, rpc_pb2.RPC]:
    source = random.Random(4)
    ids = [source.randbytes(32) for _ in range(5_000)]
    topics = [MODELS, HEALTH, "swarm/none", "x" * 1000]
    control = rpc_pb2.ControlMessage
    return {
        "5,000 offers": rpc_pb2.RPC(
            control=control(ihave=[rpc_pb2.ControlIHave(topicID=t, messageIDs=ids) for t in topics])
        ),
        "5,000 wishes": rpc_pb2.RPC(control=control(iwant=[rpc_pb2.ControlIWant(messageIDs=ids)])),
        "5,000 refusals": rpc_pb2.RPC(control=control(idontwant=[rpc_pb2.ControlIDontWant(messageIDs=ids)])),
        "1,000 grafts": rpc_pb2.RPC(
            control=control(graft=[rpc_pb2.ControlGraft(topicID=t) for t in topics * 250])
        ),
        "1,000 prunes": rpc_pb2.RPC(
            control=control(prune=[rpc_pb2.ControlPrune(topicID=t, backoff=2**62) for t in topics * 250])
        ),
        "4,000 topics": rpc_pb2.RPC(
            subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=f"t{n}") for n in range(4_000)]
        ),
        "6,000 topics": rpc_pb2.RPC(
            subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=f"t{n}") for n in range(6_000)]
        ),
    }


@pytest.mark.parametrize("kind", list(controls()))
async def test_gossip_may_be_told_any_control_message(libp2p_swarm: Libp2pSwarm, kind: str) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        stream = await opened(host, victim, GOSSIP)
        for _ in range(3):
            await stream.write(encode_varint_prefixed(controls()[kind].SerializeToString()))
        await trio.testing.wait_all_tasks_blocked(0.05)


async def test_gossip_larger_than_allowed_ends_its_stream(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        for claimed in (b"\xff\xff\xff\x7f", b"\xff" * 11):
            stream = await opened(host, victim, GOSSIP)
            await stream.write(claimed)
            with pytest.raises(StreamError):
                await read_to_the_end(stream.read)


async def test_nobody_answers_in_the_place_of_another(libp2p_swarm: Libp2pSwarm) -> None:
    """On the control plane; of the data plane see test_hostile_peers."""
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as impostor:
        port = int(impostor.get_addrs()[0].value_for_protocol("tcp"))
        somebody = str(ID.from_pubkey(create_new_key_pair().public_key))
        with pytest.raises(NodeUnreachable):
            await victim.host.dial(somebody, [Address("127.0.0.1", port)])
        assert not victim.host.is_connected(somebody)


class BorrowedName(PrivateKey):  # type: ignore[misc]
    """One key's signatures under another key's name."""

    def __init__(self, signer: PrivateKey, name: PublicKey) -> None:
        self._signer = signer
        self._name = name

    def sign(self, data: bytes) -> bytes:
        signed: bytes = self._signer.sign(data)
        return signed

    def get_public_key(self) -> PublicKey:
        return self._name

    def to_bytes(self) -> bytes:
        content: bytes = self._signer.to_bytes()
        return content

    def get_type(self) -> Any:
        return self._signer.get_type()


@pytest.mark.parametrize("name", ["its own", "another's"])
async def test_nobody_signs_in_the_name_of_another(libp2p_swarm: Libp2pSwarm, name: str) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        mine = create_new_key_pair()
        (friend,) = victim.connected()
        shown = mine.public_key if name == "its own" else ID.from_base58(friend).extract_public_key()
        host = new_host(key_pair=KeyPair(BorrowedName(mine.private_key, shown), shown))
        async with host.run(listen_addrs=[]):
            with trio.fail_after(DEADLINE_S):
                if name == "its own":
                    await host.connect(info_from_p2p_addr(Multiaddr(victim.addresses[0])))
                else:
                    with pytest.raises(SwarmException):
                        await host.connect(info_from_p2p_addr(Multiaddr(victim.addresses[0])))
            await host.close()


async def muxed_and_left(upgrader: Any, victim: Libp2pRouter) -> None:
    """As far as the multiplexer, and gone without a word."""
    stream = await trio.open_tcp_stream("127.0.0.1", victim.host.port)
    victim_id = ID.from_base58(victim.node_id)
    raw = RawConnection(TrioTCPStream(stream), True)
    secured = await upgrader.upgrade_security(raw, True, victim_id)
    await upgrader.upgrade_connection(secured, victim_id)
    await trio.aclose_forcefully(stream)


async def test_three_hundred_reconnections_leave_room_for_more(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        limiter = victim.host.libp2p_host.get_network()._inbound_limiter
        before = limiter.borrowed_tokens
        upgrader = new_host(key_pair=create_new_key_pair()).get_network().upgrader
        for _ in range(30):
            with trio.fail_after(DEADLINE_S):
                async with trio.open_nursery() as nursery:
                    # No more: a peer has eight connections at most.
                    for _ in range(10):
                        nursery.start_soon(muxed_and_left, upgrader, victim)
        await comes_true(lambda: limiter.borrowed_tokens <= before)
        async with stranger(victim) as host:
            assert victim.host.is_connected(host.get_id().to_base58())


async def test_silence_on_every_place_keeps_nobody_out(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, AsyncExitStack() as silent:
        network = victim.host.libp2p_host.get_network()
        # Nobody is let in because another one has been silent for too long.
        network.connection_config.inbound_upgrade_timeout = 2 * DEADLINE_S
        for _ in range(network._inbound_limiter.total_tokens + 1):
            await silent.enter_async_context(await trio.open_tcp_stream("127.0.0.1", victim.host.port))
        with trio.fail_after(DEADLINE_S):
            async with stranger(victim) as host:
                assert victim.host.is_connected(host.get_id().to_base58())


@asynccontextmanager
async def mute(victim: Libp2pRouter) -> AsyncIterator[Any]:
    """A stranger that takes questions and answers none."""
    async with stranger(victim) as host:

        async def say_nothing(_stream: Any) -> None:
            await trio.sleep_forever()

        host.set_stream_handler(TProtocol(PROTOCOL), say_nothing)
        yield host


async def test_who_does_not_answer_keeps_nobody_from_being_greeted(
    libp2p_swarm: Libp2pSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_TURN_S", 0.2)
    async with works_before_and_after(libp2p_swarm) as victim, AsyncExitStack() as mutes:
        for _ in range(2 * liveness.EXCHANGES_MAX):
            await mutes.enter_async_context(mute(victim))
        newcomer = await libp2p_swarm.start("newcomer")
        await until(victim, lambda: newcomer.node_id in victim.connected())
        await libp2p_swarm.stop("newcomer")
        await until(victim, lambda: newcomer.node_id not in victim.connected())


def open_sockets() -> set[str]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(path.readlink())
            found |= {target} if target.startswith("socket:") else set()
    return found


async def test_the_end_of_a_node_leaves_no_socket_open(libp2p_swarm: Libp2pSwarm) -> None:
    before = open_sockets()
    victim, friend = await libp2p_swarm.start("victim"), await libp2p_swarm.start("friend")
    await meet(victim, friend)
    ports = [Address.parse(text).port for text in (victim.addresses[0], victim.data_addresses[0])]  # type: ignore[attr-defined]
    half_open = [await trio.open_tcp_stream("127.0.0.1", port) for port in ports for _ in range(3)]
    # They have been accepted, and nothing was said on them yet.
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert len(open_sockets() - before) > 2 * len(half_open)
    await libp2p_swarm.stop("friend")
    await libp2p_swarm.stop("victim")
    for stream in half_open:
        await stream.aclose()
    assert open_sockets() <= before
