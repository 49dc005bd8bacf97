"""Ends connections that nobody uses: those that this node made for work or in passing, which is its own
decision, and those that only carry gossip, where the other end has enough as well (see spare_connections).

The node that ends a connection says so first. So neither takes the other for dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.supervision import spawn
from swarmllm.swarm.data.neighbour import LinkStatus
from swarmllm.swarm.peers.connection_limits import LET_GO
from swarmllm.swarm.peers.liveness import Liveness
from swarmllm.swarm.peers.reachable import ReachableNodes
from swarmllm.swarm.peers.spare_connections import SpareConnections
from swarmllm.swarm.records.exchange import KIND_LET_GO, KIND_MAY_LET_GO, Ask
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

_FAREWELL_S: Final = 1.0


class UnusedConnections:
    def __init__(
        self,
        nursery: trio.Nursery,
        liveness: Liveness,
        reachable: ReachableNodes,
        spare: SpareConnections,
        ask: Ask,
        status: Callable[[NodeId], LinkStatus],
        relayed: Callable[[], set[NodeId]],
        gossiping: Callable[[], set[NodeId]],
        peers_max: int,
    ) -> None:
        """Connections are of use, though nobody asks for anything, with those that are `relayed`: relays, and
        those that use this node as one; and those that only carry gossip with the neighbours in its mesh
        (`gossiping`)."""
        self._nursery = nursery
        self._liveness = liveness
        self._reachable = reachable
        self._spare = spare
        self._ask = ask
        self._status = status
        self._relayed = relayed
        self._gossiping = gossiping
        self._peers_max = peers_max

    def __repr__(self) -> str:
        return f"<UnusedConnections of {len(self._liveness.connected)}>"

    def end(self, now: float) -> None:
        """Those that are unused by now, each in a task of its own."""
        for node_id in self.idle(now):
            spawn(self._nursery, "peer", self._let_go, node_id)
        for node_id in self._spare.offered(self._liveness.staying(), now, self._kept()):
            spawn(self._nursery, "peer", self._offer, node_id, now)

    def idle(self, now: float) -> list[NodeId]:
        """Those that this node made for work that is long over, or in passing, where there are more than are
        looked for."""
        statuses = {node_id: self._status(node_id) for node_id in self._liveness.connected}
        n_bytes = {node_id: each.n_bytes_sent + each.n_bytes_received for node_id, each in statuses.items()}
        return self._reachable.idle(n_bytes, len(n_bytes) - self._peers_max, now, self._relayed())

    def may_end(self, sender: NodeId, now: float) -> bytes:
        """The answer to one that offers to end its connection with this node. Raises RequestRefused."""
        staying = self._liveness.staying()
        if sender not in staying or not self._spare.agrees(sender, staying, now, self._kept()):
            raise RequestRefused("this node needs the connection")
        self._liveness.peer_lets_go(sender)
        return b""

    def _kept(self) -> set[NodeId]:
        return self._relayed() | self._gossiping()

    async def _let_go(self, node_id: NodeId) -> None:
        """An older peer does not know the question, and takes this node for lost until it hears of it
        again."""
        with trio.move_on_after(_FAREWELL_S):
            try:
                await self._ask(node_id, KIND_LET_GO, b"")
            except SwarmLLMError as error:
                provoked_by(log, node_id).debug("node %s was not told that it is let go: %s", node_id, error)
        self._liveness.drop(node_id, LET_GO)

    async def _offer(self, node_id: NodeId, offered_at_s: float) -> None:
        """An older peer does not know the question, and keeps the connection."""
        try:
            await self._ask(node_id, KIND_MAY_LET_GO, b"")
        except SwarmLLMError as error:
            provoked_by(log, node_id).debug("node %s keeps its connection: %s", node_id, error)
            return
        if not self._spare.was_used_since(node_id, offered_at_s):
            self._liveness.drop(node_id, LET_GO)
