"""Each thing that other nodes can make this one keep, filled until it takes no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.timed_cache.last_seen_cache import LastSeenCache

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data import bulk
from swarmllm.swarm.data.bulk import Bulk, NoBulkConnection
from swarmllm.swarm.data.data_plane import DataPlane
from swarmllm.swarm.discovery.dht import table
from swarmllm.swarm.discovery.dht.messages import Contact
from swarmllm.swarm.discovery.dht.table import KEYS_PER_NODE, ProviderBook
from swarmllm.swarm.discovery.reachability import AT_ONCE_MAX, DialBacks
from swarmllm.swarm.libp2p import bounded_yamux, gossip
from swarmllm.swarm.libp2p.bounded_yamux import BoundedYamux, Overrun
from swarmllm.swarm.libp2p.gossip import UnsignedPubsub
from swarmllm.swarm.libp2p.gossip_mesh import RECENT_MAX_BYTES, ContentCache
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.records.prefix_index import NODE_PREFIXES_MAX, PrefixIndex
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.router_messages import DialBackRequest, encode_neighbour
from swarmllm_proto.swarm import KeptPrefix, PrefixCacheAnnounce

from .test_byte_budget_in_use import NoWays


class Connection(BoundedYamux):
    """Streams without anything below them, each with a window."""

    WINDOW = 256 * 1024

    def __init__(self) -> None:
        self._nursery = None
        self.peer_id = "peer"
        self._arrived_bytes = 0
        self.streams = {}
        self.stream_buffers = bounded_yamux._Buffers(self)

    def __hash__(self) -> int:
        return id(self)

    def arrives(self, number: int, n_bytes: int) -> None:
        if number not in self.streams:
            self.streams[number] = SimpleNamespace(target_recv_window=self.WINDOW, is_initiator=False)
            self.stream_buffers[number] = bytearray()
        self.stream_buffers[number].extend(bytes(n_bytes))


def test_a_connection_holds_so_many_unread_bytes_in_all_its_streams() -> None:
    connection = Connection()

    def fill() -> None:
        for number in range(bounded_yamux.STREAMS_PER_CONNECTION):
            connection.arrives(number, Connection.WINDOW)

    with pytest.raises(Overrun, match="unread"):
        fill()
    most = bounded_yamux.UNREAD_PER_CONNECTION
    assert most - Connection.WINDOW <= connection.n_unread_bytes <= most + most // 8 + Connection.WINDOW


def test_a_connection_that_is_read_may_bring_as_much_as_it_likes() -> None:
    connection = Connection()
    for _ in range(1000):
        connection.arrives(1, Connection.WINDOW)
        connection.stream_buffers[1].clear()


def message(number: int, size: int = 1) -> Any:
    return rpc_pb2.Message(data=number.to_bytes(8, "little") + bytes(size), topicIDs=["t"])


def test_recent_gossip_holds_so_many_bytes_and_forgets_them() -> None:
    pubsub = SimpleNamespace(get_message_id=lambda each: each.data[:8])
    cache = ContentCache(3, 5, pubsub)
    for number in range(200):
        cache.put(message(number, 512 * 1024))
    assert RECENT_MAX_BYTES - 2**20 < cache.n_bytes <= RECENT_MAX_BYTES
    assert cache.n_bytes == sum(len(each.data) for each in cache.msgs.values())
    for _ in range(5):
        cache.shift()
    assert cache.n_bytes == len(cache.msgs) == 0
    cache.put(message(1, 512))
    assert cache.get(message(1).data[:8])


def test_so_many_ids_of_messages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "SEEN_MAX", 100)
    pubsub = UnsignedPubsub.__new__(UnsignedPubsub)
    pubsub.seen_messages = LastSeenCache(120, 3600)
    pubsub._msg_id_constructor = lambda each: each.data[:8]
    monkeypatch.setattr(Pubsub, "get_message_id", lambda _self, each: each.data[:8])
    try:
        for number in range(1000):
            pubsub._mark_msg_seen(message(number))
        assert pubsub.seen_messages.length() == 100
        assert pubsub._is_msg_seen(message(999))
        assert not pubsub._is_msg_seen(message(1))
    finally:
        pubsub.seen_messages.stop()


def test_the_dht_holds_so_many_entries_of_a_node_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    n_nodes = 4
    monkeypatch.setattr(table, "ENTRIES_MAX", n_nodes * KEYS_PER_NODE)
    book = ProviderBook()
    for node in range(2 * n_nodes):
        for key in range(KEYS_PER_NODE + 10):
            book.add(key.to_bytes(34, "little"), Contact(cast("Any", f"node{node}"), ()), 0.0)
    assert len(book) == n_nodes * KEYS_PER_NODE
    assert set(book._n_of_node.values()) == {KEYS_PER_NODE}
    book.expire(table.EXPIRY_S)
    assert len(book) == 0
    assert book.add(bytes(34), Contact(cast("Any", "late"), ()), table.EXPIRY_S)


def test_prefixes_are_kept_of_so_many_nodes_and_so_many_of_each() -> None:
    index = PrefixIndex(nodes_max=8)
    kept = tuple(KeptPrefix(hash=bytes([n]) * 16, n_blocks=1) for n in range(NODE_PREFIXES_MAX))
    said = [PrefixCacheAnnounce(model_id=cast("Any", f"m{n}"), prefixes=kept) for n in range(4)]
    for node in range(20):
        index.put(cast("Any", f"node{node}"), said)
    assert len(index) == 8 * NODE_PREFIXES_MAX
    for node in range(20):
        index.forget(cast("Any", f"node{node}"))
    assert not index._nodes_of


async def test_so_many_nodes_are_dialled_back_at_once(autojump_clock: object) -> None:
    envelope = SimpleNamespace(addresses=("/ip4/10.0.0.1/tcp/1",), data_addresses=())
    asked = DialBacks(*cast("Any", (None, None, SimpleNamespace(envelope=lambda _: envelope), None)))
    under_way = 0

    async def try_for_ever(*_: Any) -> None:
        nonlocal under_way
        under_way += 1
        await trio.sleep_forever()

    asked._try = try_for_ever  # type: ignore[method-assign]
    body = encode_neighbour(DialBackRequest())
    async with trio.open_nursery() as nursery:
        for number in range(AT_ONCE_MAX):
            nursery.start_soon(asked.answer, cast("Any", f"node{number}"), body)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RequestRefused, match="others"):
            await asked.answer(cast("Any", "late"), body)
        assert under_way == AT_ONCE_MAX
        nursery.cancel_scope.cancel()
    assert asked._n_under_way == 0


async def test_nodes_that_cannot_be_reached_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_PEERS_MAX", 8)

    async def unreachable(*_: Any) -> None:
        raise NodeUnreachable("gone")

    plane = DataPlane.__new__(DataPlane)
    plane._neighbours = Parts.alone()
    plane.connections_max = 4
    plane._establish = unreachable  # type: ignore[method-assign, assignment]
    async with trio.open_nursery() as nursery:
        transfers = Bulk(NodeId("me"), nursery, NoWays())
        for number in range(100):
            stranger = cast("Any", f"node{number}")
            with pytest.raises(NoBulkConnection):
                await transfers.fetch(stranger, b"", 1.0)
            with pytest.raises(NodeUnreachable):
                await plane.reach(stranger)
    assert len(transfers._peers) <= 8
    assert len(plane._neighbours) <= 8
