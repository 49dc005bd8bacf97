"""Nodes that find each other and tell each other of themselves, over a network that is made up.

What is real, of the product's own code, and each node's own: its book of envelopes, heartbeats, what is
fetched and forgotten (`RecordSpread`), the comparison of digests, the exchange of addresses, whom it dials
and when (`Dialler`), and whom it counts as reachable. What is made up: the network, whose ways take as long
as the distance; the mesh of gossip, in which each node passes a message on to a few of its connections; the
end of a connection, which both nodes notice at once where a node was killed, and after the data plane's
silence where the line is cut. Nothing takes processor time, and nobody signs.

Under trio's mock clock a minute of two hundred nodes takes some seconds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

import trio

from bench.common.simulated_network import Place, random_place
from swarmllm.errors import DeadlineExceeded, NodeUnreachable, RemoteError
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.data.keepalive import SILENCE_S
from swarmllm.swarm.discovery.address_race import CONNECT_S
from swarmllm.swarm.discovery.address_sources import usable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import PEERS_MAX, Dialler
from swarmllm.swarm.discovery.peer_exchange import PeerExchange
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.in_memory.signer import InMemorySigner
from swarmllm.swarm.libp2p.gossip_mesh import DEGREE, DEGREE_HIGH, DEGREE_LOW
from swarmllm.swarm.libp2p.held_gossip import HeldGossip
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable import ReachableNodes
from swarmllm.swarm.records.exchange import KIND_PEERS
from swarmllm.swarm.records.spread import RecordSpread
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.envelope import Envelope
from swarmllm_proto.identifiers import Multiaddr, NodeId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

DIAL_RTTS = 2
"""Of a new connection: TCP and Noise; comparing records comes after it."""
ASK_S = 10.0
MESH_EVERY_S = 5.0
SEEN_MAX = 65_536
ADDRESS = Address("192.0.2.1", 8810)
"""Of everybody: the network knows by the node id whom a dial is meant for."""
REFUSED_S = 0.1
"""Until a machine answers that nothing listens there."""


class RecordNetwork:
    """All nodes that live, and between which of them nothing arrives."""

    def __init__(self, nursery: trio.Nursery, seed: int) -> None:
        self.nursery = nursery
        self.rng = random.Random(seed)
        self.nodes: dict[NodeId, RecordNode] = {}
        self.sides: dict[NodeId, int] = {}
        """While the network is parted: the part of each node; nodes without one are in part 0."""
        self._places: dict[NodeId, Place] = {}

    def way_s(self, a: NodeId, b: NodeId) -> float:
        for node_id in (a, b):
            if node_id not in self._places:
                self._places[node_id] = random_place(self.rng)
        return self._places[a].rtt_s(self._places[b]) / 2

    def is_cut(self, a: NodeId, b: NodeId) -> bool:
        return self.sides.get(a, 0) != self.sides.get(b, 0)

    async def start(
        self,
        name: str,
        bootstrap: NodeId | None,
        *,
        started_at_ms: int,
        record: bytes,
        peers_max: int = PEERS_MAX,
    ) -> RecordNode:
        node = RecordNode(self, node_id_named(name), started_at_ms, peers_max)
        self.nodes[node.node_id] = node
        await self.nursery.start(node.run, bootstrap, record)
        return node

    def kill(self, node: RecordNode) -> None:
        """Its peers see its connections end."""
        del self.nodes[node.node_id]
        peers = list(node.links)
        node.life.cancel()
        for peer in peers:
            self.nodes[peer].loses(node.node_id)

    def part(self, sides: dict[NodeId, int]) -> None:
        """Nothing arrives any more between nodes of different sides, and nothing says so."""
        self.sides = sides
        self.nursery.start_soon(self._miss)

    def heal(self) -> None:
        self.sides = {}

    async def _miss(self) -> None:
        await trio.sleep(SILENCE_S)
        for node in list(self.nodes.values()):
            for peer in [each for each in node.links if self.is_cut(node.node_id, each)]:
                node.loses(peer)


class RecordNode:
    def __init__(self, network: RecordNetwork, node_id: NodeId, started_at_ms: int, peers_max: int) -> None:
        self.node_id = node_id
        self.network = network
        self.started_at_ms = started_at_ms
        self.life = trio.CancelScope()
        self.links: dict[NodeId, set[trio.CancelScope]] = {}
        """Connections, greeted or not, with what waits for the other end and is cancelled with them."""
        self.connected: Parts[float] = Parts.alone()
        self.mesh: dict[NodeId, None] = {}
        self.n_messages = self.n_bytes = self.n_dials = 0
        """Of gossip and of comparisons that came, duplicates included; `n_dials`: from here."""
        self.feed = ChangeFeed()
        rng = random.Random(network.rng.random())
        self.dialler = Dialler(
            node_id, rng, peers_max, heard_at_s=lambda other: self.spread.book.heard_at_s(other)
        )
        self._rng = rng
        self._seen: dict[bytes, None] = {}
        self._held = HeldGossip(rng)
        self._held_changed = trio.Event()
        self._peers = PeerExchange(lambda node_id, body: self._ask(node_id, KIND_PEERS, body), self)
        self.spread: RecordSpread
        self.reachable: ReachableNodes
        self._nursery: trio.Nursery

    def __repr__(self) -> str:
        return f"<RecordNode {self.node_id} connected={len(self.connected)}>"

    async def run(
        self,
        bootstrap: NodeId | None,
        record: bytes,
        *,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        signer = InMemorySigner(self.node_id)
        with self.life:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.spread = RecordSpread(
                    signer,
                    lambda node_id, content, signature: True,
                    self.started_at_ms,
                    nursery,
                    self.feed,
                    ask=self._ask,
                    connected=self.connected,
                    listener=self,
                )
                self.reachable = ReachableNodes(self.spread.book, self.dialler, self.connected, self.feed)
                gossip: object = self
                self.spread.begin(gossip, (str(ADDRESS),), ())  # type: ignore[arg-type]
                await self.spread.publish(record)
                if bootstrap is not None:
                    self.dialler.suggest(bootstrap, [ADDRESS], trio.current_time(), is_permanent=True)
                nursery.start_soon(self.dialler.run, self._dial, lambda: set(self.links))
                nursery.start_soon(self._send_held)
                task_status.started()
                await self._keep_mesh()

    # What `RecordSpread` and the others ask of it.

    def heard(self, envelope: Envelope) -> None:
        self.dialler.suggest(envelope.node_id, usable(envelope.addresses), trio.current_time())

    def forgotten(self, node_id: NodeId) -> None:
        self.dialler.forget(node_id)

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        return self.dialler.is_lost(node_id, heard_at_s)

    def connected_addresses(self) -> Iterable[tuple[NodeId, tuple[Multiaddr, ...]]]:
        found = (self.spread.envelope(node_id) for node_id in self.connected)
        return [(each.node_id, each.addresses) for each in found if each is not None]

    def n_heard_of(self) -> int:
        return len(self.spread.book)

    def remembered_addresses(self) -> Iterable[tuple[NodeId, tuple[Multiaddr, ...]]]:
        return ()

    def hear(self, node_id: NodeId, addresses: list[Address]) -> None:
        self.dialler.suggest(node_id, addresses, trio.current_time(), max_failures=5)

    def audience(self, topic: str) -> bytes | None:
        """None: messages go by the mesh, which is small beside the swarm."""
        return None

    async def publish(self, topic: str, content: bytes) -> None:
        self._seen[_name(topic, content)] = None
        self._pass_on(topic, content, None)
        await trio.lowlevel.checkpoint()

    async def pass_on(self, topic: str, content: bytes) -> None:
        await self.publish(topic, content)

    # Gossip.

    def _pass_on(self, topic: str, content: bytes, sender: NodeId | None) -> None:
        for peer in list(self.mesh):
            if peer != sender:
                self.network.nursery.start_soon(self._carry, peer, topic, content)

    async def _carry(self, peer: NodeId, topic: str, content: bytes) -> None:
        await trio.sleep(self.network.way_s(self.node_id, peer))
        other = self.network.nodes.get(peer)
        if other is not None and not self.network.is_cut(self.node_id, peer):
            other._takes(self.node_id, topic, content)

    def _takes(self, sender: NodeId, topic: str, content: bytes) -> None:
        self.n_messages += 1
        self.n_bytes += len(content)
        name = _name(topic, content)
        self._held.knows(sender, name)
        if name in self._seen:
            return
        self._seen[name] = None
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        if self.spread.validate(topic, content):
            if wait_s := self.spread.may_wait_s(topic, content):
                self._hold(topic, content, sender, name, wait_s)
            else:
                self._pass_on(topic, content, sender)
            self.spread.receive(topic, content)

    def _hold(self, topic: str, content: bytes, sender: NodeId, name: bytes, wait_s: float) -> None:
        for peer in self.mesh:
            if peer != sender:
                self._held.hold(peer, name, (topic, content), wait_s, trio.current_time())
        self._held_changed.set()

    async def _send_held(self) -> None:
        while True:
            self._held_changed = trio.Event()
            with trio.move_on_at(self._held.due_at_s):
                await self._held_changed.wait()
                continue
            for peer, messages in self._held.due(trio.current_time()):
                for topic, content in messages:
                    if peer in self.mesh:
                        self.network.nursery.start_soon(self._carry, peer, topic, content)

    async def _keep_mesh(self) -> None:
        while True:
            self._fill_mesh()
            await trio.sleep(MESH_EVERY_S)

    def _fill_mesh(self) -> None:
        if len(self.mesh) >= DEGREE_LOW:
            return
        others = [peer for peer in self.connected if peer not in self.mesh]
        for node_id in self._rng.sample(others, min(len(others), DEGREE - len(self.mesh))):
            other = self.network.nodes.get(node_id)
            if other is not None and (len(other.mesh) < DEGREE_HIGH or not self.mesh):
                self.mesh[node_id] = other.mesh[self.node_id] = None

    # Connections.

    async def _dial(self, node_id: NodeId, addresses: list[Address]) -> None:
        self.n_dials += 1
        other = self.network.nodes.get(node_id)
        if self.network.is_cut(self.node_id, node_id):
            await trio.sleep(CONNECT_S)
            raise NodeUnreachable("nothing answers")
        way_s = self.network.way_s(self.node_id, node_id)
        await trio.sleep(2 * DIAL_RTTS * way_s if other else REFUSED_S + 2 * way_s)
        if (
            other is None
            or self.network.nodes.get(node_id) is not other
            or self.network.is_cut(self.node_id, node_id)
        ):
            raise NodeUnreachable("nobody is there")
        if node_id not in self.links:
            self.links[node_id], other.links[self.node_id] = set(), set()
            other._nursery.start_soon(other._greet, self.node_id)
            await self._greet(node_id)
        if node_id not in self.connected:
            raise NodeUnreachable("it was lost while records were compared")

    async def _greet(self, node_id: NodeId) -> None:
        link = self.links.get(node_id)
        try:
            await self.spread.synchronise(node_id)
        except (NodeUnreachable, DeadlineExceeded, RemoteError):
            self.loses(node_id)
            return
        if self.links.get(node_id) is link:
            self.connected.put_last(node_id, trio.current_time())
            self.dialler.answered(node_id)
            self._fill_mesh()
            self._nursery.start_soon(self._peers.learn_from, node_id)

    def loses(self, node_id: NodeId) -> None:
        link = self.links.pop(node_id, None)
        if link is None:
            return
        for waiting in link:
            waiting.cancel()
        self.connected.drop(node_id)
        self.mesh.pop(node_id, None)
        self.dialler.lost(node_id, trio.current_time(), on_purpose=False)
        other = self.network.nodes.get(node_id)
        if other is not None and not self.network.is_cut(self.node_id, node_id):
            other.loses(self.node_id)

    async def _ask(self, node_id: NodeId, kind: int, body: bytes) -> bytes:
        link = self.links.get(node_id)
        if link is None:
            raise NodeUnreachable("it is not connected")
        with trio.move_on_after(ASK_S) as waiting:
            link.add(waiting)
            try:
                await trio.sleep(2 * self.network.way_s(self.node_id, node_id))
                other = self.network.nodes.get(node_id)
                if other is None or self.network.is_cut(self.node_id, node_id):
                    await trio.sleep_forever()
                assert other is not None
                answer = other._answer(self.node_id, kind, body)
            except RequestRefused as refusal:
                raise RemoteError(str(refusal)) from None
            finally:
                link.discard(waiting)
            self.n_bytes += len(answer)
            other.n_bytes += len(body)
            return answer
        if self.links.get(node_id) is not link:
            raise NodeUnreachable("it was lost while it was asked")
        raise DeadlineExceeded("it does not answer")

    def _answer(self, sender: NodeId, kind: int, body: bytes) -> bytes:
        if kind == KIND_PEERS:
            return self._peers.answer(sender, body)
        return self.spread.answer(sender, kind, body)


def _name(topic: str, content: bytes) -> bytes:
    return hashlib.sha256(topic.encode() + content).digest()
