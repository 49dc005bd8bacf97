"""A swarm without a network: every node in one process, under trio's clock.

`InMemoryRouter` keeps the promises of `Router` with the same errors, the same order and the same
back-pressure as the libp2p one (one contract test-suite runs over both), acknowledges messages by the same
rules, and adds what a real network will not give on command: latency, bandwidth and loss per link, `cut`,
`silence`, `heal` and `kill`. Under trio's autojump clock a simulated minute costs milliseconds.

    async with InMemoryNetwork() as network:
        a, b = network.add("a"), network.add("b")

Nodes see each other as soon as they are added. Handlers run in tasks of the network, never in the sender's:
two handlers that send to each other would otherwise wait for each other. Records travel as fast as the links
on their way; where a link is cut they go round it, as gossip would.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import trio
from blake3 import blake3

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data.keepalive import SILENCE_S
from swarmllm.swarm.in_memory.link import LinkQuality, MemoryLine, MemoryLink
from swarmllm.swarm.in_memory.router import InMemoryRouter, Record
from swarmllm_proto.identifiers import BASE58, NODE_ID_SIZE, NodeId, parse_node_id

_NAMED = "12D3KooWA"
_NAME_MAX, _MARK_DIGITS = 30, 8
_MEET_AGAIN_S = 1.0
"""After two nodes have lost each other although the line between them is good."""


def node_id_named(name: str) -> NodeId:
    """A valid node id in which the name can be read, always the same one; simple names keep their order."""
    readable = "".join(letter if letter in BASE58 else "z" for letter in name[:_NAME_MAX])
    number = int.from_bytes(blake3(name.encode()).digest(length=_MARK_DIGITS))
    mark = "".join(BASE58[number // 58**place % 58] for place in range(_MARK_DIGITS))
    n_filling = NODE_ID_SIZE - len(_NAMED + mark) - len(readable)
    return parse_node_id(_NAMED + readable + BASE58[0] * n_filling + mark)


class InMemoryNetwork:
    """All the nodes, and the lines between them. Use as an async context manager."""

    def __init__(self, quality: LinkQuality | None = None, *, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        """Decides what is lost."""
        self._quality = quality or LinkQuality()
        self._qualities: dict[tuple[NodeId, NodeId], LinkQuality] = {}
        self._routers: dict[NodeId, InMemoryRouter] = {}
        self._cuts: set[frozenset[NodeId]] = set()
        self._lines: defaultdict[tuple[NodeId, NodeId], MemoryLine] = defaultdict(MemoryLine)
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

    def add(self, node_id: NodeId) -> InMemoryRouter:
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

    def kill(self, node_id: NodeId) -> None:
        """As `kill -9`: its tasks stop where they are, what it sent and was to receive is lost, the others
        notice at once."""
        dead = self._routers.pop(node_id)
        dead.die()
        for router in self._routers.values():
            router.lose(node_id)

    def cut(self, a: NodeId, b: NodeId) -> None:
        """No bytes between two nodes until `heal`."""
        self._cuts.add(frozenset((a, b)))
        self._part(a, b)

    def silence(self, sender: NodeId, receiver: NodeId) -> None:
        """Nothing that one sends arrives at the other, until `heal`, and no end of anything tells of it: a
        frozen node, a dead line. They lose each other after SILENCE_S, as without a heartbeat."""
        line = self.line(sender, receiver)
        if not line.is_silent:
            line.fall_silent()
            self.nursery.start_soon(self._miss, sender, receiver)

    def lose_acknowledgements(self, sender: NodeId, receiver: NodeId) -> None:
        """Of what is sent until the two have lost each other over it."""
        self._routers[sender].link(receiver).loses_acknowledgements = True

    def heal(self, a: NodeId, b: NodeId) -> None:
        is_ill = not self._is_up(a, b)
        self._cuts.discard(frozenset((a, b)))
        for line in (self.line(a, b), self.line(b, a)):
            line.speak()
        if is_ill and a in self._routers and b in self._routers:
            if b in self._routers[a].connected():
                self._exchange_records(a, b)
            else:
                self._join(a, b)

    def set_link(self, a: NodeId, b: NodeId, quality: LinkQuality) -> None:
        """Both ways, from the next message on a new link or a request on."""
        for here, there in ((a, b), (b, a)):
            self._qualities[here, there] = quality
            if here in self._routers and (link := self._routers[here].link_to(there)):
                link.quality = quality

    def quality(self, sender: NodeId, receiver: NodeId) -> LinkQuality:
        if sender == receiver:
            return LinkQuality()
        return self._qualities.get((sender, receiver), self._quality)

    def line(self, sender: NodeId, receiver: NodeId) -> MemoryLine:
        return self._lines[sender, receiver]

    async def pass_way(self, sender: NodeId, receiver: NodeId) -> None:
        """Returns when something small, sent now, has arrived."""
        await trio.sleep(self.quality(sender, receiver).way_s(self.rng))
        await self.line(sender, receiver).opened()

    async def keep_acknowledged(self, link: MemoryLink, sender: NodeId, receiver: NodeId) -> None:
        back_latency_s = self.quality(receiver, sender).latency_s
        if not await link.acknowledge(self.line(receiver, sender), back_latency_s):
            self._part(sender, receiver)
            await trio.sleep(_MEET_AGAIN_S)
            if {sender, receiver} <= self._routers.keys() and self._is_up(sender, receiver):
                self._join(sender, receiver)

    def router(self, node_id: NodeId) -> InMemoryRouter:
        """Raises NodeUnreachable when no such node is alive."""
        try:
            return self._routers[node_id]
        except KeyError:
            raise NodeUnreachable(f"node {node_id} is not connected") from None

    def spread(self, origin: InMemoryRouter, writer: NodeId, record: Record) -> None:
        """To every node that can be reached from `origin`, directly or through others, each link's latency on
        the way."""
        origin.learn(writer, record)
        unreached = set(self._routers) - {origin.node_id}
        frontier: deque[tuple[NodeId, float]] = deque([(origin.node_id, 0.0)])
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
                    elif router.is_newer(writer, record):
                        later.setdefault(arrival_delay_s, []).append(router)
        # A task for each distance, not for each node: thousands of nodes publish at once.
        for delay_s, routers in later.items():
            self.nursery.start_soon(self._bring_later, routers, writer, record, delay_s)

    async def _bring_later(
        self, routers: list[InMemoryRouter], writer: NodeId, record: Record, delay_s: float
    ) -> None:
        await trio.sleep(delay_s)
        for router in routers:
            router.learn(writer, record)

    def _join(self, a: NodeId, b: NodeId) -> None:
        here, there = self._routers[a], self._routers[b]
        if b not in here.connected():
            here.meet(b)
            there.meet(a)
        self._exchange_records(a, b)

    def _exchange_records(self, a: NodeId, b: NodeId) -> None:
        here, there = self._routers[a], self._routers[b]
        for source, target in ((here, there), (there, here)):
            for writer, record in source.known().items():
                if target.is_newer(writer, record):
                    self.spread(source, writer, record)

    def _part(self, a: NodeId, b: NodeId) -> None:
        for here, there in ((a, b), (b, a)):
            if here in self._routers:
                self._routers[here].lose(there)

    async def _miss(self, sender: NodeId, receiver: NodeId) -> None:
        with trio.move_on_after(SILENCE_S):
            await self.line(sender, receiver).opened()
            return
        self._part(sender, receiver)

    def _is_up(self, a: NodeId, b: NodeId) -> bool:
        is_silent = any(way in self._lines and self._lines[way].is_silent for way in ((a, b), (b, a)))
        return not is_silent and frozenset((a, b)) not in self._cuts
