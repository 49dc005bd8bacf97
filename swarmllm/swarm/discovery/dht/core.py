"""What this node answers to others: the routing table and the providers' book behind the four questions.

Without I/O: a message and the time in, a message out.
"""

from __future__ import annotations

from collections.abc import Collection

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.messages import Contact, Kind, Message, place
from swarmllm.swarm.discovery.dht.table import BUCKET_SIZE, PROVIDERS_PER_KEY, ProviderBook, RoutingTable
from swarmllm.swarm.peers.parts import Parts
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import NodeId


class DhtNode:
    """What the DHT asks of the node that it runs on: here one that lets everybody in and knows nobody."""

    def whereabouts(self, node_id: NodeId) -> tuple[Address, ...]:
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

    def let_go(self, node_id: NodeId) -> None:
        """End the connection with a node that was asked in passing."""
        return


class DhtCore:
    def __init__(
        self,
        node_id: NodeId,
        node: DhtNode,
        peers: Parts[int] | None = None,
    ) -> None:
        """`peers`: how many entries of each are kept here."""
        self.node_id = node_id
        self.table = RoutingTable(node_id)
        self.providers = ProviderBook(peers)
        self.provided: set[bytes] = set()
        """Keys that this node itself has."""
        self._node = node

    def answer(self, sender: NodeId, message: Message, now: float) -> Message | None:
        """None: nothing is said to that. Raises BadMessage for what no honest node asks."""
        match message.kind:
            case Kind.PING:
                return Message(Kind.PING)
            case Kind.FIND_NODE | Kind.GET_VALUE:
                return Message(message.kind, self._key(message), self._closer(sender, message.key))
            case Kind.GET_PROVIDERS:
                key = self._key(message)
                return Message(message.kind, key, self._closer(sender, key), self._has(sender, key, now))
            case Kind.ADD_PROVIDER:
                self._add(sender, message, now)
                return None
        raise BadMessage("type", "values are not kept here")

    def placed(self, contact: Contact) -> Contact:
        """With the addresses that the node itself signed, where they are known."""
        signed = self._node.whereabouts(contact.node_id)
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
            found.insert(0, Contact(self.node_id, self._node.whereabouts(self.node_id)))
        return tuple(self.placed(contact) for contact in found if contact.node_id != sender)

    def _add(self, sender: NodeId, message: Message, now: float) -> None:
        """A node speaks for itself alone: whoever names another is not believed."""
        key = self._key(message)
        for contact in message.providers:
            if contact.node_id == sender:
                self.providers.add(key, self.placed(contact), now)
