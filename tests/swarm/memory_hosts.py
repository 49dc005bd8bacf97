"""Hosts that reach each other through memory: protocols between several nodes, on a clock of the test's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio.testing

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm_proto.identifiers import NodeId

Handler = Callable[[NodeId, Any], Awaitable[None]]


class MemoryStream:
    """One end, as libp2p's streams look to a protocol. It counts what is written at a time."""

    def __init__(self, pipe: trio.StapledStream, first: bytes = b"") -> None:
        self._pipe = pipe
        self._first = first
        self.writes: list[int] = []
        self.ended = ""
        self.takes_writes = True
        """Else each takes for ever."""
        self.closes = True
        """Else closing takes for ever."""

    async def read(self, n: int) -> bytes:
        if self._first:
            piece, self._first = self._first[:n], self._first[n:]
            return piece
        return bytes(await self._pipe.receive_some(n))

    async def write(self, data: bytes) -> None:
        self.writes.append(len(data))
        if not self.takes_writes:
            await trio.sleep_forever()
        await self._pipe.send_all(data)

    async def close(self) -> None:
        if not self.closes:
            await trio.sleep_forever()
        self.ended = self.ended or "closed"
        await self._pipe.send_eof()

    async def reset(self) -> None:
        self.ended = "reset"
        await self._pipe.aclose()


class MemoryNetwork:
    """All hosts; `nursery` runs what answers."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.hosts: dict[NodeId, MemoryHost] = {}

    def host(self, node_id: NodeId) -> MemoryHost:
        made = self.hosts[node_id] = MemoryHost(self, node_id)
        return made


class MemoryHost:
    def __init__(self, network: MemoryNetwork, node_id: NodeId) -> None:
        self._network = network
        self.node_id = node_id
        self.handlers: dict[str, Handler] = {}
        self.peers: set[NodeId] = set()
        self.dialled: list[NodeId] = []
        self.closed: list[NodeId] = []
        self.opens_streams = True
        """Else each takes for ever."""
        self.opened: list[tuple[MemoryStream, bytes]] = []
        """Streams of this end, and what went with their proposals."""
        self.asked_of: list[NodeId] = []
        """With whom."""
        self.answered: list[MemoryStream] = []
        """The other ends, of all streams that were opened from here."""

    def serve(self, protocol: str, handler: Handler) -> None:
        self.handlers[protocol] = handler

    def connected(self) -> set[NodeId]:
        return self.peers

    def is_connected(self, node_id: NodeId) -> bool:
        return node_id in self.peers

    async def dial(self, node_id: NodeId, addresses: list[Address]) -> None:
        self.dialled.append(node_id)
        other = self._network.hosts.get(node_id)
        if other is None:
            raise NodeUnreachable("nothing answers")
        self.peers.add(node_id)
        other.peers.add(self.node_id)

    async def open_stream(self, node_id: NodeId, protocol: str, first: bytes) -> MemoryStream:
        handler = self._network.hosts[node_id].handlers.get(protocol)
        if node_id not in self.peers or handler is None:
            raise NodeUnreachable("no such protocol")
        if not self.opens_streams:
            await trio.sleep_forever()
        here, there = trio.testing.memory_stream_pair()
        stream = MemoryStream(here)
        self.opened.append((stream, first))
        self.asked_of.append(node_id)
        self.answered.append(MemoryStream(there, first))
        self._network.nursery.start_soon(self._answer, handler, self.answered[-1])
        return stream

    async def _answer(self, handler: Handler, stream: MemoryStream) -> None:
        try:
            await handler(self.node_id, stream)
        except Exception:
            await stream.reset()

    async def close_hard(self, node_id: NodeId) -> None:
        self.closed.append(node_id)
        self.peers.discard(node_id)
