"""Decides which connections end though both ends live and nothing is wrong: pure, with the time passed in.

A node looks for `network.max_peers` connections and takes those of others beyond them. Nodes that come and go
look for theirs among nodes that have enough, so the number would grow for as long as others come, and a node
that all know would have one with all. So a node that has more than it looks for, and a quarter more, offers
to end those that have carried nothing but gossip for long. The other end agrees where it keeps as many as it
looks for itself. Both then have enough, and neither looks for another one in its place.

Whoever has many names can fill a node with connections, agree to the end of none, and wait for the others to
end theirs. So of the connections that this node chose itself, because it dialled the node or has reason to
trust it, half as many as it looks for stay in any case.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Container
from typing import Final

from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable import IDLE_S, Use
from swarmllm_proto.identifiers import NodeId

OFFERS_MAX: Final = 8
"""At a time."""
TOLERATED: Final = 1.25
"""Times as many connections as are looked for: some of them will end by themselves."""
CHOSEN: Final = 0.5
"""Times as many as are looked for: of the chosen ones so many stay."""
AGREES_AFTER_S: Final = IDLE_S / 2
"""Without a use. The other end has counted the last one at another moment."""


class SpareConnections:
    def __init__(
        self,
        peers_max: int,
        uses: Parts[Use],
        is_chosen: Callable[[NodeId], bool],
        randomness: random.Random,
    ) -> None:
        """`is_chosen`: whether this node dialled that one, or knows it as no stranger."""
        self._peers_max = peers_max
        self._uses = uses
        self._is_chosen = is_chosen
        self._random = randomness

    def __repr__(self) -> str:
        return f"<SpareConnections beyond {self._peers_max}>"

    def offered(self, staying: Collection[NodeId], now: float, kept: Container[NodeId]) -> list[NodeId]:
        """With whom to offer to end the connection, drawn by lot: each of two parts of a swarm that have just
        met has few connections with the other one. An offer that is refused is not repeated for IDLE_S.
        `staying`: the connected nodes that have not been told that they may go."""
        n_more = len(staying) - int(TOLERATED * self._peers_max)
        if n_more <= 0:
            return []
        idle = [node_id for node_id in staying if self._is_idle(node_id, now, IDLE_S) and node_id not in kept]
        n_chosen_spare = self._n_chosen_spare(staying)
        drawn: list[NodeId] = []
        for node_id in self._random.sample(idle, len(idle)):
            if len(drawn) == min(n_more, OFFERS_MAX):
                break
            if self._is_chosen(node_id):
                if n_chosen_spare <= 0:
                    continue
                n_chosen_spare -= 1
            drawn.append(node_id)
        for node_id in drawn:
            self._wait(node_id, now)
        return drawn

    def agrees(
        self, node_id: NodeId, staying: Collection[NodeId], now: float, kept: Container[NodeId]
    ) -> bool:
        """Whether that node, which is one of those that are `staying`, may end its connection with this one.
        One that is refused is refused until it has been idle for long again."""
        if not self._is_idle(node_id, now, AGREES_AFTER_S):
            return False
        agrees = (
            len(staying) > self._peers_max
            and node_id not in kept
            and (not self._is_chosen(node_id) or self._n_chosen_spare(staying) > 0)
        )
        if not agrees:
            self._wait(node_id, now)
        return agrees

    def was_used_since(self, node_id: NodeId, offered_at_s: float) -> bool:
        """Whether there has been work with that node since the offer was made."""
        use = self._uses.get(node_id)
        return use is not None and use.since_s > offered_at_s

    def _is_idle(self, node_id: NodeId, now: float, for_s: float) -> bool:
        use = self._uses.get(node_id)
        return use is not None and use.is_for_gossip and now - use.since_s >= for_s

    def _n_chosen_spare(self, staying: Collection[NodeId]) -> int:
        return sum(map(self._is_chosen, staying)) - int(CHOSEN * self._peers_max)

    def _wait(self, node_id: NodeId, now: float) -> None:
        if (use := self._uses.get(node_id)) is not None:
            use.since_s = now
