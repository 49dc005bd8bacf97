"""Patches that make py-libp2p 0.8.1 do in one step what it does in many.

What a swarm of n nodes does to find itself is n(n-1)/2 times what a pair does, and a pair spends it on the
way of some dozens of small frames through the library: seven locks for a frame that nobody contends for, each
of which gives all other tasks a turn, a message and a system call for each twelve bytes that open a stream,
two calls to receive what came in one. As in guards.py each shortcut is a patch that names its weakness,
and behaviour is the library's own.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from struct import Struct
from typing import Any, Final

import libp2p.io.trio as trio_io
import libp2p.network.stream.net_stream as net_stream
import libp2p.network.swarm as swarm
import libp2p.peer.id as peer_id
import libp2p.stream_muxer.yamux.yamux as yamux
import trio
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.io.utils import read_exactly as _original_read_exactly
from libp2p.network.stream.net_stream import StreamState
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH, NoiseTransportReadWriter
from libp2p.security.secure_session import SecureSession

log = logging.getLogger(__name__)

READ_AHEAD_BYTES = 16 * 1024
"""At once from a socket. What has been read is worked off before other tasks get their turn, so not too
much."""

IDS_KEPT: Final = 4096
"""Ids of peers that need not be decoded again: about 1 MiB."""

_HEADER = Struct(">BBHII")
_OPENING = frozenset({(yamux.TYPE_WINDOW_UPDATE, flag) for flag in (yamux.FLAG_SYN, yamux.FLAG_ACK)})
_UNHEARD = frozenset({"opened_stream", "closed_stream"})
_HELD = "_opening_held_back"
_READ_AHEAD = "_read_ahead"
"""Of a TCP stream that only yamux reads: what has come and was not deciphered."""
_SOCKET = "_tcp_stream"
"""Of a session that only yamux reads and writes: its TCP stream."""
_DECIPHERED = "_deciphered"
"""Of such a session: what yamux has not read."""
_READABLE = frozenset({StreamState.OPEN, StreamState.CLOSE_WRITE})


class PromptLock:
    """A lock that a task acquires at once where nobody holds it. Trio's lock gives all other tasks a turn
    first, and watches for holders that end without releasing it: whoever uses this one does so in an `async
    with`."""

    __slots__ = ("_is_held", "_waiting")

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: trio.lowlevel.ParkingLot | None = None

    def locked(self) -> bool:
        return self._is_held

    async def __aenter__(self) -> None:
        if self._is_held:
            if self._waiting is None:
                self._waiting = trio.lowlevel.ParkingLot()
            await self._waiting.park()
        self._is_held = True

    async def __aexit__(self, *_: object) -> None:
        if self._waiting:
            # It is held all the time, or a third task would take it from the one that wakes up.
            self._waiting.unpark()
        else:
            self._is_held = False


class _WriteOnly:
    """Replaces yamux's readers-writer lock, of which yamux uses only the write lock."""

    def __init__(self) -> None:
        self._lock = PromptLock()

    def write_lock(self) -> PromptLock:
        return self._lock


def take_shortcuts() -> None:
    """For all libp2p hosts of this process. Idempotent."""
    yamux.Yamux.__init__ = _yamux_with_prompt_locks
    yamux.Yamux._write_frame = _write_frame
    yamux.YamuxStream.__init__ = _yamux_stream_with_prompt_locks
    trio_io.TrioTCPStream.__init__ = _tcp_stream_with_prompt_locks
    trio_io.TrioTCPStream.read = _read_ahead
    swarm.Swarm._notify = _notify
    net_stream.NetStream.__init__ = _net_stream_with_a_prompt_lock
    net_stream.NetStream.read = _read_in_turn
    peer_id.ID.from_base58 = _id_from_base58
    yamux._py_yamux_env = _yamux_settings


_original_yamux_init = yamux.Yamux.__init__
_original_yamux_stream_init = yamux.YamuxStream.__init__
_original_tcp_stream_init = trio_io.TrioTCPStream.__init__
_original_tcp_read = trio_io.TrioTCPStream.read
_original_net_stream_init = net_stream.NetStream.__init__
_original_net_stream_read = net_stream.NetStream.read
_original_from_base58 = peer_id.ID.from_base58
_yamux_settings = lru_cache(maxsize=64)(yamux._py_yamux_env)
"""The library asks the environment for them with each frame."""


@lru_cache(maxsize=IDS_KEPT)
def _decoded(text: str) -> Any:
    return _original_from_base58(text)


def _id_from_base58(text: str) -> Any:
    """Decoding takes a tenth of a millisecond, and one request does it five times. Raises ValueError."""
    return _decoded(text)


def _net_stream_with_a_prompt_lock(self: Any, *arguments: Any, **options: Any) -> None:
    _original_net_stream_init(self, *arguments, **options)
    self._state_lock = PromptLock()


async def _read_in_turn(self: Any, n: int | None = None) -> bytes:
    """Who reads what has come already gives others their turn; who waits does so anyway."""
    muxed = self.muxed_stream
    if isinstance(muxed, yamux.YamuxStream) and (buffer := unread_bytes(self)):
        await trio.lowlevel.checkpoint()
        if n and buffer and self._state in _READABLE and not (muxed.recv_closed or muxed.closed):
            received = bytes(buffer[:n])
            del buffer[:n]
            await muxed._auto_tune_and_send_window_update(bytes_read=len(received))
            return received
    return bytes(await _original_net_stream_read(self, n))


