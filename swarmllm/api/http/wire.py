"""The socket of one HTTP connection, or TLS on it: every read and write has a deadline."""

from __future__ import annotations

import socket
import struct

import trio

from swarmllm.api.http.limits import CHUNK_BYTES, HttpLimits
from swarmllm.operating_system import write_at_once

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ClientGone(Exception):
    """The client has gone, or does not read."""


class HttpWire:
    def __init__(self, stream: trio.SocketStream, limits: HttpLimits) -> None:
        self.stream: trio.SocketStream | trio.SSLStream = stream
        """TLS takes the place of the socket after its handshake."""
        self.peer: tuple[str, int] = stream.socket.getpeername()[:2]
        self.own: tuple[str, int] = stream.socket.getsockname()[:2]
        self._socket = stream.socket
        self._limits = limits

    @property
    def scheme(self) -> str:
        return "http" if isinstance(self.stream, trio.SocketStream) else "https"

    async def write(self, data: bytes) -> None:
        """Raises ClientGone also where the client takes nothing for too long."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            # Most chunks of a stream fit into the socket's buffer. A deadline and a turn of the event loop
            # for each of them would cost more than everything else that is done for it.
            n_sent = 0
            if isinstance(self.stream, trio.SocketStream):
                n_sent = write_at_once(self._socket.fileno(), data)
            view = memoryview(data)[n_sent:]
            for start in range(0, len(view), CHUNK_BYTES):
                with trio.fail_after(self._limits.write_s):
                    await self.stream.send_all(view[start : start + CHUNK_BYTES])
        except trio.TooSlowError:
            self.reset()
            raise ClientGone from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            raise ClientGone from None

    async def read(self, n_bytes: int) -> bytes:
        """b"" at the end. Raises ClientGone."""
        try:
            return bytes(await self.stream.receive_some(n_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            raise ClientGone from None

    def reset(self) -> None:
        """Forget what waits in the kernel for a client that does not read."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)

    async def linger(self) -> None:
        """Say that this is all, and read for a moment what the client is still sending."""
        with trio.move_on_after(self._limits.linger_s):
            try:
                if isinstance(self.stream, trio.SocketStream):
                    await self.stream.send_eof()
                n_left = self._limits.linger_bytes
                while n_left > 0 and (data := await self.read(CHUNK_BYTES)):
                    n_left -= len(data)
            except (ClientGone, trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                return
