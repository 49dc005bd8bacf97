"""From a libp2p stream to a direct connection, once there is a way, without a message lost or overtaken.

A node that was behind a closed port may be reachable now: its port was opened, it moved, a hole was punched.
Every UPGRADE_EVERY_S a direct connection is tried for each neighbour that is reached through a stream. When
there is one, senders wait for the moment it takes the peer to say that everything before has been handled (a
ping travels behind the messages, and its pong comes after they were), then they turn to the new connection,
and the old one is told that it has carried its last message. It ends when neither end sends on it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.connection import Connection
from swarmllm.swarm.neighbour import Neighbour

log = logging.getLogger(__name__)

UPGRADE_EVERY_S = 30.0
_SETTLE_S = 5.0
_HELLO_S = 5.0


class Upgrades:
    """`connections(node_id)` are those that can carry messages, `dial(node_id)` opens a direct one or gives
    None, `reopen(node_id, old)` a stream that goes a better way than `old`, or gives None."""

    def __init__(
        self,
        neighbours: dict[str, Neighbour],
        connections: Callable[[str], list[Connection]],
        dial: Callable[[str], Awaitable[Connection | None]],
        reopen: Callable[[str, Connection], Awaitable[Connection | None]],
    ) -> None:
        self._neighbours = neighbours
        self._connections = connections
        self._dial = dial
        self._reopen = reopen

    async def run(self) -> None:
        while True:
            await trio.sleep(UPGRADE_EVERY_S)
            for node_id in list(self._neighbours):
                await self.upgrade(node_id)
                self.tidy(node_id)

    async def upgrade(self, node_id: str) -> bool:
        """Whether messages to this peer go over a direct connection now that did not before."""
        neighbour = self._neighbours.get(node_id)
        old = neighbour.sending if neighbour else None
        if neighbour is None or old is None or not old.alive or old.wire_kind == "direct":
            return False
        async with neighbour.establishing:
            new = await self._direct(node_id) or await self._ready(await self._reopen(node_id, old))
            if new is None or neighbour.sending is not old:
                return False
            return await self._turn(neighbour, old, new)

    def tidy(self, node_id: str) -> None:
        """End what neither side sends on any more."""
        neighbour = self._neighbours.get(node_id)
        for connection in list(neighbour.connections) if neighbour else ():
            if connection.is_forsaken and neighbour and connection is not neighbour.sending:
                connection.end("no longer needed")

    async def _direct(self, node_id: str) -> Connection | None:
        for connection in self._connections(node_id):
            if connection.wire_kind == "direct":
                return connection
        return await self._ready(await self._dial(node_id))

    async def _ready(self, connection: Connection | None) -> Connection | None:
        if connection is not None:
            with trio.move_on_after(_HELLO_S):
                await connection.ready.wait()
                return connection
            connection.end("no hello came")
        return None

    async def _turn(self, neighbour: Neighbour, old: Connection, new: Connection) -> bool:
        neighbour.turning = trio.Event()
        try:
            with trio.move_on_after(_SETTLE_S):
                await old.settle()
                if new.alive:
                    neighbour.sending = new
                    old.forsake()
                    log.info("node %s is reached directly now", old.node_id)
                    return True
        except NodeUnreachable as lost:
            log.debug("no turning to a direct connection: %s", lost)
            return False
        else:
            return False
        finally:
            neighbour.turning.set()
            neighbour.turning = None
