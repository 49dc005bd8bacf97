"""Gossip: publishes what this node says about itself to all nodes of the swarm, with gossipsub.

Topics: `swarm/models` carries envelopes (on change), `swarm/health` heartbeats (every few seconds); in a
private swarm each is followed by `/{network_id}`.

Messages carry their own signature (see envelope.py), so gossipsub's is off (see `UnsignedPubsub`): with it,
every receiver parses a key of the sender's making, which is one of the ways a message kills a stock host.
They are identified by their content, not by the sender's claim of origin and number: such a claim is free,
and with it anybody could have another node's next message taken for a repeat. What does not verify is not
forwarded.

Each peer may pass on so many messages and bytes (`GossipBudget`).

In a mesh each message comes as many times as there are neighbours. In a small swarm that is wasted: a node
with few neighbours sends what it says to all of them, and names them in it (`audience`). A neighbour with the
same neighbours has nobody left to pass it on to.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, Protocol

import trio
from libp2p.exceptions import ValidationError
from libp2p.io.exceptions import IOException, MessageTooLarge
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.stream.exceptions import StreamEOF, StreamError
from libp2p.peer.id import ID
from libp2p.pubsub import gossipsub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service

from swarmllm.log_filter import provoked_by
from swarmllm.swarm.libp2p.gossip_batches import ReadAhead, note_failure, read_rpc, send_batches
from swarmllm.swarm.libp2p.gossip_mesh import DEGREE, DEGREE_HIGH, DEGREE_LOW, UnsignedGossipSub
from swarmllm.swarm.libp2p.host import Host
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import Note, TrustEvent, ignored_event
from swarmllm_proto.envelope import audience_of
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)


MESSAGES_PER_S: Final = 500.0
MESSAGES_BURST: Final = 5_000.0
BYTES_PER_S: Final = 2.0 * 2**20
BYTES_BURST: Final = 32.0 * 2**20
PEERS_MAX: Final = 1024
AUDIENCE_MAX: Final = 16
"""Neighbours to whom a node sends itself what it says. With more it leaves that to the mesh."""
SEEN_MAX = 65_536
"""Ids of messages, each kept for two minutes after it was heard last: about 12 MiB. One that is forgotten and
comes again is checked again, and is not new."""
MODELS = "swarm/models"
HEALTH = "swarm/health"
TAKEN_AT_ONCE: Final = 8
"""Messages of one packet, before others get their turn: to check a signature takes a tenth of a millisecond,
and there may be hundreds."""
_VERDICTS_MAX = 128
"""Kept of messages, so that one that comes twice at the same moment is checked once. The library's list of a
thousand is searched from its beginning for each message."""
_MESSAGES_PER_TOPIC_PER_S = 1000
"""Counted on the forwarder, who in a mesh speaks for everybody: the default of 10 silences honest nodes."""


class GossipReader(Protocol):
    """Takes what gossip brings. Neither method may block."""

    def validate(self, topic: str, content: bytes) -> bool | None:
        """Whether to pass it on. None: no, and its forwarder is not to blame."""

    def receive(self, topic: str, content: bytes) -> None:
        """Gossip that passed `validate`."""

    def author_and_audience(self, topic: str, content: bytes) -> tuple[NodeId, bytes] | None:
        """Of gossip that passed `validate`: its author, and `audience_of` the nodes to which the author sends
        it itself. None: it names no audience."""

    def may_wait_s(self, topic: str, content: bytes) -> float:
        """For how long, at most, gossip that passed `validate` may wait here before it is passed on."""


@dataclass(slots=True)
class GossipAllowance:
    """What one peer may still send, as of `at_s`; it grows from there."""

    at_s: float
    n_messages: float = MESSAGES_BURST
    n_bytes: float = BYTES_BURST

    def grow(self, now: float) -> None:
        passed_s = max(0.0, now - self.at_s)
        self.at_s = max(self.at_s, now)
        self.n_messages = min(MESSAGES_BURST, self.n_messages + passed_s * MESSAGES_PER_S)
        self.n_bytes = min(BYTES_BURST, self.n_bytes + passed_s * BYTES_PER_S)

    def is_over(self, now: float) -> bool:
        """It is full again, as that of a peer that was never heard."""
        self.grow(now)
        return self.n_messages >= MESSAGES_BURST and self.n_bytes >= BYTES_BURST


class GossipBudget:
    """Limits how much gossip each peer may pass on: pure. `now` is any clock that does not run backwards, in
    seconds.

    Each peer has a bucket of messages and one of bytes. Every message counts for the peer that passes it on,
    whether it is new, a duplicate or a replay. The rates are those of the largest swarm that is a full mesh:
    256 nodes that each publish a record of some KiB every second.
    """

    def __init__(self, peers_max: int = PEERS_MAX, *, peers: Parts[GossipAllowance] | None = None) -> None:
        self._peers_max = peers_max
        self._peers: Parts[GossipAllowance] = Parts.alone() if peers is None else peers
        """The peer that was heard longest ago comes first, and is forgotten first."""

    def __repr__(self) -> str:
        return f"<GossipBudget {len(self._peers)} peers>"

    def __len__(self) -> int:
        return len(self._peers)

    def admit(self, peer: NodeId, n_bytes: int, now: float) -> bool:
        """Whether the peer may pass on this message."""
        known = self._peers.get(peer)
        if known is None:
            while len(self._peers) >= self._peers_max:
                self._peers.drop_first()
            known = GossipAllowance(now)
        self._peers.put_last(peer, known)
        known.grow(now)
        if known.n_messages < 1 or known.n_bytes < n_bytes:
            return False
        known.n_messages -= 1
        known.n_bytes -= n_bytes
        return True


class UnsignedPubsub(Pubsub):  # type: ignore[misc]
    """Gossip without gossipsub's own signatures, as its specification has it (StrictNoSign). To be made with
    `strict_signing=False` and a message id made of the content.

    The library's unsigned messages still carry an author and a number that nobody can check. Other
    implementations refuse them, and three of the library's own parts believe them: its cache of recent
    messages names them by these two, so that what a peer offers (IHAVE) can never be recognised by content;
    its check for equivocation drops a node's next message once somebody else has sent anything in its name;
    and a node is put on a black list by a name that costs nothing. So neither field is sent here, and a
    message with one of them is dropped before anything looks at it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.latest: dict[str, tuple[Any, float]] = {}
        """What this node itself said last, by topic, and when."""
        self.budget = GossipBudget()
        self.note: Note = ignored_event
        self.author_and_audience: dict[str, Callable[[bytes], tuple[NodeId, bytes] | None]] = {}
        """By topic, see `GossipReader`."""
        self.waits: dict[str, Callable[[bytes], float]] = {}
        """By topic: `GossipReader.may_wait_s`."""
        self.readers: dict[str, Callable[[bytes], None]] = {}
        """By topic: what takes in its messages. None raises."""

    def notify_subscriptions(self, publish_message: Any) -> None:
        """Without the library's queue, which is short and drops what does not fit, and the task that reads
        it."""
        for topic_id in publish_message.topicIDs:
            if (read := self.readers.get(topic_id)) is not None:
                read(publish_message.data)

    def neighbours(self, topic_id: str) -> list[ID]:
        """The peers to which messages of the topic can be sent; none where they are more than AUDIENCE_MAX.
        This is read from the library's tables for each message, and reading stops with the first one too
        many."""
        found: list[ID] = []
        for peer_id in self.peer_topics.get(topic_id, ()):
            if peer_id in self.peer_queues:
                if len(found) == AUDIENCE_MAX:
                    return []
                found.append(peer_id)
        return found

    def audience(self, topic_id: str) -> bytes | None:
        """`audience_of` this node and its neighbours."""
        neighbours = self.neighbours(topic_id)
        return audience_of(map(_node_id, (self.my_id, *neighbours))) if neighbours else None

    def is_with_all_neighbours(self, sender: ID, message: Any) -> bool:
        """Whether the author of this message has sent it to this node, and sends it to all its neighbours."""
        (topic_id,) = message.topicIDs
        read = self.author_and_audience.get(topic_id)
        named = None if read is None else read(message.data)
        return named is not None and named == (_node_id(sender), self.audience(topic_id))

    def names_audience(self, message: Any) -> bool:
        """Whether this node, its author, says in it to whom it sends it."""
        read = self.author_and_audience.get(message.topicIDs[0])
        return read is not None and read(message.data) is not None

    def may_wait_s(self, message: Any) -> float:
        read = self.waits.get(message.topicIDs[0])
        return 0.0 if read is None else read(message.data)

    async def pass_on(self, topic_id: str, data: bytes) -> None:
        """Publish what another node has said."""
        await self.push_msg(self.my_id, rpc_pb2.Message(data=data, topicIDs=[topic_id]))

    async def publish(self, topic_id: str, data: bytes) -> None:
        message = rpc_pb2.Message(data=data, topicIDs=[topic_id])
        self.latest[topic_id] = message, trio.current_time()
        await self.push_msg(self.my_id, message)

    async def continuously_read_stream(self, stream: Any) -> None:
        """Each stream is read by a task of its own."""
        peer_id, ahead = stream.muxed_conn.peer_id, ReadAhead(stream)
        try:
            while self.manager.is_running:
                await self._take(peer_id, await read_rpc(ahead, self.max_inbound_rpc_size))
        except MessageTooLarge:
            await stream.reset()
            self._handle_dead_peer(peer_id)
        except (StreamEOF, StreamError, IOException, RawConnError) as error:
            log.debug("gossip of %s ended: %s", peer_id, type(error).__name__)

    async def _take(self, peer_id: ID, rpc: rpc_pb2.RPC) -> None:
        sender = _node_id(peer_id)
        for n_taken, message in enumerate(rpc.publish):
            if n_taken and n_taken % TAKEN_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            try:
                if self._is_wanted(peer_id, sender, message):
                    await self.push_msg(peer_id, message)
            except Exception as error:
                note_failure(sender, error)
        if len(rpc.subscriptions) <= self.max_subscriptions_per_rpc:
            for subscription in rpc.subscriptions:
                self.handle_subscription(peer_id, subscription)
        if rpc.HasField("control"):
            await self.router.handle_rpc(rpc, peer_id)

    def _is_wanted(self, peer_id: ID, sender: NodeId, message: rpc_pb2.Message) -> bool:
        """Of those that several neighbours send, one is enough."""
        if not self.budget.admit(sender, len(message.data), trio.current_time()):
            self.note(sender, TrustEvent.FLOODED)
            return False
        self.router.held.knows(peer_id, self.get_message_id(message))
        return self._is_subscribed_to_msg(message) and not self._is_msg_seen(message)

    async def write_msg(self, stream: Any, rpc_msg: Any) -> bool:
        """Without this node's signed addresses, which the library adds to each: a third of a packet with one
        heartbeat. Who uses them has them from the first message of the connection."""
        rpc_msg.ClearField("senderRecord")
        return bool(await super().write_msg(stream, rpc_msg))

    async def handle_sending_messages(self, peer_id: ID, stream: Any, queue: Any) -> None:
        try:
            await send_batches(queue, partial(self.write_msg, stream))
        except Exception as error:
            log.debug("gossip to %s ended: %s", peer_id, type(error).__name__)
            self._handle_dead_peer(peer_id)

    def _forget_all_subscriptions(self, peer_id: ID) -> None:
        """A peer tells its subscriptions once, with its first message on a new connection. The end of an
        older one may be noticed after that, so they are kept while there is a connection."""
        if self._peer_is_connected(peer_id):
            self._replayed_recent_topics.pop(peer_id, None)
        else:
            super()._forget_all_subscriptions(peer_id)

    def _mark_msg_seen(self, msg: Any) -> None:
        super()._mark_msg_seen(msg)
        seen = self.seen_messages
        with seen.lock:
            while len(seen.cache) > SEEN_MAX:
                del seen.cache[next(iter(seen.cache))]

    async def push_msg(self, msg_forwarder: ID, msg: Any) -> None:
        """The library's, less what it does with names, scores and black lists that are not there."""
        if msg.from_id or msg.seqno or msg.signature or msg.key:
            return
        if self._is_msg_seen(msg):
            return
        try:
            await self.validate_msg(msg_forwarder, msg)
        except ValidationError:
            return
        self._mark_msg_seen(msg)
        self.notify_subscriptions(msg)
        await self.router.publish(msg_forwarder, msg)


