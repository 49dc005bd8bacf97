"""One node of a swarm in memory: `Router` over links and records in this process."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import trio

from swarmllm.errors import NodeUnreachable, RemoteError
from swarmllm.supervision import Outcome
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.in_memory.link import LinkQuality, MemoryLine, MemoryLink
from swarmllm.swarm.router import (
    Change,
    MessageHandler,
    PeerInfo,
    PortMappingState,
    RequestHandler,
    RequestRefused,
    answer,
    check_load,
    check_message,
    check_record,
    check_request,
    deliver,
)
from swarmllm_proto.identifiers import NodeId


@dataclass(frozen=True, slots=True)
class Record:
    version: tuple[int, int, int]
    """(incarnation of its writer, count of its publications, count of its loads since): the larger is the
    newer."""
    content: bytes
    load: bytes = b""


@dataclass(eq=False, slots=True)
class MemoryPeer:
    """The state between two nodes while they are connected."""

    connected_since: float
    link: MemoryLink | None = None
    """For messages from here."""
    exchanges: set[Outcome[bytes]] | None = None
    """Requests that have no answer yet, once there was one: simulations have a million pairs."""

    def end(self, node_id: NodeId) -> None:
        if self.link is not None:
            self.link.close()
        for exchange in self.exchanges or ():
            exchange.fail(NodeUnreachable(f"node {node_id} was lost while it was asked"))


class HostNetwork(Protocol):
    """The part of the network that a node uses."""

    nursery: trio.Nursery
    rng: random.Random

    def router(self, node_id: NodeId) -> InMemoryRouter: ...

    def quality(self, sender: NodeId, receiver: NodeId) -> LinkQuality: ...

    def line(self, sender: NodeId, receiver: NodeId) -> MemoryLine: ...

    def spread(self, origin: InMemoryRouter, writer: NodeId, record: Record) -> None: ...

    async def pass_way(self, sender: NodeId, receiver: NodeId) -> None: ...

    async def keep_acknowledged(self, link: MemoryLink, sender: NodeId, receiver: NodeId) -> None: ...


class InMemoryRouter:
    """One node; made by `InMemoryNetwork.add`."""

    def __init__(self, network: HostNetwork, node_id: NodeId, incarnation: int) -> None:
        self._network = network
        self._node_id = node_id
        self._version = (incarnation, 0, 0)
        self._records: dict[NodeId, Record] = {}
        """Of all nodes ever heard of, connected or not."""
        self._feed = ChangeFeed()
        self._peers: dict[NodeId, MemoryPeer] = {}
        """Those that are connected."""
        self._to_self = MemoryPeer(0.0)
        self._scopes: set[trio.CancelScope] = set()
        self._alive = True
        self._on_request: RequestHandler | None = None
        self._on_message: MessageHandler | None = None

    def __repr__(self) -> str:
        return f"<InMemoryRouter {self._node_id} connected={len(self._peers)}>"

    @property
    def node_id(self) -> NodeId:
        return self._node_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self._node_id}/p2p/{self._node_id}",)

    @property
    def port_mapping(self) -> PortMappingState:
        return PortMappingState("off")

    @property
    def reachability(self) -> None:
        """In memory there is nothing in between."""
        return None

    def records(self) -> Mapping[NodeId, bytes]:
        return MappingProxyType({node_id: record.content for node_id, record in self._records.items()})

    async def publish(self, record: bytes) -> None:
        check_record(record)
        await trio.lowlevel.checkpoint()
        self._version = (self._version[0], self._version[1] + 1, 0)
        self._network.spread(self, self._node_id, Record(self._version, bytes(record)))

    async def publish_details(self, record: bytes, *, soon: bool) -> bool:
        """In memory everybody hears everything."""
        await self.publish(record)
        return True

    def loads(self) -> Mapping[NodeId, bytes]:
        return {node_id: record.load for node_id, record in self._records.items() if record.load}

    async def publish_load(self, load: bytes) -> None:
        check_load(load)
        await trio.lowlevel.checkpoint()
        incarnation, n_published, n_loads = self._version
        if own := self._records.get(self._node_id):
            self._version = (incarnation, n_published, n_loads + 1)
            self._network.spread(self, self._node_id, Record(self._version, own.content, bytes(load)))

    def connected(self) -> frozenset[NodeId]:
        return frozenset(self._peers)

    def reachable(self) -> frozenset[NodeId]:
        """In memory all are connected that can be."""
        return self.connected()

    def untried(self) -> frozenset[NodeId]:
        return frozenset()

    async def reach(self, node_id: NodeId, *, timeout_s: float = 5.0) -> None:
        await trio.lowlevel.checkpoint()
        if node_id != self._node_id:
            self._require(node_id)

    def peers(self) -> tuple[PeerInfo, ...]:
        return tuple(self._info(node_id, self._peers[node_id]) for node_id in sorted(self._peers))

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        return self._feed.subscribe()

    def serve(self, on_request: RequestHandler, on_message: MessageHandler) -> None:
        self._on_request, self._on_message = on_request, on_message

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> NodeId:
        await trio.lowlevel.checkpoint()
        node_id = NodeId(address.rpartition("/")[2])
        if node_id != self._node_id and node_id not in self._peers:
            raise NodeUnreachable(f"nothing answers at {address}")
        return node_id

    async def request(self, node_id: NodeId, body: bytes, *, timeout_s: float = 10.0) -> bytes:
        check_request(body)
        target = self if node_id == self._node_id else self._network.router(self._require(node_id))
        exchange: Outcome[bytes] = Outcome()
        peer = self._peer(node_id)
        peer.exchanges = waiting = peer.exchanges or set()
        waiting.add(exchange)
        try:
            target.start(target._answer, self, bytes(body), exchange)
            return await exchange.within(timeout_s, f"node {node_id} did not answer")
        finally:
            waiting.discard(exchange)

    async def fetch(self, node_id: NodeId, body: bytes, *, timeout_s: float = 10.0) -> bytes:
        return await self.request(node_id, body, timeout_s=timeout_s)

    async def send(self, node_id: NodeId, header: bytes, payload: bytes | memoryview = b"") -> None:
        size_bytes = check_message(header, payload)
        if not self._alive:
            raise NodeUnreachable("this node is dead")
        if node_id != self._node_id:
            self._require(node_id)
        link = self.link(node_id)
        await link.send(bytes(header), bytes(payload), size_bytes)
        if not link.is_acknowledging and node_id != self._node_id:
            link.is_acknowledging = True
            self._network.nursery.start_soon(self._network.keep_acknowledged, link, self._node_id, node_id)

    def send_now(self, node_id: NodeId, header: bytes, payload: bytes | memoryview = b"") -> bool:
        """In memory all messages are sent in turn."""
        return False

    # What the network does to its nodes.

    def start(self, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run a task that dies with this node."""
        self._network.nursery.start_soon(self._run_while_alive, task, args)

    def meet(self, node_id: NodeId) -> None:
        self._peers[node_id] = MemoryPeer(trio.current_time())
        self._feed.announce(Change("connected", node_id))

    def lose(self, node_id: NodeId) -> None:
        if (peer := self._peers.pop(node_id, None)) is not None:
            peer.end(node_id)
            self._feed.announce(Change("disconnected", node_id))

    def learn(self, writer: NodeId, record: Record) -> None:
        if self._alive and self.is_newer(writer, record):
            self._records[writer] = record
            self._feed.announce(Change("record", writer))

    def is_newer(self, writer: NodeId, record: Record) -> bool:
        return writer not in self._records or self._records[writer].version < record.version

    def known(self) -> dict[NodeId, Record]:
        return dict(self._records)

    def die(self) -> None:
        self._alive = False
        for node_id in list(self._peers):
            self.lose(node_id)
        self._to_self.end(self._node_id)
        for scope in self._scopes:
            scope.cancel()

    def _peer(self, node_id: NodeId) -> MemoryPeer:
        return self._to_self if node_id == self._node_id else self._peers[self._require(node_id)]

    def link_to(self, node_id: NodeId) -> MemoryLink | None:
        """Where there has been a message."""
        peer = self._peers.get(node_id)
        return peer.link if peer is not None else None

    def _info(self, node_id: NodeId, peer: MemoryPeer) -> PeerInfo:
        there, back = peer.link, self._network.router(node_id).link_to(self._node_id)
        return PeerInfo(
            node_id=node_id,
            addresses=self._network.router(node_id).addresses,
            rtt_s=self._network.quality(self._node_id, node_id).latency_s
            + self._network.quality(node_id, self._node_id).latency_s,
            bytes_per_s=_finite(self._network.quality(node_id, self._node_id).bytes_per_s),
            data_plane="memory",
            bytes_sent=there.n_bytes if there else 0,
            bytes_received=back.n_bytes if back else 0,
            connected_since=peer.connected_since,
        )

    def _require(self, node_id: NodeId) -> NodeId:
        if node_id not in self._peers:
            raise NodeUnreachable(f"node {node_id} is not connected")
        return node_id

    def link(self, node_id: NodeId) -> MemoryLink:
        """Raises NodeUnreachable."""
        peer = self._peer(node_id)
        if (link := peer.link) is None:
            receiver = self._network.router(node_id)
            link = MemoryLink(
                self._node_id,
                receiver._deliver,
                self._network.quality(self._node_id, node_id),
                self._network.rng,
                self._network.line(self._node_id, node_id),
            )
            peer.link = link
            receiver.start(link.carry)
        return link

    async def _deliver(self, sender: NodeId, header: bytes, payload: memoryview) -> None:
        await deliver(self._on_message, sender, header, payload)

    async def _answer(self, caller: InMemoryRouter, body: bytes, exchange: Outcome[bytes]) -> None:
        await self._network.pass_way(caller.node_id, self._node_id)
        if exchange.is_over:
            return
        try:
            response = await answer(self._on_request, caller.node_id, body)
        except RequestRefused as refusal:
            failure = RemoteError(f"node {self._node_id}: {refusal}")
            await self._network.pass_way(self._node_id, caller.node_id)
            exchange.fail(failure)
        else:
            await self._network.pass_way(self._node_id, caller.node_id)
            exchange.succeed(bytes(response))

    async def _run_while_alive(self, task: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        if not self._alive:
            return
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                await task(*args)
            finally:
                self._scopes.discard(scope)


def _finite(bytes_per_s: float) -> float | None:
    return bytes_per_s if math.isfinite(bytes_per_s) else None
