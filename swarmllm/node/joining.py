"""Waits, right after the start or after others have connected, until their records have arrived.

A node that has just connected to others does not know their capacity yet: records travel after the
connection. A plan made then would leave these nodes out, or refuse what is possible a second later.
"""

from __future__ import annotations

import trio

from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router

JOINING_S = 15.0
"""So long after the start other nodes may still connect, and after a connection a record come."""
LOOK_S = 0.1


class Joining:
    def __init__(self, router: Router, registry: Registry, *, meets_others: bool) -> None:
        """`meets_others`: the configuration names nodes to connect with. Made when the node starts."""
        self._router = router
        self._registry = registry
        self._until_s = trio.current_time() + (JOINING_S if meets_others else 0.0)

    @property
    def is_under_way(self) -> bool:
        """Whether nodes may still connect that this one is to meet."""
        return trio.current_time() < self._until_s

    async def hear_peers(self) -> None:
        """Until each connected node has said something of itself, for `JOINING_S` at most."""
        while self._is_awaited():  # noqa: ASYNC110 (two things change, and not all of it is told)
            await trio.sleep(LOOK_S)

    def _is_awaited(self) -> bool:
        heard = self._registry.nodes()
        peers = self._router.peers()
        if not peers:
            return self.is_under_way
        now_s = trio.current_time()
        return any(peer.node_id not in heard and now_s < peer.connected_since + JOINING_S for peer in peers)
