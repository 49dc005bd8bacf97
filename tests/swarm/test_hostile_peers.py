"""What strangers may throw at a node's ports without anybody else noticing: one test per known weakness of
the library."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from gossip_reader import ValidGossip
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data import wire
from swarmllm.swarm.data.wire import FrameKind, HandshakeFailed, NoiseWire, WireClosed, noise_handshake
from swarmllm.swarm.discovery.address_race import first_to_answer
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p.gossip import MODELS, guarded_validator
from swarmllm.swarm.libp2p.request_protocol import PROTOCOL
from swarmllm.swarm.libp2p_router import Libp2pRouter
from swarmllm.swarm.membership.identity import Identity
from swarmllm_proto.frames import encode_frame

from .conftest import DEADLINE_S, Libp2pSwarm
from .hostile import stranger, works_before_and_after

pytestmark = pytest.mark.slow


async def read_to_the_end(read: Callable[[], Awaitable[bytes]]) -> None:
    with trio.fail_after(DEADLINE_S):
        while await read():
            pass


async def raw_stream(host: Any, victim: Libp2pRouter) -> Any:
    """A stream on which no protocol is agreed yet."""
    return await host.get_network().new_stream(ID.from_base58(victim.node_id))


async def test_garbage_on_either_port_disturbs_nobody(libp2p_swarm: Libp2pSwarm) -> None:
    source = random.Random(4)
    garbage = [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x13/multistream/1.0.0\n",
        b"\x13/multistream/1.0.0\n\x07/noise\n",
        b"\x13/multistream/1.0.0\n\x07/noise\n\xff\xff" + source.randbytes(70_000),
        b"\x00\x20" + source.randbytes(32) + b"\xff\xff" + source.randbytes(100),
        *(source.randbytes(source.randrange(1, 2000)) for _ in range(20)),
    ]
    async with works_before_and_after(libp2p_swarm) as victim:
        ports = [Address.parse(text).port for text in (victim.addresses[0], victim.data_addresses[0])]
        for port in ports:
            for bytes_sent in garbage:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                async with stream:
                    try:
                        await stream.send_all(bytes_sent)
                    except trio.BrokenResourceError:
                        continue


async def test_more_half_open_handshakes_than_allowed_do_not_lock_others_out_for_long(
    libp2p_swarm: Libp2pSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        # None of them ends because it takes too long.
        monkeypatch.setattr(wire, "HANDSHAKE_S", 2 * DEADLINE_S)
        port = Address.parse(victim.data_addresses[0]).port
        idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(80)]
        closed: list[trio.SocketStream] = []

        async def wait_for_the_end(stream: trio.SocketStream) -> None:
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some(1) == b""
            closed.append(stream)
            if len(closed) == 80 - 64:
                nursery.cancel_scope.cancel()

        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for stream in idle:
                    nursery.start_soon(wait_for_the_end, stream)
        for stream in idle:
            await stream.aclose()


async def test_a_peer_without_encryption_is_refused(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        key_pair = create_new_key_pair()
        plaintext = {PLAINTEXT_PROTOCOL_ID: InsecureTransport(key_pair)}
        host = new_host(key_pair=key_pair, sec_opt=plaintext)
        async with host.run(listen_addrs=[]):
            with pytest.raises(SwarmException), trio.fail_after(DEADLINE_S):
                await host.connect(info_from_p2p_addr(Multiaddr(victim.addresses[0])))
            await host.close()


async def test_a_protocol_name_that_is_no_text_ends_only_its_stream(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        for junk in (b"\xff\xfe\xfd\n", b"\xc3\x28" * 20 + b"\n"):
            stream = await raw_stream(host, victim)
            await stream.write(b"\x13/multistream/1.0.0\n" + encode_varint_prefixed(junk))
            with pytest.raises(StreamError):
                await read_to_the_end(stream.read)
            await stream.reset()


async def test_streams_that_end_early_leave_nothing_broken(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        for sent in (b"", b"\x05", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x10\x00\x00\x00\x00abc"):
            for end in ("close", "reset"):
                stream = await host.new_stream(ID.from_base58(victim.node_id), [TProtocol(PROTOCOL)])
                await stream.write(sent)
                await getattr(stream, end)()


@pytest.mark.parametrize(
    "message",
    [
        rpc_pb2.Message(
            data=b"junk", topicIDs=[MODELS], from_id=b"\x00", seqno=b"1", key=b"\xff" * 40, signature=b"s"
        ),
        rpc_pb2.Message(data=b"junk", topicIDs=[MODELS], from_id=b"", seqno=b"", key=b"", signature=b""),
        rpc_pb2.Message(data=bytes(900_000), topicIDs=[MODELS]),
        rpc_pb2.Message(data=b"", topicIDs=[MODELS, "swarm/health"]),
        rpc_pb2.Message(data=b"\x92\xc4\x01\x80\xc4\x40" + bytes(64), topicIDs=[MODELS]),
    ],
    ids=["junk key", "empty", "too large", "two topics", "bad signature"],
)
async def test_bad_gossip_is_dropped(libp2p_swarm: Libp2pSwarm, message: rpc_pb2.Message) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        stream = await host.new_stream(ID.from_base58(victim.node_id), [TProtocol("/meshsub/1.1.0")])
        rpc = rpc_pb2.RPC(
            publish=[message], subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=MODELS)]
        )
        await stream.write(encode_varint_prefixed(rpc.SerializeToString()))
        await stream.write(encode_varint_prefixed(b"\xff\xff no protobuf"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert len(victim.records()) == 0


async def test_ended_inbound_connections_give_their_slots_back(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        limiter = victim.host.libp2p_host.get_network()._inbound_limiter
        before = limiter.borrowed_tokens
        for _ in range(5):
            async with stranger(victim):
                pass
        with trio.fail_after(DEADLINE_S):
            # A number of the library's, without an event.
            while limiter.borrowed_tokens > before:  # noqa: ASYNC110
                await trio.sleep(0.02)


async def test_a_data_port_proves_who_it_is(libp2p_swarm: Libp2pSwarm) -> None:
    victim = await libp2p_swarm.start("victim")
    impostor = ID.from_pubkey(create_new_key_pair().public_key).to_base58()
    key_pair = create_new_key_pair()
    me = Identity(str(ID.from_pubkey(key_pair.public_key)), key_pair)
    port = Address.parse(victim.data_addresses[0]).port
    with pytest.raises(HandshakeFailed):
        await noise_handshake(await trio.open_tcp_stream("127.0.0.1", port), me, impostor)
    node_id, wire = await noise_handshake(await trio.open_tcp_stream("127.0.0.1", port), me, victim.node_id)
    assert node_id == victim.node_id
    wire.abort()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x01\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x01\x00\x00\x00\x00",
        b"\x02\x00\x00\x00\x00\xc1\x00\x00\x00\x00",
        b"\x05\x00\x00\x00\x00\x81\xa1v\x63\x00\x00\x00\x00",
    ],
    ids=["header too large", "payload too large", "no hello", "hello unreadable", "another version"],
)
async def test_a_proven_peer_that_breaks_the_protocol_is_cut_off(
    libp2p_swarm: Libp2pSwarm, sent: bytes
) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        key_pair = create_new_key_pair()
        me = Identity(str(ID.from_pubkey(key_pair.public_key)), key_pair)
        port = Address.parse(victim.data_addresses[0]).port
        _, wire = await noise_handshake(await trio.open_tcp_stream("127.0.0.1", port), me, victim.node_id)
        await wire.write([sent])
        with pytest.raises(WireClosed):
            await read_to_the_end(wire.receive)
        wire.abort()


async def test_a_peer_that_is_no_node_never_counts_as_connected(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert host.get_id().to_base58() not in victim.connected()


async def test_a_failed_dial_does_not_ban_the_peer(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        other = new_host(key_pair=create_new_key_pair())
        other_id = other.get_id().to_base58()
        with pytest.raises(NodeUnreachable):
            await victim.host.dial(other_id, [Address("127.0.0.1", 1)])
        async with other.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            port = int(other.get_addrs()[0].value_for_protocol("tcp"))
            await victim.host.dial(other_id, [Address("127.0.0.1", port)])
            assert victim.host.is_connected(other_id)
            await other.close()


async def test_a_node_is_found_behind_addresses_that_are_dead_or_somebody_elses(
    libp2p_swarm: Libp2pSwarm,
) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        other = new_host(key_pair=create_new_key_pair())
        other_id = other.get_id().to_base58()
        dead, own = Address("127.0.0.2", 1), Address("127.0.0.1", victim.host.port)
        async with other.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            living = Address("127.0.0.1", int(other.get_addrs()[0].value_for_protocol("tcp")))
            with pytest.raises(NodeUnreachable):
                await victim.host.dial(other_id, [dead, own])
            await victim.host.dial(other_id, [dead, own, living])
            assert victim.host.is_connected(other_id)
            await other.close()


async def test_addresses_race_and_the_losers_are_let_go(autojump_clock: trio.testing.MockClock) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = int(listeners[0].socket.getsockname()[1])
    living, dead = Address("127.0.0.1", port), Address("127.0.0.2", 1)
    address, stream = await first_to_answer([dead, living, Address("127.0.0.3", port)])
    assert address == living
    await stream.aclose()
    await listeners[0].aclose()
    with pytest.raises(NodeUnreachable, match="answers"):
        await first_to_answer([living, dead])


async def test_the_failure_of_one_of_the_librarys_tasks_does_not_end_its_service(
    libp2p_swarm: Libp2pSwarm,
) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:

        async def fail() -> None:
            raise UnicodeError("as a peer's bytes make it")

        # How the library runs the handling of one message and of one connection.
        victim.host.libp2p_host.get_network().manager.run_task(fail)
        await trio.testing.wait_all_tasks_blocked(0.05)


async def test_a_node_dials_nobody_of_the_librarys_own_accord(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim:
        network = victim.host.libp2p_host.get_network()
        other = new_host(key_pair=create_new_key_pair())
        async with other.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            network.peerstore.add_addrs(other.get_id(), other.get_transport_addrs(), 60)
            await network.auto_connector.maybe_connect()
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not victim.host.is_connected(other.get_id().to_base58())
            await other.close()


def test_a_validator_that_raises_refuses_the_message() -> None:
    class Raising(ValidGossip):
        def validate(self, topic: str, content: bytes) -> bool | None:
            raise KeyError(topic)

    message = rpc_pb2.Message(data=b"valid", topicIDs=[MODELS])
    assert guarded_validator(MODELS, MODELS, 10, Raising())(None, message) is False
    assert guarded_validator(MODELS, MODELS, 10, ValidGossip())(None, message) is True
    assert guarded_validator(MODELS, MODELS, 0, ValidGossip())(None, message) is False


async def test_what_comes_late_on_a_connection_its_sender_left_is_dropped(libp2p_swarm: Libp2pSwarm) -> None:
    victim = await libp2p_swarm.start("victim")
    arrived: list[bytes] = []
    changed = trio.Event()

    async def refuse(sender: str, body: bytes) -> bytes:
        raise AssertionError

    async def keep(sender: str, header: bytes, payload: memoryview) -> None:
        nonlocal changed
        arrived.append(header)
        changed.set()
        changed = trio.Event()

    victim.serve(refuse, keep)
    key_pair = create_new_key_pair()
    me = Identity(str(ID.from_pubkey(key_pair.public_key)), key_pair)
    port = Address.parse(victim.data_addresses[0]).port  # type: ignore[attr-defined]
    wires = []
    for _ in range(2):
        _, wire = await noise_handshake(await trio.open_tcp_stream("127.0.0.1", port), me, victim.node_id)
        await wire.write(encode_frame(bytes([FrameKind.HELLO]) + msgspec.msgpack.encode({"v": 1})))
        wires.append(wire)
    old, new = wires

    async def send(wire: NoiseWire, header: bytes) -> None:
        await wire.write(encode_frame(bytes([FrameKind.MESSAGE]) + header))

    for wire, header in ((old, b"1"), (new, b"2")):
        seen = changed
        await send(wire, header)
        with trio.fail_after(DEADLINE_S):
            await seen.wait()
    await send(old, b"late")
    await trio.testing.wait_all_tasks_blocked(0.05)
    seen = changed
    await send(new, b"3")
    with trio.fail_after(DEADLINE_S):
        await seen.wait()
    assert arrived == [b"1", b"2", b"3"]
    for wire in wires:
        wire.abort()
