"""Gossip without gossipsub's own signatures, as its specification has it (StrictNoSign).

The library's unsigned messages still carry an author and a number that nobody can check. Other
implementations refuse them, and three of the library's own parts believe them: its cache of recent messages
names them by these two, so that what a peer offers (IHAVE) can never be recognised by content; its check for
equivocation drops a node's next message once somebody else has sent anything in its name; and a node is put
on a black list by a name that costs nothing. So neither field is sent here, and a message with one of them
is dropped before anything looks at it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from contextvars import ContextVar
from typing import Any

import trio
from libp2p.peer.id import ID
from libp2p.pubsub import gossipsub
from libp2p.pubsub.mcache import CacheEntry, MessageCache
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub

from swarmllm.swarm.libp2p.gossip_budget import GossipBudget
from swarmllm.swarm.peers.trust import Deed, Note, unnoted
from swarmllm_proto.identifiers import NodeId

_WORTH_REFUSING_BYTES = 1024
SEEN_MAX = 65_536
"""Ids of messages, each kept for two minutes after it was heard last: about 12 MiB. One that is forgotten and
comes again is checked again, and is no news."""
RECENT_MAX_BYTES = 32 * 2**20
"""Of messages, each kept for some seconds for neighbours that missed it. What does not fit is passed on
all the same, and a node that missed it learns of it by comparing records."""
_sender: ContextVar[NodeId | None] = ContextVar("gossip_sender", default=None)
"""The peer whose stream this task reads."""


class UnsignedPubsub(Pubsub):  # type: ignore[misc]
    """To be made with `strict_signing=False` and a message id made of the content."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.latest: dict[str, Any] = {}
        """What this node itself said last, by topic."""
        self.budget = GossipBudget()
        self.note: Note = unnoted

    async def publish(self, topic_id: str, data: bytes) -> None:
        self.latest[topic_id] = message = rpc_pb2.Message(data=data, topicIDs=[topic_id])
        await self.push_msg(self.my_id, message)

    async def continuously_read_stream(self, stream: Any) -> None:
        """Each stream is read by a task of its own."""
        _sender.set(NodeId(str(stream.muxed_conn.peer_id)))
        await super().continuously_read_stream(stream)

    def _is_subscribed_to_msg(self, msg: Any) -> bool:
        """Asked before a task is made for a message: of those that several neighbours send, one is enough."""
        sender = _sender.get()
        if sender and not self.budget.admit(sender, len(msg.data), trio.current_time()):
            self.note(sender, Deed.FLOODED)
            return False
        return super()._is_subscribed_to_msg(msg) and not self._is_msg_seen(msg)

    def _mark_msg_seen(self, msg: Any) -> None:
        super()._mark_msg_seen(msg)
        seen = self.seen_messages
        with seen.lock:
            while len(seen.cache) > SEEN_MAX:
                del seen.cache[next(iter(seen.cache))]

    async def push_msg(self, msg_forwarder: ID, msg: Any) -> None:
        if msg.from_id or msg.seqno or msg.signature or msg.key:
            return
        await super().push_msg(msg_forwarder, msg)


class UnsignedGossipSub(gossipsub.GossipSub):  # type: ignore[misc]
    """The router below it. `window`s as the library's constructor has them."""

    def attach(self, pubsub: Any) -> None:
        super().attach(pubsub)
        stock: Any = self.mcache
        self.mcache: Any = _ContentCache(stock.window_size, stock.history_size, pubsub)
        # Of each message and each connection a time is kept for the library's opinion of the mesh's health,
        # which nobody asks for, and only asking for it would ever clear them away.
        self.recent_message_deliveries: Any = defaultdict(lambda: deque(maxlen=0))
        self.recent_peer_connections: Any = deque(maxlen=0)
        self.recent_peer_disconnections: Any = deque(maxlen=0)

    async def send_recent_messages(self, peer_id: ID, topic: str) -> None:
        """To who has just subscribed. The library tells everything that it heard from anybody in the last
        seconds: in a swarm of n that finds itself, n(n-1) nodes tell each other of n. Nodes that meet compare
        what they know anyway; only what this one says in that very moment might pass the other by."""
        message, stream = self.pubsub.latest.get(topic), self.pubsub.peers.get(peer_id)
        if message is not None and stream is not None:
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


class _ContentCache(MessageCache):  # type: ignore[misc]
    """Recent messages under the ids by which they are offered and asked for."""

    def __init__(self, window_size: int, history_size: int, pubsub: Any) -> None:
        super().__init__(window_size, history_size)
        self._pubsub = pubsub
        self.n_bytes = 0

    def put(self, msg: Any) -> None:
        message_id = self._pubsub.get_message_id(msg)
        if message_id not in self.msgs and self.n_bytes + len(msg.data) <= RECENT_MAX_BYTES:
            self.msgs[message_id] = msg
            self.n_bytes += len(msg.data)
            self.history[0].append(CacheEntry(message_id, msg.topicIDs))

    def shift(self) -> None:
        self.n_bytes -= sum(len(self.msgs[entry.mid].data) for entry in self.history[-1])
        super().shift()
