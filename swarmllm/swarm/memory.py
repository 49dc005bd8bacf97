"""A swarm without a network: every node in one process, under trio's clock.

`InMemoryRouter` keeps the promises of `Router` with the same errors, the same order and the same
back-pressure as the libp2p one (one contract test-suite runs over both), and adds what a real network will
not give on command: latency, bandwidth and loss per link, `cut`, `heal` and `kill`. Under trio's autojump
clock a simulated minute costs milliseconds.

    async with InMemoryNetwork() as network:
        a, b = network.add("a"), network.add("b")

Nodes see each other as soon as they are added. Handlers run in tasks of the network, never in the sender's:
two handlers that send to each other would otherwise wait for each other. Records travel as fast as the links
on their way; where a link is cut they go round it, as gossip would.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import trio

from swarmllm.errors import DeadlineExceeded, NodeUnreachable, RemoteError, SwarmLLMError
from swarmllm.swarm.answering import (
    RequestRefused,
    answer,
    check_message,
    check_record,
    check_request,
    deliver,
)
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.memory_link import LinkQuality, MemoryLink
from swarmllm.swarm.router import Change, MessageHandler, PeerInfo, RequestHandler


@dataclass(frozen=True, slots=True)
class _Record:
    version: tuple[int, int]
    """(incarnation of its writer, count of its publications): the larger is the newer."""
    content: bytes


class _Exchange:
    """One request under way: where its caller waits, and whoever learns the end of it says so."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.response = b""
        self.failure: SwarmLLMError | None = None

    def finish(self, response: bytes = b"", failure: SwarmLLMError | None = None) -> None:
        if not self.done.is_set():
            self.response, self.failure = response, failure
            self.done.set()


