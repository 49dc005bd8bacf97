"""The DHT between real hosts: what is announced at one end is found at the other, and strangers who send
garbage change nothing about that."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.kad_dht.pb import kademlia_pb2
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from swarmllm.swarm.discovery.addresses import Address, own_addresses
from swarmllm.swarm.discovery.dht import dht as dht_module
from swarmllm.swarm.discovery.dht import serving
from swarmllm.swarm.discovery.dht.dht import PROTOCOL, Dht, protocol_name
from swarmllm.swarm.discovery.dht.messages import (
    MESSAGE_MAX_BYTES,
    Contact,
    DhtMessageKind,
    Message,
    encode,
    name_key,
    node_key,
)
from swarmllm.swarm.discovery.dht.serving import DhtNode
from swarmllm.swarm.libp2p.host import Host, run_libp2p
from swarmllm.swarm.libp2p.stream_framing import framed
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import load_or_create_identity
from swarmllm.swarm.router import DhtMode
from swarmllm_proto.identifiers import NodeId

from ..conftest import DEADLINE_S
from .swarm_of import contacts

if TYPE_CHECKING:
    from trio_typing import TaskStatus


pytestmark = pytest.mark.slow

KEY = name_key("guide")
Start = Callable[..., Awaitable[tuple[Host, Dht]]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """start(name, mode) -> a running host with its DHT; all stop with the test. Addresses are known as a
    swarm's signed envelopes make them known."""
    ports: dict[str, int] = {}
    async with trio.open_nursery() as nursery:

        async def run(name: str, mode: DhtMode, *, task_status: TaskStatus[tuple[Host, Dht]]) -> None:
            host = Host(load_or_create_identity(_folder(tmp_path / name)), ConnectionGater())

            class Node(DhtNode):
                def addresses_of(self, node_id: NodeId) -> tuple[Address, ...]:
                    return (Address("127.0.0.1", ports[node_id]),) if node_id in ports else ()

                def connected(self) -> set[NodeId]:
                    return host.connected()

            async with trio.open_nursery() as inner, run_libp2p(host, own_addresses("127.0.0.1"), 0):
                dht = Dht(host, inner, Node(), mode=mode)
                ports[host.node_id] = host.port
                inner.start_soon(dht.run)
                task_status.started((host, dht))
                await trio.sleep_forever()

        async def start_one(name: str, mode: DhtMode = "on") -> tuple[Host, Dht]:
            started: tuple[Host, Dht] = await nursery.start(run, name, mode)
            return started

        yield start_one
        nursery.cancel_scope.cancel()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


async def introduce(one: tuple[Host, Dht], other: tuple[Host, Dht]) -> None:
    with trio.fail_after(DEADLINE_S):
        await one[0].dial(other[0].node_id, [Address("127.0.0.1", other[0].port)])
        await until(lambda: other[0].is_connected(one[0].node_id))
        one[1].met(other[0].node_id)
        other[1].met(one[0].node_id)
        await until(lambda: other[0].node_id in one[1].core.table)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_S):
        # The state of several tasks, without an event.
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


async def test_what_one_provides_is_found_by_one_that_never_heard_of_it(start: Start) -> None:
    """In a chain: who comes last knows nobody but the one before."""
    chain = [await start(name) for name in "abc"]
    (first, provider), (_, middle) = chain[0], chain[1]
    provider.provide([KEY])
    await introduce(chain[0], chain[1])
    await until(lambda: len(middle.core.providers) == 1)
    await introduce(chain[1], chain[2])
    host, seeker = await start("d")
    await chain[2][0].dial(
        seeker.core.node_id, list(seeker.core.placed(Contact(seeker.core.node_id)).addresses)
    )
    await until(lambda: host.is_connected(chain[2][0].node_id))
    seeker.met(chain[2][0].node_id)
    await until(lambda: len(seeker.core.table) > 0)
    with trio.fail_after(DEADLINE_S):
        assert await seeker.find_providers(KEY) == [
            Contact(first.node_id, (Address("127.0.0.1", first.port),))
        ]
        assert await seeker.find_providers(name_key("something else")) == []


