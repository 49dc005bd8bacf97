"""What a relay has promised, and whether it can promise more: pure state, bounded.

The limits are what an operator agrees to with `network.relay_service`. They are constants: a relay that is
asked for more is better joined by a second one.
"""

from __future__ import annotations

from swarmllm.swarm.discovery.relay.messages import Status
from swarmllm_proto.identifiers import NodeId

RESERVATIONS_MAX = 128
RESERVED_S = 3600.0
CIRCUITS_MAX = 64
CIRCUITS_PER_NODE = 16
"""At either end."""
CIRCUIT_S = 2 * 3600.0
CIRCUIT_BYTES = 8 * 2**30


class RelayBook:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self) -> None:
        self._until_s: dict[NodeId, float] = {}
        self._circuits: dict[tuple[NodeId, NodeId], int] = {}

    def __repr__(self) -> str:
        return f"<RelayBook {len(self._until_s)} reservations, {self.n_circuits} circuits>"

    @property
    def n_circuits(self) -> int:
        return sum(self._circuits.values())

    def holders(self) -> set[NodeId]:
        return set(self._until_s)

    def reserve(self, node_id: NodeId, now: float) -> Status:
        """For RESERVED_S from now; again before they are over renews."""
        self._until_s = {n: until_s for n, until_s in self._until_s.items() if until_s > now}
        if node_id not in self._until_s and len(self._until_s) >= RESERVATIONS_MAX:
            return Status.RESERVATION_REFUSED
        self._until_s[node_id] = now + RESERVED_S
        return Status.OK

    def lost(self, node_id: NodeId) -> None:
        """It is no longer connected: nothing can be carried to it."""
        self._until_s.pop(node_id, None)

    def begin(self, dialler: NodeId, target: NodeId, now: float) -> Status:
        """One more circuit; to be followed by `end` if this is OK."""
        if dialler == target:
            return Status.PERMISSION_DENIED
        if self._until_s.get(target, now) <= now:
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