class InMemoryRouter:
    """One node; made by `InMemoryNetwork.add`."""

    def __init__(self, network: InMemoryNetwork, node_id: str, incarnation: int) -> None:
        self._network = network
        self._node_id = node_id
        self._version = (incarnation, 0)
        self._records: dict[str, _Record] = {}
        self._feed = ChangeFeed()
        self._connected_since: dict[str, float] = {}
        self._links: dict[str, MemoryLink] = {}
        self._exchanges: dict[str, set[_Exchange]] = {}
        self._scopes: set[trio.CancelScope] = set()
        self._alive = True
        self._on_request: RequestHandler | None = None
        self._on_message: MessageHandler | None = None

    def __repr__(self) -> str:
        return f"<InMemoryRouter {self._node_id} connected={len(self._connected_since)}>"

    @property
    def node_id(self) -> str:
        return self._node_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self._node_id}/p2p/{self._node_id}",)

    @property
    def reachability(self) -> None:
        """In memory there is nothing in between."""
        return None

    def records(self) -> Mapping[str, bytes]:
        return MappingProxyType({node_id: record.content for node_id, record in self._records.items()})

    async def publish(self, record: bytes) -> None:
        check_record(record)
        await trio.lowlevel.checkpoint()
        self._version = (self._version[0], self._version[1] + 1)
        self._network.spread(self, self._node_id, _Record(self._version, bytes(record)))

    def connected(self) -> frozenset[str]:
        return frozenset(self._connected_since)

    def peers(self) -> tuple[PeerInfo, ...]:
        return tuple(self._peer(node_id, since) for node_id, since in sorted(self._connected_since.items()))

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        return self._feed.subscribe()

    def serve(self, on_request: RequestHandler, on_message: MessageHandler) -> None:
        self._on_request, self._on_message = on_request, on_message

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> str:
        await trio.lowlevel.checkpoint()
        node_id = address.rpartition("/")[2]
        if node_id != self._node_id and node_id not in self._connected_since:
            raise NodeUnreachable(f"nothing answers at {address}")
        return node_id

    async def request(self, node_id: str, body: bytes, *, timeout_s: float = 10.0) -> bytes:
        check_request(body)
        target = self if node_id == self._node_id else self._network.router(self._require(node_id))
        exchange = _Exchange()
        waiting = self._exchanges.setdefault(node_id, set())
        waiting.add(exchange)
        try:
            target.start(target._answer, self, bytes(body), exchange)
            with trio.move_on_after(timeout_s):
                await exchange.done.wait()
        finally:
            waiting.discard(exchange)
        if exchange.failure is not None:
            raise exchange.failure
        if not exchange.done.is_set():
            raise DeadlineExceeded(f"node {node_id} did not answer within {timeout_s:g} s")
        return exchange.response

    async def fetch(self, node_id: str, body: bytes, *, timeout_s: float = 10.0) -> bytes:
        return await self.request(node_id, body, timeout_s=timeout_s)

    async def send(self, node_id: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        size_bytes = check_message(header, payload)
        if not self._alive:
            raise NodeUnreachable("this node is dead")
        if node_id != self._node_id:
            self._require(node_id)
        await self._link(node_id).send(bytes(header), bytes(payload), size_bytes)

    # What the network does to its nodes.

    def start(self, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run a task that dies with this node."""
        self._network.nursery.start_soon(self._run_while_alive, task, args)

    def meet(self, node_id: str) -> None:
        self._connected_since[node_id] = trio.current_time()
        self._feed.announce(Change("connected", node_id))

    def lose(self, node_id: str) -> None:
        if link := self._links.pop(node_id, None):
            link.close()
        for exchange in self._exchanges.pop(node_id, set()):
            exchange.finish(failure=NodeUnreachable(f"node {node_id} was lost while it was asked"))
        if self._connected_since.pop(node_id, None) is not None:
            self._feed.announce(Change("disconnected", node_id))

    def learn(self, writer: str, record: _Record) -> None:
        if self._alive and self.is_news(writer, record):
            self._records[writer] = record
            self._feed.announce(Change("record", writer))

    def is_news(self, writer: str, record: _Record) -> bool:
        return writer not in self._records or self._records[writer].version < record.version

    def known(self) -> dict[str, _Record]:
        return dict(self._records)

    def die(self) -> None:
        self._alive = False
        for node_id in [*self._connected_since, self._node_id]:
            self.lose(node_id)
        for scope in self._scopes:
            scope.cancel()

    def _peer(self, node_id: str, since: float) -> PeerInfo:
        there, back = self._links.get(node_id), self._network.router(node_id)._links.get(self._node_id)
        return PeerInfo(
            node_id=node_id,
            addresses=self._network.router(node_id).addresses,
            rtt_s=self._network.quality(self._node_id, node_id).latency_s
            + self._network.quality(node_id, self._node_id).latency_s,
            bytes_per_s=_finite(self._network.quality(node_id, self._node_id).bytes_per_s),
            data_plane="memory",
            bytes_sent=there.n_bytes if there else 0,
            bytes_received=back.n_bytes if back else 0,
            connected_since=since,
        )

    def _require(self, node_id: str) -> str:
        if node_id not in self._connected_since:
            raise NodeUnreachable(f"node {node_id} is not connected")
        return node_id

    def _link(self, node_id: str) -> MemoryLink:
        if (link := self._links.get(node_id)) is None:
            receiver = self._network.router(node_id)
            link = MemoryLink(
                self._node_id,
                receiver._deliver,
                self._network.quality(self._node_id, node_id),
                self._network.rng,
            )
            self._links[node_id] = link
            receiver.start(link.carry)
        return link

    async def _deliver(self, sender: str, header: bytes, payload: memoryview) -> None:
        await deliver(self._on_message, sender, header, payload)

    async def _answer(self, caller: InMemoryRouter, body: bytes, exchange: _Exchange) -> None:
        await trio.sleep(self._network.quality(caller.node_id, self._node_id).way_s(self._network.rng))
        try:
            response = await answer(self._on_request, caller.node_id, body)
        except RequestRefused as refusal:
            failure = RemoteError(f"node {self._node_id}: {refusal}")
            await trio.sleep(self._network.quality(self._node_id, caller.node_id).way_s(self._network.rng))
            exchange.finish(failure=failure)
        else:
            await trio.sleep(self._network.quality(self._node_id, caller.node_id).way_s(self._network.rng))
            exchange.finish(response=bytes(response))

    async def _run_while_alive(self, task: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        if not self._alive:
            return
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                await task(*args)
            finally:
                self._scopes.discard(scope)


class InMemoryNetwork:
    """All the nodes, and what lies between them. Use as an async context manager."""

    def __init__(self, quality: LinkQuality | None = None, *, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        """Decides what is lost."""
        self._quality = quality or LinkQuality()
        self._qualities: dict[tuple[str, str], LinkQuality] = {}
        self._routers: dict[str, InMemoryRouter] = {}
        self._cuts: set[frozenset[str]] = set()
        self._n_added = 0
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery] | None = None
        self.nursery: trio.Nursery

    async def __aenter__(self) -> InMemoryNetwork:
        self._nursery_manager = trio.open_nursery()
        self.nursery = await self._nursery_manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._nursery_manager is not None
        self.nursery.cancel_scope.cancel()
        return await self._nursery_manager.__aexit__(kind, error, trace)

    def add(self, node_id: str) -> InMemoryRouter:
        """A new node, connected to all others; of a killed node, its next life. Raises ValueError while it is
        alive."""
        if self._nursery_manager is None:
            raise RuntimeError("enter the network first: async with InMemoryNetwork() as network")
        if node_id in self._routers:
            raise ValueError(f"node {node_id} is already there")
        self._n_added += 1
        router = InMemoryRouter(self, node_id, incarnation=self._n_added)
        self._routers[node_id] = router
        for other in list(self._routers):
            if other != node_id and self._is_up(node_id, other):
                self._join(node_id, other)
        return router

    def kill(self, node_id: str) -> None:
        """As `kill -9`: its tasks stop where they are, what it sent and was to receive is lost, the others
        notice at once."""
        dead = self._routers.pop(node_id)
        dead.die()
        for router in self._routers.values():
            router.lose(node_id)

    def cut(self, a: str, b: str) -> None:
        """No bytes between two nodes until `heal`."""
        self._cuts.add(frozenset((a, b)))
        for here, there in ((a, b), (b, a)):
            if here in self._routers:
                self._routers[here].lose(there)

    def heal(self, a: str, b: str) -> None:
        if frozenset((a, b)) in self._cuts:
            self._cuts.discard(frozenset((a, b)))
            if a in self._routers and b in self._routers:
                self._join(a, b)

    def set_link(self, a: str, b: str, quality: LinkQuality) -> None:
        """Both ways, from the next message on a new link or a request on."""
        for here, there in ((a, b), (b, a)):
            self._qualities[here, there] = quality
            if here in self._routers and (link := self._routers[here]._links.get(there)):
                link.quality = quality

    def quality(self, sender: str, receiver: str) -> LinkQuality:
        if sender == receiver:
            return LinkQuality()
        return self._qualities.get((sender, receiver), self._quality)

    def router(self, node_id: str) -> InMemoryRouter:
        """Raises NodeUnreachable when no such node is alive."""
        try:
            return self._routers[node_id]
        except KeyError:
            raise NodeUnreachable(f"node {node_id} is not connected") from None

    def spread(self, origin: InMemoryRouter, writer: str, record: _Record) -> None:
        """To every node that can be reached from `origin`, directly or through others, each link's latency on
        the way."""
        origin.learn(writer, record)
        unreached = set(self._routers) - {origin.node_id}
        frontier: deque[tuple[str, float]] = deque([(origin.node_id, 0.0)])
        later: dict[float, list[InMemoryRouter]] = {}
        while frontier and unreached:
            here, delay_s = frontier.popleft()
            for there in sorted(unreached):
                if self._is_up(here, there):
                    unreached.discard(there)
                    arrival_delay_s = delay_s + self.quality(here, there).latency_s
                    frontier.append((there, arrival_delay_s))
                    router = self._routers[there]
                    if arrival_delay_s == 0.0:
                        router.learn(writer, record)
                    elif router.is_news(writer, record):
                        later.setdefault(arrival_delay_s, []).append(router)
        # A task for each distance, not for each node: thousands of nodes publish at once.
        for delay_s, routers in later.items():
            self.nursery.start_soon(self._bring_later, routers, writer, record, delay_s)

    async def _bring_later(
        self, routers: list[InMemoryRouter], writer: str, record: _Record, delay_s: float
    ) -> None:
        await trio.sleep(delay_s)
        for router in routers:
            router.learn(writer, record)

    def _join(self, a: str, b: str) -> None:
        here, there = self._routers[a], self._routers[b]
        here.meet(b)
        there.meet(a)
        for source, target in ((here, there), (there, here)):
            for writer, record in source.known().items():
                if target.is_news(writer, record):
                    self.spread(source, writer, record)

    def _is_up(self, a: str, b: str) -> bool:
        return frozenset((a, b)) not in self._cuts


def _finite(bytes_per_s: float) -> float | None:
    return bytes_per_s if math.isfinite(bytes_per_s) else None