async def test_the_dead_are_named_and_it_costs_little(start: Start) -> None:
    """Its answer is no word on liveness; that is why it is only ever dialled."""
    middle, seeker = await start("middle"), await start("seeker")
    await introduce(seeker, middle)
    (dead,) = contacts(1)
    gone = Contact(dead.node_id, (Address("127.0.0.1", 1),))
    middle[1].core.providers.add(KEY, gone, trio.current_time())
    for contact in contacts(30, seed=5):
        middle[1].core.table.answered(Contact(contact.node_id, gone.addresses), trio.current_time())
    with trio.fail_after(DEADLINE_S):
        assert await seeker[1].find_providers(KEY) == [gone]
    assert len(seeker[1].core.table) == 1


async def test_it_tells_of_whom_it_has_dialled_for_a_question(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = [await start(name) for name in "abc"]
    await introduce(chain[0], chain[1])
    dht, met = chain[2][1], list[str]()
    monkeypatch.setattr(dht._asking._node, "met_in_passing", met.append)
    await introduce(chain[2], chain[1])
    await until(lambda: chain[0][0].node_id in dht.core.table)
    await until(lambda: met == [chain[0][0].node_id])


async def test_a_client_asks_and_is_not_asked(start: Start) -> None:
    server, client = await start("server"), await start("client", "client")
    await introduce(client, server)
    client[1].provide([KEY])
    await until(lambda: len(server[1].core.providers) == 1)
    await until(lambda: server[0].is_connected(client[0].node_id))
    assert client[0].node_id not in server[1].core.table


async def test_off_is_off(start: Start) -> None:
    one, other = await start("one"), await start("other", "off")
    await one[0].dial(other[0].node_id, [Address("127.0.0.1", other[0].port)])
    one[1].met(other[0].node_id)
    other[1].met(one[0].node_id)
    assert await other[1].find_providers(KEY) == []
    assert other[1].statistics().n_lookups == 0
    assert len(other[1].core.table) == 0


def test_a_private_swarm_speaks_a_protocol_of_its_own() -> None:
    assert protocol_name("") == PROTOCOL
    assert protocol_name("0123") == f"{PROTOCOL}/0123"


@asynccontextmanager
async def stranger(victim: Host) -> AsyncIterator[Any]:
    host = new_host(key_pair=create_new_key_pair())
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        try:
            with trio.fail_after(DEADLINE_S):
                address = f"/ip4/127.0.0.1/tcp/{victim.port}/p2p/{victim.node_id}"
                await host.connect(info_from_p2p_addr(Multiaddr(address)))
            yield host
        finally:
            with trio.CancelScope(shield=True):
                await host.close()


async def opened(stranger_host: Any, victim: Host) -> Any:
    return await stranger_host.new_stream(ID.from_base58(victim.node_id), [TProtocol(PROTOCOL)])


async def ended(stream: Any) -> bytes:
    """What was answered until the stream ended."""
    answered = b""
    with trio.fail_after(DEADLINE_S):
        while True:
            try:
                piece = await stream.read(65536)
            except Exception:
                return answered
            if not piece:
                return answered
            answered += piece


@asynccontextmanager
async def still_works(start: Start) -> AsyncIterator[tuple[Host, Dht]]:
    """A victim with a friend; afterwards the friend still gets its answer."""
    victim, friend = await start("victim"), await start("friend")
    await introduce(friend, victim)
    victim[1].provide([KEY])
    yield victim
    with trio.fail_after(DEADLINE_S):
        found = await friend[1].find_providers(KEY)
    assert [contact.node_id for contact in found] == [victim[0].node_id]


async def test_garbage_ends_only_its_stream(start: Start) -> None:
    source = random.Random(7)
    question = framed(encode(Message(DhtMessageKind.PING)))
    attacks = [
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xff\xff\xff\x7f",
        (MESSAGE_MAX_BYTES + 1).to_bytes(3, "little"),
        framed(b"\xff\xfe no protobuf"),
        framed(b""),
        framed(kademlia_pb2.Message(type="PUT_VALUE", key=b"k").SerializeToString()),
        framed(kademlia_pb2.Message(type="GET_PROVIDERS", key=bytes(1000)).SerializeToString()),
        framed(kademlia_pb2.Message(type="FIND_NODE").SerializeToString()),
        *(framed(source.randbytes(source.randrange(1, 300))) for _ in range(20)),
    ]
    async with still_works(start) as (host, dht), stranger(host) as attacker:
        for attack in attacks:
            stream = await opened(attacker, host)
            await stream.write(attack)
            await ended(stream)
        for early in (b"", b"\x05", question[:1]):
            stream = await opened(attacker, host)
            await stream.write(early)
            await stream.close()
        stream = await opened(attacker, host)
        await stream.write(question * 3)
        await stream.close()
        assert await ended(stream) == question * 3
        assert len(dht.core.providers) == 0
        assert str(attacker.get_id()) not in dht.core.table


async def test_records_of_others_and_floods_of_ones_own_are_not_kept(start: Start) -> None:
    async with still_works(start) as (host, dht), stranger(host) as attacker:
        me = Contact(str(attacker.get_id()), (Address("127.0.0.1", 9),))
        forged = Message(DhtMessageKind.ADD_PROVIDER, KEY, providers=tuple(contacts(30)))
        stream = await opened(attacker, host)
        await stream.write(framed(encode(forged)))
        for n in range(serving.QUESTIONS_PER_STREAM - 1):
            await stream.write(
                framed(encode(Message(DhtMessageKind.ADD_PROVIDER, name_key(str(n)), providers=(me,))))
            )
        await ended(stream)
        assert len(dht.core.providers) == serving.QUESTIONS_PER_STREAM - 1


async def test_whoever_asks_too_fast_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "QUESTIONS_PER_S", 0.0)
    monkeypatch.setattr(serving, "BURST", 20.0)
    question = framed(encode(Message(DhtMessageKind.FIND_NODE, node_key(contacts(1)[0].node_id))))
    async with still_works(start) as (host, dht), stranger(host) as attacker:
        stream = await opened(attacker, host)
        with trio.fail_after(DEADLINE_S):
            for _ in range(30):
                try:
                    await stream.write(question)
                except Exception:
                    break
        await ended(stream)
        assert dht.statistics().n_refused >= 1
        assert dht.statistics().n_answered <= 25


