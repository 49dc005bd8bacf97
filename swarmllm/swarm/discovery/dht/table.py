"""Which nodes answer in the DHT, by their distance from here, and the search through them: pure, bounded.

**The table.** Kademlia's k-buckets: one for each length of the prefix that a node shares with this one,
BUCKET_SIZE nodes in each, so near ones are known well and far ones by sample. Only a node that has answered
a question gets in, and one that is there keeps its place against newcomers until it fails to answer or has
not been heard for STALE_S: whoever makes up a thousand ids pushes nobody out.

**A lookup** asks the PARALLEL nearest known, takes the nearer ones they name, and goes on until the
N_CLOSEST nearest that answer have all been asked. However many are named, no more than ASKED_MAX are asked
and KNOWN_MAX kept in mind, so an answer full of invented nodes costs a bounded number of dials.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from swarmllm.swarm.discovery.dht.messages import Contact, node_place
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


N_CLOSEST = 20
PARALLEL = 3
ASKED_MAX = 60
KNOWN_MAX = 200
_NAMED_BY_ONE = 20


class Lookup:
    def __init__(self, place: int, node_id: NodeId, start: Iterable[Contact]) -> None:
        """`node_id`: this node, which is never asked."""
        self._place = place
        self._node_id = node_id
        self._known: dict[NodeId, tuple[int, Contact]] = {}
        self._under_way: set[NodeId] = set()
        self._answered: set[NodeId] = set()
        self._failed: set[NodeId] = set()
        self._learn(start)

    @property
    def n_asked(self) -> int:
        return len(self._under_way) + len(self._answered) + len(self._failed)

    @property
    def is_over(self) -> bool:
        return not self._under_way and not self._candidates()

    def next(self) -> Contact | None:
        """To be asked now, and to be followed by `answered` or `failed`; None: nobody, before one of those
        that are being asked has answered."""
        candidates = self._candidates() if len(self._under_way) < PARALLEL else []
        if not candidates:
            return None
        self._under_way.add(candidates[0].node_id)
        return candidates[0]

    def answered(self, node_id: NodeId, closer: Iterable[Contact] = ()) -> None:
        self._under_way.discard(node_id)
        self._answered.add(node_id)
        self._learn(list(closer)[:_NAMED_BY_ONE])

    def failed(self, node_id: NodeId) -> None:
        self._under_way.discard(node_id)
        self._failed.add(node_id)
        self._known.pop(node_id, None)

    def closest(self) -> list[Contact]:
        """Of those that answered, the nearest, nearest first."""
        return [contact for contact in self._nearest() if contact.node_id in self._answered][:N_CLOSEST]

    def _candidates(self) -> list[Contact]:
        if self.n_asked >= ASKED_MAX:
            return []
        settled = self._under_way | self._answered
        return [contact for contact in self._nearest()[:N_CLOSEST] if contact.node_id not in settled]

    def _nearest(self) -> list[Contact]:
        return [contact for _, contact in sorted(self._known.values(), key=lambda known: known[0])]

    def _learn(self, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            node_id = contact.node_id
            if node_id != self._node_id and node_id not in self._failed and node_id not in self._known:
                self._known[node_id] = node_place(node_id) ^ self._place, contact
        for contact in self._nearest()[KNOWN_MAX:]:
            if contact.node_id not in self._under_way:
                del self._known[contact.node_id]
