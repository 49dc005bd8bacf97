"""Which way messages take: straight, or through libp2p where there is no straight way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data.neighbour import Neighbour
from swarmllm.swarm.data.stream_fallback import PROTOCOL
from swarmllm.swarm.data.upgrade import UPGRADE_EVERY_S
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.peers import early_connections
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.identifiers import NodeId

from .conftest import DEADLINE_S, Libp2pSwarm, meet, until
from .dht.swarm_of import contacts

pytestmark = pytest.mark.slow

ELSEWHERE = "127.1.2.3"
"""Loopback, where nobody listens: connections are refused at once."""


async def refuse(sender: str, body: bytes) -> bytes:
    raise AssertionError


@asynccontextmanager
async def two_nodes(
    folder: Path, *, announce: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Libp2pRouter, Libp2pRouter]]:
    def settings(name: str, *bootstrap: str) -> SwarmSettings:
        return SwarmSettings(
            folder / name, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False, announce=announce
        )

    async with open_libp2p_router(settings("a")) as a:
        door = a.addresses[0].replace(ELSEWHERE, "127.0.0.1")
        async with open_libp2p_router(settings("b", door)) as b:
            await meet(a, b)
            yield a, b


def neighbour_of(router: Libp2pRouter, node_id: NodeId) -> Neighbour:
    neighbour = router.directory.neighbours.get(node_id)
    assert neighbour is not None
    return neighbour


async def exchange(a: Libp2pRouter, b: Libp2pRouter, payloads: list[bytes]) -> None:
    """Send both ways at once and check what arrives."""
    arrived: dict[str, list[bytes]] = {a.node_id: [], b.node_id: []}
    complete = trio.Event()

    def keep_for(router: Libp2pRouter) -> None:
        async def keep(sender: str, header: bytes, payload: memoryview) -> None:
            arrived[sender].append(bytes(payload))
            if sum(map(len, arrived.values())) == 2 * len(payloads):
                complete.set()

        router.serve(refuse, keep)

    async def send_all(source: Libp2pRouter, target: Libp2pRouter) -> None:
        for payload in payloads:
            await source.send(target.node_id, b"header", payload)

    keep_for(a)
    keep_for(b)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all, a, b)
            nursery.start_soon(send_all, b, a)
        await complete.wait()
    assert arrived == {a.node_id: payloads, b.node_id: payloads}


async def test_neighbours_talk_directly(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        await exchange(a, b, [b"one", bytes(1_000_000), b"three"])
        assert [peer.data_plane for peer in (*a.peers(), *b.peers())] == ["direct", "direct"]
        assert a.peers()[0].bytes_sent >= 1_000_008
        assert a.peers()[0].bytes_received >= 1_000_008


async def test_without_a_data_port_messages_take_a_libp2p_stream(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, b):
        await exchange(a, b, [b"one", bytes(3_000_000), b"", b"four"])
        assert [peer.data_plane for peer in (*a.peers(), *b.peers())] == ["libp2p", "libp2p"]


async def test_a_stream_gives_way_to_a_direct_connection_and_nothing_is_lost(tmp_path: Path) -> None:
    payloads = [bytes([number % 256]) * (number * 500) for number in range(200)]
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, b):
        await exchange(a, b, [b"over a stream"])
        # The port is reachable after all: as if it had been opened.
        for here, there in ((a, b), (b, a)):
            port = there.plane.port
            here.plane.addresses_of = lambda node_id, port=port: [Address("127.0.0.1", port)]  # type: ignore[misc]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange, a, b, payloads)
            assert await a.plane.upgrades.upgrade(b.node_id)
            # It has accepted that connection, and may have turned to it by itself.
            await b.plane.upgrades.upgrade(a.node_id)
        assert [peer.data_plane for peer in (*a.peers(), *b.peers())] == ["direct", "direct"]
        assert not await a.plane.upgrades.upgrade(b.node_id)
        with trio.fail_after(DEADLINE_S):
            while any(c.wire_kind != "direct" for c in a.plane.all_connections(b.node_id)):
                a.plane.upgrades.tidy(b.node_id)
                b.plane.upgrades.tidy(a.node_id)
                await trio.sleep(0.01)
        await exchange(a, b, [b"after"])
        assert a.connected() == {b.node_id}


async def test_a_node_that_can_dial_turns_a_peers_stream_into_a_direct_connection_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is behind a router that lets in nobody, and a message is to go there."""
    monkeypatch.setattr(early_connections, "EARLY_DATA_PEERS", 0)
    async with two_nodes(tmp_path) as (a, b):
        monkeypatch.setattr(a.plane, "addresses_of", lambda node_id: [])
        await exchange(a, b, [b"over a stream, or not"])
        with trio.fail_after(UPGRADE_EVERY_S / 2):
            while [peer.data_plane for peer in (*a.peers(), *b.peers())] != ["direct", "direct"]:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await exchange(a, b, [b"directly", bytes(100_000)])
        assert a.connected() == {b.node_id}