async def test_silent_streams_are_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "READ_S", 0.5)
    async with still_works(start) as (host, dht), stranger(host) as attacker:
        silent = [await opened(attacker, host) for _ in range(3)]
        await silent[0].write(b"\x10half")
        for stream in silent:
            assert await ended(stream) == b""
        assert dht.statistics().n_refused == len(silent)
        # The friend is asked more patiently.
        monkeypatch.undo()


async def test_the_number_of_a_peers_streams_is_limited(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "READ_S", 2 * DEADLINE_S)
    async with still_works(start) as (host, dht), stranger(host) as attacker:
        silent = [await opened(attacker, host) for _ in range(serving.STREAMS_PER_PEER)]
        for _ in range(4):
            with suppress(StreamFailure):
                assert await ended(await opened(attacker, host)) == b""
        assert dht.statistics().n_refused == 4
        for stream in silent:
            await stream.reset()


async def test_a_node_that_never_answers_holds_up_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with still_works(start) as (host, dht), stranger(host) as attacker:

        async def swallow(stream: Any) -> None:
            await trio.sleep_forever()

        attacker.set_stream_handler(TProtocol(PROTOCOL), swallow)
        silent = Contact(str(attacker.get_id()))
        dht.core.table.answered(silent, trio.current_time())
        with monkeypatch.context() as patched, trio.fail_after(DEADLINE_S):
            patched.setattr(dht_module, "ASK_S", 0.5)
            assert await dht.find_providers(name_key("nobody has it")) == []
        assert silent.node_id not in dht.core.table
