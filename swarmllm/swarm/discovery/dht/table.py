"""The DHT's routing table, lookups through it, and the providers of keys: pure, bounded.

**The table.** Kademlia's k-buckets: one for each length of the prefix that a node shares with this one,
BUCKET_SIZE nodes in each, so near ones are known well and far ones by sample. Only a node that has answered
a question gets in, and one that is there keeps its place against newcomers until it fails to answer or has
not been heard for STALE_S: anyone who makes up a thousand ids pushes nobody out.

**A lookup** asks the PARALLEL nearest known, takes the nearer ones they name, and goes on until the
N_CLOSEST nearest that answer have all been asked. However many are named, no more than ASKED_MAX are asked
and KNOWN_MAX kept in mind, so an answer full of invented nodes costs a bounded number of dials.

A node can only speak for itself, over a connection that proves who it is, so filling this takes an identity
and a connection per handful of entries. A full table takes no newcomers until an entry expires; providers
announce themselves again every hour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarmllm.swarm.discovery.dht.messages import Contact, node_place
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId

EXPIRY_S = 3 * 3600.0
"""libp2p's 48 h make a DHT return mostly the dead where nodes come and go by the hour."""
KEYS_MAX = 16_384
KEYS_PER_NODE = 512
"""Two for each model: by its id and by its name."""
PROVIDERS_PER_KEY = 64
ENTRIES_MAX = 65_536
"""Of all keys: with all the addresses that one may have, about 100 MiB."""


@dataclass(slots=True)
class _Key:
    until_s: dict[NodeId, tuple[Contact, float]] = field(default_factory=dict)
    """Its providers. They stay with the key, because lookups go from a key to all of its providers; the
    object of each peer counts its entries."""


class ProviderBook:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self, peers: Parts[int] | None = None) -> None:
        """`peers`: how many entries each has."""
        self._keys: dict[bytes, _Key] = {}
        self._n_of_node: Parts[int] = Parts.alone() if peers is None else peers
        self._n_entries = 0

    def __repr__(self) -> str:
        return f"<ProviderBook {len(self._keys)} keys>"

    def __len__(self) -> int:
        """Entries, not keys."""
        return self._n_entries

    def add(self, key: bytes, contact: Contact, now: float) -> bool:
        """Whether it has been written down."""
        held = self._keys.get(key)
        if held is None or contact.node_id not in held.until_s:
            n_keys = self._n_of_node.get(contact.node_id) or 0
            n_there = len(held.until_s) if held else 0
            is_full = self._n_entries >= ENTRIES_MAX
            if is_full or n_keys >= KEYS_PER_NODE or n_there >= PROVIDERS_PER_KEY:
                return False
            if held is None:
                if len(self._keys) >= KEYS_MAX:
                    return False
                held = self._keys[key] = _Key()
            self._n_of_node.put(contact.node_id, n_keys + 1)
            self._n_entries += 1
        held.until_s[contact.node_id] = contact, now + EXPIRY_S
        return True

    def find(self, key: bytes, now: float) -> list[Contact]:
        """The latest first."""
        held = self._keys.get(key)
        if held is None:
            return []
        alive = [(until_s, contact) for contact, until_s in held.until_s.values() if until_s > now]
        return [contact for _, contact in sorted(alive, key=lambda each: -each[0])]

    def expire(self, now: float) -> None:
        for key, held in list(self._keys.items()):
            for node_id, (_, until_s) in list(held.until_s.items()):
                if until_s <= now:
                    del held.until_s[node_id]
                    self._n_entries -= 1
                    n_left = (self._n_of_node.get(node_id) or 0) - 1
                    if n_left > 0:
                        self._n_of_node.put(node_id, n_left)
                    else:
                        self._n_of_node.drop(node_id)
            if not held.until_s:
                del self._keys[key]


BUCKET_SIZE = 20
CONTACTS_MAX = 1024
STALE_S = 1800.0
_PLACE_BITS = 256


@dataclass(slots=True)
class RoutingEntry:
    contact: Contact
    place: int
    bucket: int
    """Bits of the prefix that it shares with this node."""
    answered_at_s: float


class RoutingTable:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self, node_id: NodeId, peers: Parts[RoutingEntry] | None = None) -> None:
        """`peers`: the entry of each that is in the table."""
        self._node_id = node_id
        self._place = node_place(node_id)
        self._entries: Parts[RoutingEntry] = Parts.alone() if peers is None else peers

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
        place = node_place(node_id)
        entry = RoutingEntry(contact, place, _PLACE_BITS - (place ^ self._place).bit_length(), now)
        bucket = [other for other in self._entries.values() if other.bucket == entry.bucket]
        if len(bucket) >= BUCKET_SIZE or len(self._entries) >= CONTACTS_MAX:
            stalest = min(bucket, key=lambda e: e.answered_at_s, default=None)
            if stalest is None or now - stalest.answered_at_s < STALE_S:
                return False
            self.failed(stalest.contact.node_id)
        self._entries.put(node_id, entry)
        return True

    def failed(self, node_id: NodeId) -> None:
        """It did not answer."""
        self._entries.drop(node_id)

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
        """Ends with the lookup, and most of these nodes never become peers, so it is not in the peer
        table."""
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
