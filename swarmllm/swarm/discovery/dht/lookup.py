"""One search through the DHT: whom to ask next, and when it is over. Pure.

Kademlia's way: ask the PARALLEL nearest known, take the nearer ones they name, go on until the N_CLOSEST
nearest that answer have all been asked. However many are named, no more than ASKED_MAX are asked and
KNOWN_MAX kept in mind, so an answer full of invented nodes costs a bounded number of dials.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmllm.swarm.discovery.dht.keys import node_place
from swarmllm.swarm.discovery.dht.messages import Contact
from swarmllm_proto.identifiers import NodeId

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
