"""Decides which connections end though both ends live and nothing is wrong: pure, with the time passed in.

A node looks for `network.max_peers` connections and takes those of others beyond them. Nodes that come and go
look for theirs among nodes that have enough, so the number would grow for as long as others come, and a node
that all know would have one with all. So a node that has more than it looks for, and a quarter more, offers
to end those that have carried nothing but gossip for long. The other end agrees where it keeps as many as it
looks for itself. Both then have enough, and neither looks for another one in its place.
"""

from __future__ import annotations

import random
from collections.abc import Container
from typing import Final

from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable import IDLE_S, Use
from swarmllm_proto.identifiers import NodeId

OFFERS_MAX: Final = 8
"""At a time."""
TOLERATED: Final = 1.25
"""Times as many connections as are looked for: some of them will end by themselves."""
AGREES_AFTER_S: Final = IDLE_S / 2
"""Without a use. The other end has counted the last one at another moment."""


class SpareConnections:
    def __init__(self, peers_max: int, uses: Parts[Use], randomness: random.Random) -> None:
        self._peers_max = peers_max
        self._uses = uses
        self._random = randomness

    def __repr__(self) -> str:
        return f"<SpareConnections beyond {self._peers_max}>"

    def offered(self, n_connected: int, now: float, kept: Container[NodeId]) -> list[NodeId]:
        """With whom to offer to end the connection, drawn by lot: each of two parts of a swarm that have just
        met has few connections with the other one. An offer that is refused is not repeated for IDLE_S."""
        n_more = n_connected - int(TOLERATED * self._peers_max)
        if n_more <= 0:
            return []
        idle = [
            node_id
            for node_id, use in self._uses.items()
            if use.is_for_gossip and now - use.since_s >= IDLE_S and node_id not in kept
        ]
        drawn = self._random.sample(idle, min(len(idle), n_more, OFFERS_MAX))
        for node_id in drawn:
            if (use := self._uses.get(node_id)) is not None:
                use.since_s = now
        return drawn

    def was_used_since(self, node_id: NodeId, offered_at_s: float) -> bool:
        """Whether there has been work with that node since the offer was made."""
        use = self._uses.get(node_id)
        return use is not None and use.since_s > offered_at_s

    def agrees(self, node_id: NodeId, n_staying: int, now: float, kept: Container[NodeId]) -> bool:
        """Whether that node may end its connection with this one. `n_staying`: of the connected nodes, with
        that one, without those that have been told that they may go."""
        use = self._uses.get(node_id)
        return (
            use is not None
            and use.is_for_gossip
            and n_staying > self._peers_max
            and now - use.since_s >= AGREES_AFTER_S
            and node_id not in kept
        )
