"""How much gossip each peer may pass on: pure, with the time as an argument.

Each peer has a bucket of messages and one of bytes. Every message counts for the peer that passes it on,
whether it is new, a duplicate or a replay. The rates are those of the largest swarm that is a full mesh: 256
nodes that each publish a record of some KiB every second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from swarmllm.swarm.peers.parts import Parts
from swarmllm_proto.identifiers import NodeId

MESSAGES_PER_S: Final = 500.0
MESSAGES_BURST: Final = 5_000.0
BYTES_PER_S: Final = 2.0 * 2**20
BYTES_BURST: Final = 32.0 * 2**20
PEERS_MAX: Final = 1024


@dataclass(slots=True)
class GossipAllowance:
    """Of one peer, at `at_s`; it grows from there."""

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
    """`now` is any clock that does not run backwards, in seconds."""

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
