"""A yamux that holds its peers to the windows it granted them.

The library's grants every stream a window and notices when a peer sends more, but takes it all the same; it
reads a frame of 16 MiB for a stream that does not exist; and it opens as many streams as a peer asks for, of
which all peers together may have 10,000. So any stranger could fill this node's memory, or use up the streams
of everybody else. Here

- a frame larger than FRAME_MAX_BYTES, a byte beyond the window, a stream beyond STREAMS_PER_CONNECTION or
  more than UNREAD_PER_CONNECTION unread in all its streams ends the connection;
- where all connections together hold more unread bytes or streams than is good, the one with the most of them
  ends. That is never one of many that use little.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import libp2p.stream_muxer.muxer_multistream as muxer_multistream
import trio
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, Yamux

from swarmllm.log_filter import provoked_by
from swarmllm.swarm.libp2p.fast_paths import take_deciphered

log = logging.getLogger(__name__)

FRAME_MAX_BYTES = DEFAULT_WINDOW_SIZE
"""All that a new stream's window has room for; implementations send at most a quarter of it in one frame."""
STREAMS_PER_CONNECTION = 512
"""Opened by the peer. Another node of ours has at most 256 open, and closes them a moment before this one."""
STREAMS_MAX = 8_000
STREAMS_OF_EACH = 8
"""Of all connections, where there may be so many that STREAMS_MAX would be less than these: twice what quiet
connections have."""
UNREAD_MAX_BYTES = 256 * 1024 * 1024
UNREAD_PER_CONNECTION = 32 * 1024 * 1024
"""Three times what the streams of another node of ours hold at most, while this one reads none of them."""
_COUNT_PER_CONNECTION_BYTES = UNREAD_PER_CONNECTION // 8
_COUNT_AGAIN_BYTES = UNREAD_MAX_BYTES // 8


class Overrun(trio.TooSlowError):
    """The peer sent more than it was granted. The library's read loop ends a connection for no other class
    of errors, whatever it was doing."""


class Allowance:
    """What all connections of this process may hold together. Counted from what they hold, because the
    library drops streams in a dozen places; and not at every frame, because counting takes a while."""

    def __init__(self) -> None:
        self._connections: weakref.WeakSet[BoundedYamux] = weakref.WeakSet()
        self._arrived_bytes = 0
        self._n_may_come = 0
        """Streams, before there can be too many."""
        self.streams_max = STREAMS_MAX

    def include(self, connection: BoundedYamux) -> None:
        self._connections.add(connection)

    def stream_came(self) -> None:
        self._n_may_come -= 1
        if self._n_may_come >= 0:
            return
        n_streams = {each: len(each.streams) for each in self._connections}
        self._n_may_come = max(0, self.streams_max - sum(n_streams.values()))
        if sum(n_streams.values()) > self.streams_max:
            max(n_streams, key=n_streams.__getitem__).end("more streams than any other")

    def bytes_came(self, n_bytes: int) -> None:
        self._arrived_bytes += n_bytes
        if self._arrived_bytes < _COUNT_AGAIN_BYTES:
            return
        self._arrived_bytes = 0
        n_unread = {each: each.n_unread_bytes for each in self._connections}
        if sum(n_unread.values()) > UNREAD_MAX_BYTES:
            max(n_unread, key=n_unread.__getitem__).end("more unread than any other")


_allowance = Allowance()


class BoundedYamux(Yamux):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.streams: dict[int, Any] = _Streams(self)
        self.stream_buffers: dict[int, bytearray] = _Buffers(self)
        self._arrived_bytes = 0
        _allowance.include(self)

    @property
    def n_unread_bytes(self) -> int:
        return sum(len(buffer) for buffer in self.stream_buffers.values())

    def bytes_came(self, n_bytes: int) -> None:
        """Counted now and then, as the library lets go of streams in a dozen places. Raises Overrun."""
        self._arrived_bytes += n_bytes
        if self._arrived_bytes < _COUNT_PER_CONNECTION_BYTES:
            return
        self._arrived_bytes = 0
        if self.n_unread_bytes > UNREAD_PER_CONNECTION:
            raise Overrun("more unread than a connection may have")

    def end(self, why: str) -> None:
        provoked_by(log, str(self.peer_id)).warning("the connection with %s is ended: %s", self.peer_id, why)
        if self._nursery is not None:
            # As after the last byte: a task that waits for a stream finds out, and closes what is below.
            self._nursery.cancel_scope.cancel()

    async def _read_data_body(self, length: int) -> bytes:
        if length > FRAME_MAX_BYTES:
            raise Overrun(f"a frame of {length} bytes")
        # What came with the header needs no deadline.
        come = take_deciphered(self.secured_conn, length)
        body: bytes = await super()._read_data_body(length) if come is None else come
        return body


class _Streams(dict[int, Any]):
    """The streams of a connection, by number."""

    def __init__(self, connection: BoundedYamux) -> None:
        super().__init__()
        self._connection = weakref.ref(connection)

    def __setitem__(self, number: int, stream: Any) -> None:
        super().__setitem__(number, stream)
        connection = self._connection()
        if connection is None or stream.is_initiator:
            return
        if sum(not each.is_initiator for each in self.values()) > STREAMS_PER_CONNECTION:
            raise Overrun("too many streams")
        _allowance.stream_came()


class _Buffers(dict[int, bytearray]):
    """The bytes of each stream that have arrived and were not read."""

    def __init__(self, connection: BoundedYamux) -> None:
        super().__init__()
        self._connection = weakref.ref(connection)

    def __setitem__(self, number: int, _empty: bytearray) -> None:
        connection = self._connection()
        stream = connection.streams.get(number) if connection is not None else None
        super().__setitem__(number, _Buffer(stream, self._connection))


class _Buffer(bytearray):
    def __init__(self, stream: Any, connection: weakref.ref[BoundedYamux]) -> None:
        super().__init__()
        self._stream = stream
        self._connection = connection

    def extend(self, data: Any) -> None:
        # Never less than what the peer was told that it may send.
        if self._stream is not None and len(self) + len(data) > self._stream.target_recv_window:
            raise Overrun("more than the window")
        super().extend(data)
        if (connection := self._connection()) is not None:
            connection.bytes_came(len(data))
        _allowance.bytes_came(len(data))


def hold_peers_to_their_windows(connections_max: int) -> None:
    """The library makes its own class whatever class it is given. `connections_max`: of one host."""
    _allowance.streams_max = max(_allowance.streams_max, STREAMS_OF_EACH * connections_max)
    muxer_multistream.Yamux = BoundedYamux
