"""Frames to and from one worker over its Unix socket.

Written by hand on a non-blocking socket because the round trip is paid for every stage of every token.
`send` tries the write at once, in the caller's own step of the event loop; only what the kernel does not
take waits in a backlog for `flush`. It never awaits, so a cancelled caller leaves a whole frame or none,
and frames never interleave. Reading waits, then takes up to 256 KB.

The backlog is bounded by the callers: `room` waits while it is full.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

import trio

from swarmllm_proto.codec import decode_worker_message
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import FrameDecoder, Pieces
from swarmllm_proto.ipc import AnyWorkerMessage

RECEIVE_BYTES = 256 * 1024
"""A few activations at a time; larger tensors arrive in pieces of the socket buffer's size anyway."""
BACKLOG_BYTES_MAX = 64 * 2**20
"""As much as may wait for a worker that computes; beyond it callers wait, and their tensors with them."""
PIECES_PER_WRITE = 64
"""Below IOV_MAX (1024); more would not fit the socket buffer."""


class ChannelClosed(Exception):
    """The connection is over; the text, the worker its subject, says why. Empty: it was closed."""


class Channel:
    def __init__(
        self, connection: socket.socket, on_message: Callable[[AnyWorkerMessage, memoryview], None]
    ) -> None:
        """`on_message` is called from `receive`; a ProtocolError from it ends the connection like a broken
        frame."""
        self._connection = connection
        self._on_message = on_message
        self._backlog: deque[bytes | memoryview] = deque()
        self._backlog_bytes = 0
        self._writer = trio.lowlevel.ParkingLot()
        self._waiting_for_room = trio.lowlevel.ParkingLot()
        self._drained = trio.lowlevel.ParkingLot()
        self._broken = False
        self.bytes_sent = 0
        self.bytes_received = 0

    def __repr__(self) -> str:
        return (
            f"<Channel sent={self.bytes_sent} received={self.bytes_received} backlog={self._backlog_bytes}>"
        )

    async def room(self) -> None:
        """Wait until the backlog has room for another message."""
        while self._backlog_bytes >= BACKLOG_BYTES_MAX:
            await self._waiting_for_room.park()

    def send(self, pieces: Pieces) -> None:
        """Write a frame, or queue what does not fit. The pieces must not change until then. Never fails: a
        broken connection shows in `receive`."""
        if self._broken:
            return
        idle = not self._backlog
        self._backlog.extend(pieces)
        self._backlog_bytes += sum(map(len, pieces))
        if idle:
            self._write()
            self._writer.unpark_all()

    async def hand_over(self, pieces: Pieces, descriptor: int) -> None:
        """Write a small frame, and with its first byte an open file (SCM_RIGHTS); waits until what was
        queued before has been written. Like `send`, it does not fail."""
        while not self._broken:
            if self._backlog:
                await self._drained.park()
                continue
            try:
                n_sent = socket.send_fds(self._connection, pieces, [descriptor])
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._connection.fileno())
                continue
            except OSError:
                self.abandon()
                return
            self.bytes_sent += n_sent
            if rest := memoryview(b"".join(pieces))[n_sent:]:
                self.send([rest])
            return

    async def flush(self) -> None:
        """Write the backlog whenever there is one. Raises ChannelClosed."""
        while not self._broken:
            if self._backlog:
                await trio.lowlevel.wait_writable(self._connection.fileno())
                self._write()
            else:
                await self._writer.park()
        raise ChannelClosed

    async def receive(self) -> None:
        """Hand every message to `on_message`. Raises ChannelClosed when the connection ends, however it
        ends."""
        buffer = bytearray(RECEIVE_BYTES)
        view = memoryview(buffer)
        decoder = FrameDecoder()
        try:
            while True:
                await trio.lowlevel.wait_readable(self._connection.fileno())
                try:
                    n = self._connection.recv_into(buffer)
                except BlockingIOError:
                    continue
                self.bytes_received += n
                if n == 0:
                    decoder.eof()
                    raise ChannelClosed
                for frame in decoder.feed(view[:n]):
                    self._on_message(decode_worker_message(frame), frame.payload)
        except ProtocolError as error:
            raise ChannelClosed(f"sent a broken message ({error})") from error
        except OSError as error:
            # A worker that dies with unread messages resets the connection: no more of a reason than its end.
            raise ChannelClosed from error

    def abandon(self) -> None:
        """Write nothing more, and let nobody wait for room."""
        self._broken = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._waiting_for_room.unpark_all()
        self._drained.unpark_all()

    def _write(self) -> None:
        try:
            while self._backlog:
                pieces = [self._backlog[i] for i in range(min(PIECES_PER_WRITE, len(self._backlog)))]
                self._drop(self._connection.sendmsg(pieces))
        except BlockingIOError:
            pass
        except OSError:
            self.abandon()

    def _drop(self, n_bytes: int) -> None:
        self.bytes_sent += n_bytes
        self._backlog_bytes -= n_bytes
        while n_bytes:
            piece = self._backlog[0]
            if len(piece) > n_bytes:
                self._backlog[0] = memoryview(piece)[n_bytes:]
                break
            n_bytes -= len(piece)
            self._backlog.popleft()
        self._waiting_for_room.unpark_all()
        if not self._backlog:
            self._drained.unpark_all()