def unread_bytes(stream: Any) -> bytearray | None:
    """What of a stream has come and was not read."""
    muxed = stream.muxed_stream
    buffer: bytearray | None = muxed.conn.stream_buffers.get(muxed.stream_id)
    return buffer


def _yamux_with_prompt_locks(self: Any, *arguments: Any, **options: Any) -> None:
    _original_yamux_init(self, *arguments, **options)
    self.streams_lock = PromptLock()
    self._write_lock = PromptLock()
    session = self.secured_conn
    try:
        tcp_stream = session.conn.read_writer.read_write_closer.stream
    except AttributeError:
        return
    # Only from here on is nobody else going to read from that socket.
    if isinstance(tcp_stream, trio_io.TrioTCPStream):
        tcp_stream.__dict__[_READ_AHEAD] = bytearray()
        if isinstance(session, SecureSession) and isinstance(session.conn, NoiseTransportReadWriter):
            session.__dict__[_SOCKET] = tcp_stream


def _yamux_stream_with_prompt_locks(self: Any, *arguments: Any, **options: Any) -> None:
    _original_yamux_stream_init(self, *arguments, **options)
    self.window_lock = PromptLock()
    self.close_lock = PromptLock()
    self.rw_lock = _WriteOnly()


def _tcp_stream_with_prompt_locks(self: Any, *arguments: Any, **options: Any) -> None:
    _original_tcp_stream_init(self, *arguments, **options)
    self.read_lock = PromptLock()
    self.write_lock = PromptLock()


async def _notify(self: Any, event: str, *arguments: Any) -> None:
    """The library makes a nursery and four tasks for each stream that is opened or closed, of which all four
    want to know nothing: a seventh of what a new connection costs. Of connections they are told one after the
    other."""
    if event in _UNHEARD:
        await trio.lowlevel.checkpoint()
        return
    for notifee in list(self.notifees):
        try:
            await getattr(notifee, event)(self, *arguments)
        except Exception as error:
            log.warning("a watcher of connections failed: %s", type(error).__name__)


async def _write_frame(self: Any, frame: bytes) -> None:
    """The frames that open a stream, or accept it, say nothing that the next frame of the stream does not
    say: they are kept until that comes, and travel with it. A cancelled caller is stopped before anything is
    encrypted: after that it must be sent, or what follows cannot be deciphered."""
    _, kind, flags, stream_id, length = _HEADER.unpack_from(frame)
    stream = self.streams.get(stream_id)
    if stream is not None:
        if not length and (kind, flags) in _OPENING:
            setattr(stream, _HELD, frame)
            return
        frame = stream.__dict__.pop(_HELD, b"") + frame
    await trio.lowlevel.checkpoint_if_cancelled()
    session = self.secured_conn
    tcp_stream = session.__dict__.get(_SOCKET)
    async with self._write_lock:
        if tcp_stream is None or len(frame) > MAX_PLAINTEXT_LENGTH:
            await session.write(frame)
        else:
            message = session.conn.encrypt(frame)
            await tcp_stream.write(len(message).to_bytes(2, "big") + message)


async def _read_ahead(self: Any, n: int | None = None) -> bytes:
    """The library reads lengths of two bytes and then what they announce, each from the kernel."""
    unread: bytearray | None = self.__dict__.get(_READ_AHEAD)
    if unread is None or n == 0:
        return bytes(await _original_tcp_read(self, n))
    if not unread:
        unread += await _original_tcp_read(self, READ_AHEAD_BYTES)
    return _taken(unread, len(unread) if n is None else n)


def _taken(unread: bytearray, n: int) -> bytes:
    received = bytes(unread[:n])
    del unread[:n]
    return received


async def read_exactly(session: Any, n_bytes: int) -> bytes:
    """What yamux reads. The library takes five calls and three locks to each length of two bytes, and as many
    to what it announces. Raises IncompleteReadError where the connection ends, and what libp2p raises for one
    that is broken."""
    tcp_stream = session.__dict__.get(_SOCKET)
    # A session that still has to read the answer to a proposal has a `read` of its own until then.
    if tcp_stream is None or "read" in session.__dict__:
        return bytes(await _original_read_exactly(session, n_bytes))
    deciphered = session.__dict__.get(_DECIPHERED)
    if deciphered is None:
        deciphered = session.__dict__[_DECIPHERED] = bytearray(session._drain(None))
    while len(deciphered) < n_bytes:
        deciphered += await _next_message(session.conn, tcp_stream, len(deciphered), n_bytes)
    return _taken(deciphered, n_bytes)


def take_deciphered(session: Any, n_bytes: int) -> bytes | None:
    """So much of what yamux has not read; None where so much is not there."""
    deciphered = session.__dict__.get(_DECIPHERED)
    return None if deciphered is None or len(deciphered) < n_bytes else _taken(deciphered, n_bytes)


async def _next_message(transport: Any, tcp_stream: Any, n_had: int, n_wanted: int) -> bytes:
    """Of Noise, deciphered."""
    ahead: bytearray = tcp_stream.__dict__[_READ_AHEAD]
    while len(ahead) < 2 or len(ahead) < 2 + int.from_bytes(ahead[:2], "big"):
        received = await _original_tcp_read(tcp_stream, READ_AHEAD_BYTES)
        if not received:
            raise IncompleteReadError(
                "the connection ended", expected_bytes=n_wanted, received_bytes=n_had + len(ahead)
            )
        ahead += received
    message: bytes = transport.decrypt(_taken(ahead, 2 + int.from_bytes(ahead[:2], "big"))[2:])
    if not message:
        raise ConnectionClosedError("a message without content")
    return message
