"""What a relay has promised, and whether it can promise more: pure state, bounded.

The limits are what an operator agrees to with `network.relay_service`. They are constants: a relay that is
asked for more is better joined by a second one.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmllm.swarm.discovery.relay.messages import Status
from swarmllm.swarm.peers.parts import Parts
from swarmllm_proto.identifiers import NodeId

RESERVATIONS_MAX = 128
RESERVED_S = 3600.0
CIRCUITS_MAX = 64
CIRCUITS_PER_NODE = 16
"""At either end."""
CIRCUIT_S = 2 * 3600.0
CIRCUIT_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Reservation:
    """Of a peer, with this relay."""

    until_s: float

    def is_over(self, now: float) -> bool:
        return self.until_s <= now


class RelayBook:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self, peers: Parts[Reservation] | None = None) -> None:
        self._reservations: Parts[Reservation] = Parts.alone() if peers is None else peers
        self._circuits: dict[tuple[NodeId, NodeId], int] = {}

    def __repr__(self) -> str:
        return f"<RelayBook {len(self._reservations)} reservations, {self.n_circuits} circuits>"

    @property
    def n_circuits(self) -> int:
        return sum(self._circuits.values())

    def holders(self) -> set[NodeId]:
        return set(self._reservations)

    def reserve(self, node_id: NodeId, now: float) -> Status:
        """For RESERVED_S from now; again before they are over renews."""
        for over in [each for each, held in self._reservations.items() if held.is_over(now)]:
            self._reservations.drop(over)
        if node_id not in self._reservations and len(self._reservations) >= RESERVATIONS_MAX:
            return Status.RESERVATION_REFUSED
        self._reservations.put(node_id, Reservation(now + RESERVED_S))
        return Status.OK

    def lost(self, node_id: NodeId) -> None:
        """It is no longer connected: nothing can be carried to it."""
        self._reservations.drop(node_id)

    def begin(self, dialler: NodeId, target: NodeId, now: float) -> Status:
        """One more circuit; to be followed by `end` if this is OK."""
        if dialler == target:
            return Status.PERMISSION_DENIED
        reservation = self._reservations.get(target)
        if reservation is None or reservation.is_over(now):
            return Status.NO_RESERVATION
        for node_id in (dialler, target):
            n_of_node = sum(n for ends, n in self._circuits.items() if node_id in ends)
            if n_of_node >= CIRCUITS_PER_NODE:
                return Status.RESOURCE_LIMIT_EXCEEDED
        if self.n_circuits >= CIRCUITS_MAX:
            return Status.RESOURCE_LIMIT_EXCEEDED
        self._circuits[dialler, target] = self._circuits.get((dialler, target), 0) + 1
        return Status.OK

    def end(self, dialler: NodeId, target: NodeId) -> None:
        left = self._circuits[dialler, target] - 1
        if left:
            self._circuits[dialler, target] = left
        else:
            del self._circuits[dialler, target]