class Gossip:
    """Outlives a crash of libp2p, as its host does; in between nothing is published."""

    def __init__(
        self,
        network_id: str,
        reader: GossipReader,
        size_max_bytes: dict[str, int],
        note: Note = ignored_event,
        peers: Parts[GossipAllowance] | None = None,
    ) -> None:
        self.network_id = network_id
        self.reader = reader
        self.size_max_bytes = size_max_bytes
        self.note = note
        self.budget = GossipBudget(peers=peers)
        self._pubsub: Any = None

    def attach(self, pubsub: Any) -> None:
        self._pubsub = pubsub

    def audience(self, topic: str) -> bytes | None:
        """`audience_of` this node and those to whom it would send a message itself; None: they are too many,
        or nobody is there."""
        audience: bytes | None = None
        if self._pubsub is not None:
            audience = self._pubsub.audience(topic_name(topic, self.network_id))
        return audience

    def neighbours(self) -> set[NodeId]:
        """The peers in the mesh of a topic."""
        meshes = {} if self._pubsub is None else self._pubsub.router.mesh
        return {NodeId(str(peer_id)) for mesh in meshes.values() for peer_id in mesh}

    async def publish(self, topic: str, content: bytes) -> None:
        """A failure of the network is logged, not raised: heartbeats tell those who miss the message."""
        if self._pubsub is not None:
            await self._push(self._pubsub.publish, topic, content)

    async def pass_on(self, topic: str, content: bytes) -> None:
        """The same with what another node has said."""
        if self._pubsub is not None:
            await self._push(self._pubsub.pass_on, topic, content)

    async def _push(self, push: Callable[[str, bytes], Awaitable[None]], topic: str, content: bytes) -> None:
        try:
            await push(topic_name(topic, self.network_id), content)
        except Exception as error:
            log.warning("gossip on %s failed: %s", topic, type(error).__name__)