async def test_no_stream_is_opened_to_a_peer_that_has_dialled_while_it_was_dialled_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_connections, "EARLY_DATA_PEERS", 0)
    async with two_nodes(tmp_path) as (a, b):

        async def dial_in_vain(node_id: NodeId) -> None:
            await b.plane.reach(a.node_id)
            with trio.fail_after(DEADLINE_S):
                while not a.plane.connections(b.node_id):  # noqa: ASYNC110
                    await trio.sleep(0.01)

        monkeypatch.setattr(a.plane, "dial", dial_in_vain)
        connection = await a.plane.reach(b.node_id)
        assert connection.wire_kind == "direct"
        assert a.plane.all_connections(b.node_id) == [connection]


async def test_streams_that_come_and_go_bring_one_dial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens them says where it is to be dialled. (One that ends a connection over a stream ends all,
    and has to connect anew.)"""
    monkeypatch.setattr(early_connections, "EARLY_DATA_PEERS", 0)
    dialled: list[NodeId] = []
    async with two_nodes(tmp_path) as (a, b):

        async def dial(node_id: NodeId) -> None:
            dialled.append(node_id)
            await trio.lowlevel.checkpoint()

        monkeypatch.setattr(b.plane, "dial", dial)
        for _ in range(4):
            stream = await a.host.open_stream(b.node_id, PROTOCOL)
            with trio.fail_after(DEADLINE_S):
                while not b.plane.all_connections(a.node_id):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                await stream.reset()
                while b.plane.all_connections(a.node_id):  # noqa: ASYNC110
                    await trio.sleep(0.01)
    assert dialled == [a.node_id]


async def test_over_a_libp2p_stream_a_reader_may_take_its_time(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, b):
        released, arrived = trio.Event(), trio.Event()

        async def wait(sender: str, header: bytes, payload: memoryview) -> None:
            await released.wait()
            if header == b"last":
                arrived.set()

        b.serve(refuse, wait)
        async with trio.open_nursery() as nursery:

            async def send_all() -> None:
                await a.send(b.node_id, b"first", bytes(4_000_000))
                # More than yamux's largest window, 16 MiB.
                await a.send(b.node_id, b"last", bytes(24 * 1024 * 1024))

            nursery.start_soon(send_all)
            # Longer than yamux itself would wait for its window before it breaks the stream.
            with trio.move_on_after(6.0):
                await arrived.wait()
            assert a.connected() == {b.node_id}
            released.set()
            with trio.fail_after(DEADLINE_S):
                await arrived.wait()


async def test_a_connection_that_another_has_replaced_delivers_nothing_more(tmp_path: Path) -> None:
    """What it still brought would overtake, or repeat, what its successor brings."""
    async with two_nodes(tmp_path) as (a, b):
        await exchange(a, b, [b"first"])
        heard: list[bytes] = []

        async def keep(sender: str, header: bytes, payload: memoryview) -> None:
            heard.append(header)

        b.serve(refuse, keep)
        receiving = neighbour_of(b, a.node_id).receiving
        assert receiving is not None
        await b.plane.receive(receiving, b"in use", memoryview(b""))
        receiving.retired = True
        await b.plane.receive(receiving, b"too late", memoryview(b""))
        assert heard == [b"in use"]


async def test_both_dialling_at_once_lose_and_reorder_nothing(tmp_path: Path) -> None:
    payloads = [bytes([number % 256]) * (number * 1000) for number in range(100)]
    async with two_nodes(tmp_path) as (a, b):
        # At once after meeting, before either has a data connection.
        await exchange(a, b, payloads)


async def test_of_two_connections_that_were_dialled_at_once_one_remains(tmp_path: Path) -> None:
    payloads = [bytes([number % 256]) * (number * 500) for number in range(200)]
    async with two_nodes(tmp_path) as (a, b):
        with trio.fail_after(DEADLINE_S):
            # As it is when neither has had the other's connection before it dialled.
            for here, there in ((a, b), (b, a)):
                dialled = await here.plane.dial(there.node_id)
                assert dialled is not None
                await dialled.ready.wait()
                neighbour_of(here, there.node_id).sending = dialled
            async with trio.open_nursery() as nursery:
                nursery.start_soon(exchange, a, b, payloads)
                nursery.start_soon(a.plane.upgrades.merge, b.node_id)
                nursery.start_soon(b.plane.upgrades.merge, a.node_id)
            while len(a.plane.all_connections(b.node_id)) > 1 or len(b.plane.all_connections(a.node_id)) > 1:
                for here, there in ((a, b), (b, a)):
                    await here.plane.upgrades.merge(there.node_id)
                    here.plane.upgrades.tidy(there.node_id)
                await trio.sleep(0.01)
        assert len(a.plane.connections(b.node_id)) == len(b.plane.connections(a.node_id)) == 1
        await exchange(a, b, [b"after"])
        assert (a.connected(), b.connected()) == ({b.node_id}, {a.node_id})


async def test_who_cannot_be_reached_is_tried_again_later_and_later(libp2p_swarm: Libp2pSwarm) -> None:
    a = await libp2p_swarm.start("a")
    assert isinstance(a, Libp2pRouter)
    nobody, waits_s = contacts(1)[0].node_id, []
    with trio.fail_after(DEADLINE_S):
        while len(waits_s) < 3:
            try:
                await a.plane.reach(nobody)
            except NodeUnreachable as error:
                if "a moment ago" not in error.message:
                    waits_s.append(neighbour_of(a, nobody).retry_at_s - trio.current_time())
            await trio.sleep(0.01)
    assert waits_s[0] > 0
    assert waits_s[1] > 1.5 * waits_s[0]
    assert waits_s[2] > 1.5 * waits_s[1]


async def test_a_lost_data_connection_is_noticed_and_replaced(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        await exchange(a, b, [b"before"])
        async with a.changes() as changes:
            connection = a.plane.connections(b.node_id)[0]
            connection.end("cut for the test")
            kinds = []
            with trio.fail_after(DEADLINE_S):
                while kinds[-2:] != ["disconnected", "connected"]:
                    change = await anext(changes)
                    if change.kind != "record":
                        kinds.append(change.kind)
        await until(b, lambda: b.connected() == {a.node_id})
        await exchange(a, b, [b"after"])


async def test_a_large_message_teaches_its_receiver_what_the_link_carries(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        await exchange(a, b, [b"small"])
        assert [peer.bytes_per_s for peer in b.peers()] == [None]
        await exchange(a, b, [bytes(4 * 2**20)])
        (peer,) = b.peers()
        assert peer.bytes_per_s is not None
        assert peer.bytes_per_s > 0


async def test_the_least_round_trip_is_known_with_the_mean(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        await exchange(a, b, [b"small"])
        with trio.fail_after(DEADLINE_S):
            while b.peers()[0].rtt_s is None:  # noqa: ASYNC110 (nobody tells when a pong comes)
                await trio.sleep(0.01)
        (peer,) = b.peers()
        assert peer.least_rtt_s is not None
        assert peer.rtt_s is not None
        assert 0 <= peer.least_rtt_s <= peer.rtt_s


@pytest.mark.parametrize("how", ["reach", "request"])
async def test_a_neighbour_for_gossip_has_a_data_connection_once_there_is_work_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(early_connections, "EARLY_DATA_PEERS", 0)
    async with two_nodes(tmp_path) as (a, b):

        async def answer(sender: NodeId, body: bytes) -> bytes:
            return body

        async def ignore(sender: NodeId, header: bytes, payload: memoryview) -> None: ...

        b.serve(answer, ignore)
        assert not a.plane.has_connection(b.node_id)
        if how == "reach":
            await a.reach(b.node_id)
        else:
            assert await a.request(b.node_id, b"?") == b"?"
        with trio.fail_after(DEADLINE_S):
            while not b.plane.has_connection(a.node_id):  # noqa: ASYNC110 (it has no event)
                await trio.sleep(0.02)
        await exchange(a, b, [b"after"])
        assert (a.connected(), b.connected()) == ({b.node_id}, {a.node_id})
