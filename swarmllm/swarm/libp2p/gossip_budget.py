"""How much gossip each peer may pass on: pure, with the time as an argument.

Each peer has a bucket of messages and one of bytes. Every message counts for the peer that passes it on,
whether it is new, a duplicate or a replay. The rates are those of the largest swarm that is a full mesh: 256
nodes that each publish a record of some KiB every second.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MESSAGES_PER_S: Final = 500.0
MESSAGES_BURST: Final = 5_000.0
BYTES_PER_S: Final = 2.0 * 2**20
BYTES_BURST: Final = 32.0 * 2**20
PEERS_MAX: Final = 1024


@dataclass(slots=True)
class _Peer:
    at_s: float
    n_messages: float = MESSAGES_BURST
    n_bytes: float = BYTES_BURST


class GossipBudget:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self, peers_max: int = PEERS_MAX) -> None:
        self._peers_max = peers_max
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        """The peer that was heard longest ago comes first, and is forgotten first."""

    def __repr__(self) -> str:
        return f"<GossipBudget {len(self._peers)} peers>"

    def __len__(self) -> int:
        return len(self._peers)

    def admit(self, peer: str, n_bytes: int, now: float) -> bool:
        """Whether the peer may pass on this message."""
        known = self._peers.get(peer)
        if known is None:
            while len(self._peers) >= self._peers_max:
                self._peers.popitem(last=False)
            known = self._peers[peer] = _Peer(now)
        self._peers.move_to_end(peer)
        passed_s = max(0.0, now - known.at_s)
        known.at_s = max(known.at_s, now)
        known.n_messages = min(MESSAGES_BURST, known.n_messages + passed_s * MESSAGES_PER_S)
        known.n_bytes = min(BYTES_BURST, known.n_bytes + passed_s * BYTES_PER_S)
        if known.n_messages < 1 or known.n_bytes < n_bytes:
            return False
        known.n_messages -= 1
        known.n_bytes -= n_bytes
        return True
