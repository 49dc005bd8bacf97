"""A stream through a relay as what libp2p builds a connection on.

libp2p cancels writes (by its deadlines, at the end of a task), and a write cancelled in the middle would
desynchronise the connection to the relay: so writes are shielded here, and end by the stream's end.
"""

from __future__ import annotations

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException
from multiaddr import Multiaddr

from swarmllm.swarm.data.stream_fallback import StreamWire
from swarmllm.swarm.data.wire import WireClosed
from swarmllm.swarm.discovery.relay.service import CIRCUIT_BYTES
from swarmllm.swarm.libp2p.host import Stream
from swarmllm_proto.identifiers import NodeId

_WRITE_S = 20.0
_END_S = 2.0


class RelayedConnection(ReadWriteCloser):  # type: ignore[misc]
    def __init__(self, stream: Stream, relay_id: NodeId, data_bytes: int = 0) -> None:
        """`data_bytes`: what the relay carries before it ends the circuit; 0: it did not say."""
        self._stream = stream
        self._data_bytes = data_bytes or CIRCUIT_BYTES
        self._n_bytes = 0
        self._wire = StreamWire(stream, self.ended_now)
        self._unread = b""
        self.relay_id = relay_id
        self.ended = trio.Event()

    def ended_now(self) -> None:
        self.ended.set()

    @property
    def room(self) -> float:
        """The share of what the relay carries that is left."""
        return max(0.0, 1.0 - self._n_bytes / self._data_bytes)

    async def read(self, n: int | None = None) -> bytes:
        try:
            if not self._unread:
                self._unread = await self._wire.receive()
                self._n_bytes += len(self._unread)
        except WireClosed as ending:
            self.ended.set()
            raise IOException(str(ending)) from None
        read = self._unread if n is None else self._unread[:n]
        self._unread = self._unread[len(read) :]
        return read

    async def write(self, data: bytes) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _WRITE_S) as stuck:
            try:
                await self._wire.write([data])
                self._n_bytes += len(data)
            except WireClosed as ending:
                self.ended.set()
                raise IOException(str(ending)) from None
        if stuck.cancelled_caught:
            await self.close()
            raise IOException("the relay takes nothing any more")

    async def close(self) -> None:
        self._wire.abort()
        self.ended.set()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
            try:
                await self._stream.reset()
            except Exception:
                return

    def get_remote_address(self) -> tuple[str, int] | None:
        """Where the other end is nobody knows; the relay's address would be taken for it."""
        return None

    def address(self) -> Multiaddr:
        return Multiaddr(f"/p2p/{self.relay_id}/p2p-circuit")
