"""The mesh of neighbours through which gossip goes: libp2p's gossipsub, with fewer copies of each message.

A message comes to a node once from each neighbour in its mesh, less one. So the mesh is small (DEGREE), what
is in no hurry waits for a moment at each node (`held_gossip`), and only what is large enough to be worth it
is offered to neighbours outside the mesh. What a node misses by that, it learns by comparing records.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import trio
from libp2p.peer.id import ID
from libp2p.pubsub import gossipsub
from libp2p.pubsub.mcache import CacheEntry, MessageCache
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.score import PeerScorer, ScoreParams

from swarmllm.shared_ticks import REST_TICK_S, next_tick_s
from swarmllm.swarm.libp2p.held_gossip import HeldGossip

DEGREE: Final = 4
DEGREE_LOW: Final = 3
DEGREE_HIGH: Final = 6
"""Neighbours in the mesh: so many are looked for where there are fewer than DEGREE_LOW or more than
DEGREE_HIGH. The library's own 6, 5 and 12 would be twice the bytes."""
UPKEEP_S: Final = 1.0
"""Between looks at the mesh while peers come and go. The library's default of 120 s leaves a new node deaf
for minutes."""
SETTLED_UPKEEP_S: Final = REST_TICK_S
"""Once none has for SETTLED_S, about: at the same moments as other looks (`shared_ticks`). Each look costs an
idle node time, and offers recent messages to peers outside the mesh, which cost them as much."""
SETTLED_S: Final = 10.0
BETTER_PEERS_S: Final = 60.0
"""Between replacements of the neighbour in the mesh that is first with the fewest messages, and between
additions of better ones. The library makes both at each look, so that in a swarm where nothing happens all
meshes change all the time."""
RECENT_MAX_BYTES = 32 * 2**20
"""Of messages, each kept for some seconds for neighbours that missed it. What does not fit is passed on
all the same, and a node that missed it learns of it by comparing records."""
JUST_SAID_S: Final = 10.0
"""Longer than it takes two nodes that have met to compare what they know."""
WORTH_OFFERING_BYTES: Final = 512
"""An offer is made to six neighbours, and its name of the message has 66 bytes each time."""
_WORTH_REFUSING_BYTES = 4 * 1024


