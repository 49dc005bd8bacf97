"""Makes data connections before they are needed, with a few peers.

A peer that messages go to needs a data connection, and one that is there for gossip does not: each costs a
handshake, and beats. So a few have one early, because then the first request need not wait for it, and
because it tells sooner than libp2p that a peer has died. In a small swarm these few are all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import islice
from typing import Final, Protocol

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.log_filter import provoked_by
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

EARLY_DATA_PEERS: Final = 4
"""So many, about."""
SLOW_EXCHANGE_S: Final = 1.0
UNHURRIED_SHARE: Final = 20.0
UNHURRIED_MAX_S: Final = 30.0
"""Where records take longer than SLOW_EXCHANGE_S many nodes meet on few processors, or over a bad line: the
data connection waits for so many times as long."""
_LARGER_ID_WAITS_S = 3.0


def is_slow(exchange_took_s: float) -> bool:
    """Whether what is not needed yet should wait."""
    return exchange_took_s > SLOW_EXCHANGE_S


class Plane(Protocol):
    """The part of the data plane that this module uses."""

    def has_connection(self, node_id: NodeId) -> bool: ...

    async def reach(self, node_id: NodeId) -> object:
        """Have a connection. Raises NodeUnreachable."""
        ...


class EarlyConnections:
    """Before `begin` there is no data plane, and no peer has a connection."""

    def __init__(self, node_id: NodeId, connected: Collection[NodeId]) -> None:
        """`connected`: the peers that are, whenever it is looked at."""
        self._node_id = node_id
        self._connected = connected
        self._plane: Plane | None = None

    def __repr__(self) -> str:
        return f"<EarlyConnections with {'enough' if self.are_enough() else 'too few'} peers>"

    def begin(self, plane: Plane) -> None:
        self._plane = plane

    def has(self, node_id: NodeId) -> bool:
        return self._plane is not None and self._plane.has_connection(node_id)

    def are_enough(self) -> bool:
        return sum(1 for _ in islice(filter(self.has, self._connected), EARLY_DATA_PEERS)) == EARLY_DATA_PEERS

    async def reach(self, node_id: NodeId) -> None:
        """Have one with this peer, if it is connected and answers."""
        if self._plane is not None and node_id in self._connected and not self.has(node_id):
            try:
                await self._plane.reach(node_id)
            except NodeUnreachable as error:
                provoked_by(log, node_id).info("no data connection to %s yet: %s", node_id, error)

    async def reach_early(self, node_id: NodeId, exchange_took_s: float = 0.0) -> None:
        """Have one with this peer where there are too few. One end dials, the other only if it must.
        `exchange_took_s`: for records to be exchanged with it."""
        if is_slow(exchange_took_s):
            await trio.sleep(min(UNHURRIED_MAX_S, UNHURRIED_SHARE * exchange_took_s))
        if self._node_id > node_id:
            await trio.sleep(_LARGER_ID_WAITS_S)
        if not self.are_enough():
            await self.reach(node_id)
