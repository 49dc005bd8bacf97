"""Upgrades connections: from a libp2p stream to a direct connection, and from a connection to a link.

A node that was behind a closed port may be reachable now: its port was opened, it moved, a hole was punched.
Every UPGRADE_EVERY_S a direct connection is tried for each neighbour that is reached through a stream, and
where none comes about, a hole (see holes). When there is one, senders wait for the moment it takes the peer
to say that everything before has been handled (a ping travels behind the messages, and its pong comes after
they were), then they turn to the new connection, and the old one is told that it has carried its last
message. It ends when neither end sends on it any more.

Two nodes that dial each other at the same moment have two direct connections; they turn to the one that the
smaller node id sends on in the same way.

The dialler's hello says what it wants the link for. The node that is dialled hands its end to the task that
will read from it and only then says so; until it has, the dialler sends nothing, so no byte can be on its way
to the wrong reader.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.data.neighbour import Neighbour
from swarmllm.swarm.data.wire import VERSION, FrameKind, Hello, NoiseWire, WireClosed
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.router import LinkEnd, LinkHandler
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import FrameDecoder, encode_frame
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import SWARM_HEADER_MAX

ACCEPT_S = 15.0
"""How long the other side may take: its worker may be in the middle of a long step."""


async def ask_for_link(node_id: NodeId, wire: NoiseWire, purpose: str) -> LinkEnd:
    """The dialler's part; the wire is closed either way. Raises NodeUnreachable."""
    try:
        with trio.fail_after(ACCEPT_S):
            hello = msgspec.msgpack.encode(Hello(v=VERSION, link=purpose))
            await wire.write(encode_frame(bytes((FrameKind.HELLO,)) + hello))
            await _accepted(wire)
        return wire.sending_end()
    except (WireClosed, ProtocolError, OSError, trio.TooSlowError) as error:
        raise NodeUnreachable(f"node {node_id} takes no link ({error or 'no answer'})") from None
    finally:
        wire.abort()


async def give_link(node_id: NodeId, wire: NoiseWire, purpose: str, on_link: LinkHandler) -> None:
    """The part of the node that was dialled; the wire is closed either way."""
    try:
        end = wire.receiving_end()
        try:
            if await on_link(node_id, purpose, end):
                with trio.fail_after(ACCEPT_S):
                    await wire.write(encode_frame(bytes((FrameKind.LINK,))))
        finally:
            end.close()
    except (WireClosed, OSError, trio.TooSlowError):
        return  # The dialler learns of it by the end of the connection.
    finally:
        wire.abort()


async def _accepted(wire: NoiseWire) -> None:
    decoder = FrameDecoder(SWARM_HEADER_MAX, 0)
    while True:
        for frame in decoder.feed(await wire.receive()):
            # Until the hello arrived there, this was a connection like any other: with a hello and a ping.
            if frame.header[:1] == bytes((FrameKind.LINK,)):
                return


log = logging.getLogger(__name__)

UPGRADE_EVERY_S = 30.0
_SETTLE_S = 5.0


class UpgradeConnector(Protocol):
    """The part of the data plane that upgrades use."""

    def connections(self, node_id: NodeId) -> list[Connection]:
        """Those that can carry messages."""
        ...

    async def dial(self, node_id: NodeId) -> Connection | None:
        """A direct connection; None where there is no such way."""
        ...

    def try_hole(self, node_id: NodeId) -> None:
        """Have both ends dial at the same moment; a direct connection may come of it later."""
        ...

    async def reopen(self, node_id: NodeId, old: Connection) -> Connection | None:
        """A stream that goes a better way than `old`; None where there is none."""
        ...


class Upgrades:
    def __init__(self, neighbours: Parts[Neighbour], ways: UpgradeConnector, own_id: str) -> None:
        self._own_id = own_id
        self._neighbours = neighbours
        self._ways = ways

    async def run(self) -> None:
        while True:
            await trio.sleep(UPGRADE_EVERY_S)
            for node_id in list(self._neighbours):
                if not await self.upgrade(node_id):
                    self._ways.try_hole(node_id)
                await self.merge(node_id)
                self.tidy(node_id)

    async def upgrade(self, node_id: NodeId) -> bool:
        """Whether messages to this peer go over a direct connection now that did not before."""
        neighbour = self._neighbours.get(node_id)
        if neighbour is None or neighbour.sends_directly:
            return False
        # Where a stream is being opened at this moment, that is what messages take afterwards.
        async with neighbour.establishing:
            old = neighbour.sending
            if old is None or not old.alive or old.wire_kind == "direct":
                return False
            new = await self._direct(node_id) or await self._ready(await self._ways.reopen(node_id, old))
            if new is None or neighbour.sending is not old:
                return False
            has_turned = await self._turn(neighbour, old, new)
            if has_turned:
                provoked_by(log, node_id).info("node %s is reached directly now", node_id)
            return has_turned

    async def merge(self, node_id: NodeId) -> None:
        """Leave all direct connections but one to their end. Which one the smaller node id says, by leaving
        the others: there may be several that look alike, and two nodes must not choose two."""
        neighbour = self._neighbours.get(node_id)
        direct = [c for c in self._ways.connections(node_id) if c.wire_kind == "direct"]
        if neighbour is None or len(direct) < 2:
            return
        async with neighbour.establishing:
            old = neighbour.sending if neighbour.sending and neighbour.sending.alive else None
            if old is not None and old not in direct:
                return
            left = [c for c in direct if not c.peer_has_left and not c.has_left]
            if self._own_id < node_id:
                kept = old or (left[0] if left else None)
            else:
                kept = left[0] if len(left) == 1 else None
            if kept is None:
                return
            if old is None:
                neighbour.sending = kept
            elif old is not kept and not await self._turn(neighbour, old, kept):
                return
            for connection in direct:
                if connection is not kept and not connection.has_left:
                    connection.leave()

    def tidy(self, node_id: NodeId) -> None:
        """End what neither side sends on any more."""
        neighbour = self._neighbours.get(node_id)
        for connection in list(neighbour.connections) if neighbour else ():
            if connection.is_over:
                connection.end("no longer needed")
            elif (
                connection.peer_has_left and not connection.has_left and not _sends_on(neighbour, connection)
            ):
                connection.leave()

    async def _direct(self, node_id: NodeId) -> Connection | None:
        for connection in self._ways.connections(node_id):
            if connection.wire_kind == "direct":
                return connection
        return await self._ready(await self._ways.dial(node_id))

    async def _ready(self, connection: Connection | None) -> Connection | None:
        return connection if connection is not None and await connection.says_hello() else None

    async def _turn(self, neighbour: Neighbour, old: Connection, new: Connection) -> bool:
        neighbour.turning = trio.Event()
        try:
            with trio.move_on_after(_SETTLE_S):
                await old.settle()
                if new.alive:
                    neighbour.sending = new
                    old.leave()
                    return True
        except NodeUnreachable as lost:
            log.debug("no turning to another connection: %s", lost)
            return False
        else:
            return False
        finally:
            neighbour.turning.set()
            neighbour.turning = None


def _sends_on(neighbour: Neighbour | None, connection: Connection) -> bool:
    return neighbour is not None and neighbour.sending is connection