class UnsignedGossipSub(gossipsub.GossipSub):  # type: ignore[misc]
    """The router below `UnsignedPubsub`. `window`s as the library's constructor has them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._changed_at_s = trio.current_time()
        """When a peer came or went."""
        self._better_peers_due_s: defaultdict[tuple[str, str], float] = defaultdict(lambda: -math.inf)
        """By what is done, and topic."""
        self.held = HeldGossip(random.Random(random.random()))
        self._held_changed = trio.Event()
        super().__init__(*arguments, **options)

    @property
    def heartbeat_interval(self) -> float:
        """Seconds until the next look at the mesh; the library asks after each."""
        now = trio.current_time()
        is_settled = now >= self._changed_at_s + SETTLED_S
        return next_tick_s(now, SETTLED_UPKEEP_S) - now if is_settled else UPKEEP_S

    @heartbeat_interval.setter
    def heartbeat_interval(self, _: float) -> None:
        """The library sets what its constructor was given."""

    def add_peer(self, peer_id: ID, protocol_id: Any) -> None:
        self._changed_at_s = trio.current_time()
        super().add_peer(peer_id, protocol_id)

    def remove_peer(self, peer_id: ID) -> None:
        self._changed_at_s = trio.current_time()
        self.held.forget(peer_id)
        super().remove_peer(peer_id)

    def attach(self, pubsub: Any) -> None:
        super().attach(pubsub)
        stock: Any = self.mcache
        self.mcache: Any = ContentCache(stock.window_size, stock.history_size, pubsub)
        # Of each message and each connection a time is kept for the library's opinion of the mesh's health,
        # which nobody asks for, and only asking for it would ever clear them away.
        self.recent_message_deliveries: Any = defaultdict(lambda: deque(maxlen=0))
        self.recent_peer_connections: Any = deque(maxlen=0)
        self.recent_peer_disconnections: Any = deque(maxlen=0)
        self.scorer: Any = NoScores(ScoreParams())

    async def publish(self, msg_forwarder: ID, pubsub_msg: Any) -> None:
        pubsub, topic = self.pubsub, pubsub_msg.topicIDs[0]
        hold_s = pubsub.may_wait_s(pubsub_msg)
        if msg_forwarder != pubsub.my_id:
            if pubsub.is_with_all_neighbours(msg_forwarder, pubsub_msg):
                return
        elif neighbours := self._told_by_the_author(topic, pubsub_msg, hold_s):
            # Nor is it offered to anybody later.
            for peer_id in neighbours:
                self.send_rpc(peer_id, rpc_pb2.RPC(publish=[pubsub_msg]))
            return
        else:
            hold_s = 0.0
        if hold_s > 0:
            self._hold(msg_forwarder, pubsub_msg, hold_s)
        elif msg_forwarder == pubsub.my_id or len(pubsub.peers) > len(pubsub.peer_topics.get(topic, ())):
            # Kept for those that may still subscribe, too.
            await super().publish(msg_forwarder, pubsub_msg)
        else:
            await self._pass_on(msg_forwarder, pubsub_msg)

    async def _pass_on(self, msg_forwarder: ID, message: Any) -> None:
        self.mcache.put(message)
        message_id = self.pubsub.get_message_id(message)
        await self._emit_idontwant_for_message(message_id, message.topicIDs)
        for peer_id in self._get_peers_to_send(message.topicIDs, msg_forwarder, ID(b""), message_id):
            self.send_rpc(peer_id, rpc_pb2.RPC(publish=[message]))

    def _get_peers_to_send(
        self, topic_ids: Any, msg_forwarder: ID, origin: ID, msg_id: bytes | None = None
    ) -> Iterable[ID]:
        """The library also looks among all peers for those that speak an older protocol, which is not spoken
        here, and asks for the score of each."""
        (topic,) = topic_ids
        if topic not in self.mesh:
            yield from super()._get_peers_to_send(topic_ids, msg_forwarder, origin, msg_id)
            return
        unwanted: Mapping[ID, Collection[bytes]] = self.dont_send_message_ids
        for peer_id in list(self.mesh[topic]):
            if peer_id != msg_forwarder and msg_id not in unwanted.get(peer_id, ()):
                yield peer_id

    def _told_by_the_author(self, topic: str, message: Any, hold_s: float) -> list[ID]:
        """The neighbours to which this node sends what it says itself; nobody where the mesh will do. News
        goes to all of them, and so does what names them."""
        neighbours: list[ID] = self.pubsub.neighbours(topic)
        is_in_mesh = len(self.mesh.get(topic, ())) >= DEGREE_LOW
        return [] if hold_s > 0 and is_in_mesh and not self.pubsub.names_audience(message) else neighbours

    def _hold(self, msg_forwarder: ID, message: Any, hold_s: float) -> None:
        self.mcache.put(message)
        message_id, due_at_s = self.pubsub.get_message_id(message), self.held.due_at_s
        now = trio.current_time()
        for peer_id in self._get_peers_to_send(message.topicIDs, msg_forwarder, ID(b"")):
            self.held.hold(peer_id, message_id, message, hold_s, now)
        if self.held.due_at_s < due_at_s:
            self._held_changed.set()

    async def send_held(self) -> None:
        """What waits, when it is due. Runs for ever."""
        while True:
            self._held_changed = trio.Event()
            with trio.move_on_at(self.held.due_at_s):
                await self._held_changed.wait()
                continue
            for peer_id, messages in self.held.due(trio.current_time()):
                self.send_rpc(peer_id, rpc_pb2.RPC(publish=messages))

    def _looks_for_better(self, what: str, topic: str) -> bool:
        now = trio.current_time()
        is_due = now >= self._better_peers_due_s[what, topic]
        if is_due:
            self._better_peers_due_s[what, topic] = now + BETTER_PEERS_S
        return is_due

    async def _maintain_mesh_quality(self, topic: str) -> None:
        if self._looks_for_better("replace", topic):
            await super()._maintain_mesh_quality(topic)

    def _perform_opportunistic_grafting(self, topic: str, peers_to_graft: Any) -> int:
        return self._looks_for_better("add", topic) and super()._perform_opportunistic_grafting(
            topic, peers_to_graft
        )

    async def send_recent_messages(self, peer_id: ID, topic: str) -> None:
        """To who has just subscribed. The library tells everything that it heard from anybody in the last
        seconds: in a swarm of n that finds itself, n(n-1) nodes tell each other of n. Nodes that meet compare
        what they know anyway; only what this one says in that very moment might pass the other by. Older
        messages would be new to nobody, and whoever has forgotten their ids would pass them on."""
        latest, stream = self.pubsub.latest.get(topic), self.pubsub.peers.get(peer_id)
        if latest is None or stream is None:
            return
        message, said_at_s = latest
        if trio.current_time() < said_at_s + JUST_SAID_S:
            await self.pubsub.write_msg(stream, rpc_pb2.RPC(publish=[message]))

    async def _emit_idontwant_for_message(self, msg_id: bytes, topics: Any) -> None:
        """To tell six neighbours that a message need not be sent again is worth it where the message is
        larger than the telling, of which the library makes no difference."""
        message = self.mcache.get(msg_id)
        if message is not None and len(message.data) >= _WORTH_REFUSING_BYTES:
            await super()._emit_idontwant_for_message(msg_id, topics)

    def _check_equivocation(self, msg: Any) -> bool:
        """Nobody is named who could contradict himself."""
        return True


class NoScores(PeerScorer):  # type: ignore[misc]
    """What the library's scores come to where nothing has a weight, as here: trust is kept elsewhere. It
    multiplies each of its counters by one at every look at the mesh."""

    def on_heartbeat(self, dt_seconds: float = 1.0) -> None:
        pass

    def score(self, peer: ID, topics: list[str]) -> float:
        return 0.0

    def allow_publish(self, peer: ID, topics: list[str]) -> bool:
        return True

    def allow_gossip(self, peer: ID, topics: list[str]) -> bool:
        return True

    def is_graylisted(self, peer: ID, topics: list[str]) -> bool:
        return False


class ContentCache(MessageCache):  # type: ignore[misc]
    """Recent messages under the ids by which they are offered and asked for."""

    def __init__(self, window_size: int, history_size: int, pubsub: Any) -> None:
        super().__init__(window_size, history_size)
        self._pubsub = pubsub
        self.n_bytes = 0

    def put(self, msg: Any) -> None:
        n_bytes = len(msg.data)
        if n_bytes < WORTH_OFFERING_BYTES or self.n_bytes + n_bytes > RECENT_MAX_BYTES:
            return
        message_id = self._pubsub.get_message_id(msg)
        if message_id not in self.msgs:
            self.msgs[message_id] = msg
            self.n_bytes += n_bytes
            self.history[0].append(CacheEntry(message_id, msg.topicIDs))

    def shift(self) -> None:
        self.n_bytes -= sum(len(self.msgs[entry.mid].data) for entry in self.history[-1])
        super().shift()
