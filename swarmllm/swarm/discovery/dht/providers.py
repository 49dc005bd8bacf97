"""Who said that it has what: pure state, bounded in every direction, with an expiry.

A node can only speak for itself, over a connection that proves who it is, so filling this takes an identity
and a connection per handful of entries. What is full takes no newcomers until something expires: who is there
says again every hour that it still is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmllm.swarm.discovery.dht.messages import Contact
from swarmllm.swarm.peers.parts import Parts
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
                    if n_left := (self._n_of_node.get(node_id) or 0) - 1:
                        self._n_of_node.put(node_id, n_left)
                    else:
                        self._n_of_node.drop(node_id)
            if not held.until_s:
                del self._keys[key]
