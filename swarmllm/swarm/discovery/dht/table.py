"""Which nodes answer in the DHT, sorted by their distance from here: pure state, bounded.

Kademlia's k-buckets: one for each length of the prefix that a node shares with this one, BUCKET_SIZE nodes in
each, so near ones are known well and far ones by sample. Only a node that has answered a question gets in,
and one that is there keeps its place against newcomers until it fails to answer or has not been heard for
STALE_S: whoever makes up a thousand ids pushes nobody out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from swarmllm.swarm.discovery.dht.keys import node_place
from swarmllm.swarm.discovery.dht.messages import Contact
from swarmllm_proto.identifiers import NodeId

BUCKET_SIZE = 20
CONTACTS_MAX = 1024
STALE_S = 1800.0
_PLACE_BITS = 256


@dataclass(slots=True)
class _Entry:
    contact: Contact
    place: int
    answered_at_s: float


class RoutingTable:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self, node_id: NodeId) -> None:
        self._node_id = node_id
        self._place = node_place(node_id)
        self._entries: dict[NodeId, _Entry] = {}
        self._buckets: defaultdict[int, dict[NodeId, _Entry]] = defaultdict(dict)

    def __repr__(self) -> str:
        return f"<RoutingTable {len(self._entries)} nodes>"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node_id: NodeId) -> bool:
        return node_id in self._entries

    def answered(self, contact: Contact, now: float) -> bool:
        """This node has just answered. Whether it is in the table now."""
        node_id = contact.node_id
        if node_id == self._node_id:
            return False
        entry = self._entries.get(node_id)
        if entry is not None:
            entry.answered_at_s = now
            entry.contact = contact if contact.addresses else entry.contact
            return True
        entry = _Entry(contact, node_place(node_id), now)
        bucket = self._buckets[_PLACE_BITS - (entry.place ^ self._place).bit_length()]
        if len(bucket) >= BUCKET_SIZE or len(self._entries) >= CONTACTS_MAX:
            stalest = min(bucket.values(), key=lambda e: e.answered_at_s, default=None)
            if stalest is None or now - stalest.answered_at_s < STALE_S:
                return False
            self.failed(stalest.contact.node_id)
        bucket[node_id] = self._entries[node_id] = entry
        return True

    def failed(self, node_id: NodeId) -> None:
        """It did not answer."""
        if (entry := self._entries.pop(node_id, None)) is not None:
            del self._buckets[_PLACE_BITS - (entry.place ^ self._place).bit_length()][node_id]

    def closest(self, place: int, n: int = BUCKET_SIZE) -> list[Contact]:
        nearest = sorted(self._entries.values(), key=lambda entry: entry.place ^ place)
        return [entry.contact for entry in nearest[:n]]