@asynccontextmanager
async def run_gossip(gossip: Gossip, host: Host) -> AsyncIterator[None]:
    """On the libp2p host that is attached now, until the context is left."""
    size_max_bytes, network_id = gossip.size_max_bytes, gossip.network_id
    router = UnsignedGossipSub(
        protocols=[gossipsub.PROTOCOL_ID_V12, gossipsub.PROTOCOL_ID_V11, gossipsub.PROTOCOL_ID],
        degree=DEGREE,
        degree_low=DEGREE_LOW,
        degree_high=DEGREE_HIGH,
        # Of the library's 3: how often what was heard is offered to some who did not get it from here.
        gossip_window=1,
        # It slows the heartbeat down to once a minute where the mesh is in a bad way, as in a small swarm,
        # and all that is cleared away at each beat piles up meanwhile.
        adaptive_gossip_enabled=False,
        max_messages_per_topic_per_second=_MESSAGES_PER_TOPIC_PER_S,
    )
    pubsub = UnsignedPubsub(
        host.libp2p_host,
        router,
        strict_signing=False,
        msg_id_constructor=LatestId(),
        validation_cache_size=_VERDICTS_MAX,
        allowed_topics={topic_name(topic, network_id) for topic in size_max_bytes},
    )
    pubsub.note, pubsub.budget = gossip.note, gossip.budget
    for topic, size_max in size_max_bytes.items():
        name = topic_name(topic, network_id)
        pubsub.author_and_audience[name] = partial(gossip.reader.author_and_audience, topic)
        pubsub.waits[name] = partial(gossip.reader.may_wait_s, topic)
        pubsub.set_topic_validator(
            name,
            guarded_validator(topic, name, size_max, gossip.reader, gossip.note),
            is_async_validator=False,
        )
        pubsub.readers[name] = partial(_take_in, gossip.reader, topic)
    async with (
        background_trio_service(pubsub),
        background_trio_service(router),
        trio.open_nursery() as nursery,
    ):
        await pubsub.wait_until_ready()
        nursery.start_soon(router.send_held)
        for topic in size_max_bytes:
            await pubsub.subscribe(topic_name(topic, network_id))
        gossip.attach(pubsub)
        try:
            yield
        finally:
            gossip.attach(None)
            nursery.cancel_scope.cancel()


