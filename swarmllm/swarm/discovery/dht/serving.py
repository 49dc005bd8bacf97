"""Answers other nodes in the DHT, whatever they send: bounded in size, in time, in number.

`DhtCore` holds the routing table and the providers' book and answers the four questions without I/O: a
message and the time in, a message out. `Serving` is the driver that reads questions from streams.

A stream carries a few questions one after the other. A stream is reset if its peer asks faster than
QUESTIONS_PER_S for longer than a burst, opens more streams at once than STREAMS_PER_PEER, or sends bytes that
are no message.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import trio

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.messages import (
    MESSAGE_MAX_BYTES,
    Contact,
    DhtMessageKind,
    Message,
    decode,
    encode,
    place,
)
from swarmllm.swarm.discovery.dht.table import (
    BUCKET_SIZE,
    PROVIDERS_PER_KEY,
    ProviderBook,
    RoutingEntry,
    RoutingTable,
)
from swarmllm.swarm.libp2p.host import Stream
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.errors import BadMessage, FrameTruncated, ProtocolError
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

STREAMS_PER_PEER = 8
STREAMS_MAX = 256
QUESTIONS_PER_STREAM = 64
QUESTIONS_PER_S = 50.0
BURST = 200.0
"""A hundred models announced at once, by id and by name."""
READ_S = 10.0
WRITE_S = 10.0
_ASKERS_MAX = 1024


class DhtNode:
    """What the DHT asks of the node that it runs on. These defaults admit everybody and know nobody."""

    def addresses_of(self, node_id: NodeId) -> tuple[Address, ...]:
        """Where a node says it is, as this node knows; empty: unknown."""
        return ()

    def connected(self) -> Collection[NodeId]:
        """Whom this node has a connection with."""
        return ()

    def lets_in(self, node_id: NodeId) -> bool:
        """Whether a connection to that node is wanted at all."""
        return True

    def serves(self) -> bool:
        """Whether others should count on this node, which they should not where they cannot dial it."""
        return True

    def knows_the_swarm(self) -> bool:
        """Whether it knows all nodes and their models without the DHT."""
        return False

    def met_in_passing(self, node_id: NodeId) -> None:
        """That node was dialled for one question."""
        return


class DhtCore:
    def __init__(
        self,
        node_id: NodeId,
        node: DhtNode,
        n_entries: Parts[int] | None = None,
        contacts: Parts[RoutingEntry] | None = None,
    ) -> None:
        """`n_entries`: how many keys each peer provides. `contacts`: the routing table."""
        self.node_id = node_id
        self.table = RoutingTable(node_id, contacts)
        self.providers = ProviderBook(n_entries)
        self.provided: set[bytes] = set()
        """Keys that this node itself has."""
        self._node = node

    def answer(self, sender: NodeId, message: Message, now: float) -> Message | None:
        """None: the message has no answer. Raises BadMessage for a question that no honest node asks."""
        match message.kind:
            case DhtMessageKind.PING:
                return Message(DhtMessageKind.PING)
            case DhtMessageKind.FIND_NODE | DhtMessageKind.GET_VALUE:
                return Message(message.kind, self._key(message), self._closer(sender, message.key))
            case DhtMessageKind.GET_PROVIDERS:
                key = self._key(message)
                return Message(message.kind, key, self._closer(sender, key), self._has(sender, key, now))
            case DhtMessageKind.ADD_PROVIDER:
                self._add(sender, message, now)
                return None
        raise BadMessage("type", "values are not kept here")

    def placed(self, contact: Contact) -> Contact:
        """With the addresses that the node itself signed, where they are known."""
        signed = self._node.addresses_of(contact.node_id)
        return Contact(contact.node_id, signed or contact.addresses)

    def _key(self, message: Message) -> bytes:
        if not message.key:
            raise BadMessage("key", "is missing")
        return message.key

    def _closer(self, sender: NodeId, key: bytes) -> tuple[Contact, ...]:
        """Connected ones first: others may have left since they answered."""
        nearest = self.table.closest(place(key), 2 * BUCKET_SIZE)
        connected = self._node.connected()
        told = [contact for contact in nearest if contact.node_id != sender]
        told.sort(key=lambda contact: contact.node_id not in connected)
        placed = [self.placed(contact) for contact in told]
        return tuple(contact for contact in placed if contact.addresses)[:BUCKET_SIZE]

    def _has(self, sender: NodeId, key: bytes, now: float) -> tuple[Contact, ...]:
        found = self.providers.find(key, now)[: PROVIDERS_PER_KEY // 4]
        if key in self.provided:
            found.insert(0, Contact(self.node_id, self._node.addresses_of(self.node_id)))
        return tuple(self.placed(contact) for contact in found if contact.node_id != sender)

    def _add(self, sender: NodeId, message: Message, now: float) -> None:
        """A node speaks for itself alone: one that names another is not believed."""
        key = self._key(message)
        for contact in message.providers:
            if contact.node_id == sender:
                self.providers.add(key, self.placed(contact), now)


@dataclass(slots=True)
class DhtAsker:
    allowance: float = BURST
    """Of questions, at `at_s`; it grows from there."""
    at_s: float = 0.0
    n_streams: int = 0

    def grow(self, now: float) -> None:
        self.allowance = min(BURST, self.allowance + (now - self.at_s) * QUESTIONS_PER_S)
        self.at_s = now

    def is_over(self, now: float) -> bool:
        """It is as one that has never asked."""
        self.grow(now)
        return not self.n_streams and self.allowance >= BURST


class Serving:
    def __init__(
        self,
        core: DhtCore,
        node: DhtNode,
        peers: Parts[DhtAsker] | None = None,
    ) -> None:
        self._core = core
        self._node = node
        self._askers: Parts[DhtAsker] = Parts.alone() if peers is None else peers
        self._n_streams = 0
        self.n_answered = 0
        self.n_refused = 0

    async def serve(self, sender: NodeId, stream: Stream) -> None:
        """One stream; the host closes it afterwards."""
        if not self._node.serves():
            await stream.reset()
            return
        asker = self._asker(sender)
        if asker.n_streams >= STREAMS_PER_PEER or self._n_streams >= STREAMS_MAX:
            await self._refuse(stream, "too many streams")
            return
        asker.n_streams += 1
        self._n_streams += 1
        try:
            for _ in range(QUESTIONS_PER_STREAM):
                if not await self._answer_one(sender, asker, stream):
                    break
            await stream.close()
        except FrameTruncated:
            await stream.reset()
        except (ProtocolError, trio.TooSlowError) as error:
            await self._refuse(stream, str(error) or "too slow")
        finally:
            asker.n_streams -= 1
            self._n_streams -= 1

    async def _answer_one(self, sender: NodeId, asker: DhtAsker, stream: Stream) -> bool:
        """False: the sender has nothing more to ask."""
        with trio.fail_after(READ_S):
            try:
                content = await read_framed(stream, MESSAGE_MAX_BYTES)
            except ProtocolError:
                raise
            except Exception:  # whatever libp2p calls the end of a stream
                return False
        now = trio.current_time()
        if not self._may_ask(asker, now):
            await self._refuse(stream, "too many questions")
            return False
        answer = self._core.answer(sender, decode(content), now)
        self.n_answered += 1
        if answer is not None:
            with trio.fail_after(WRITE_S):
                await stream.write(framed(encode(answer)))
        return True

    async def _refuse(self, stream: Stream, why: str) -> None:
        self.n_refused += 1
        log.debug("a stream of the DHT is refused: %s", why)
        await stream.reset()

    def _may_ask(self, asker: DhtAsker, now: float) -> bool:
        asker.grow(now)
        if asker.allowance < 1:
            return False
        asker.allowance -= 1
        return True

    def _asker(self, sender: NodeId) -> DhtAsker:
        if (asker := self._askers.get(sender)) is not None:
            return asker
        if len(self._askers) >= _ASKERS_MAX:
            idle = next((who for who, asker in self._askers.items() if not asker.n_streams), None)
            if idle is not None:
                self._askers.drop(idle)
        return self._askers.put(sender, DhtAsker(at_s=trio.current_time()))