@lru_cache(maxsize=PEERS_MAX)
def _node_id(peer_id: ID) -> NodeId:
    return NodeId(str(peer_id))


def topic_name(topic: str, network_id: str) -> str:
    """As the wire has it."""
    return f"{topic}/{network_id}" if network_id else topic


class LatestId:
    """`_content_id`, of which a message is asked up to nine times in a row."""

    def __init__(self) -> None:
        self._message: Any = None
        self._id = b""

    def __call__(self, message: Any) -> bytes:
        if message is not self._message:
            self._message, self._id = message, _content_id(message)
        return self._id


def _content_id(message: Any) -> bytes:
    return hashlib.sha256(b"\0".join((*(t.encode() for t in message.topicIDs), message.data))).digest()


def guarded_validator(
    topic: str, name: str, size_max: int, reader: GossipReader, note: Note = ignored_event
) -> Callable[[Any, Any], bool]:
    """A validator that raises would end the process. What is not valid counts against the peer that passed it
    on, because an honest peer checks it first."""

    def validator(forwarder: Any, message: Any) -> bool:
        try:
            is_valid = (
                list(message.topicIDs) == [name]
                and len(message.data) <= size_max
                and reader.validate(topic, message.data)
            )
        except Exception:
            provoked_by(log, str(forwarder)).exception("validating gossip on %s", topic)
            return False
        if is_valid is False:
            note(NodeId(str(forwarder)), TrustEvent.BROKE_PROTOCOL, f"invalid gossip on {topic}")
        return bool(is_valid)

    return validator


def _take_in(reader: GossipReader, topic: str, content: bytes) -> None:
    try:
        reader.receive(topic, content)
    except Exception:
        provoked_by(log, "gossip").exception("taking in gossip on %s", topic)
