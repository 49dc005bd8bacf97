"""Frames: `[u32 header length][header][u32 payload length][payload]`, little-endian.

One framing for both wires: the Unix socket to a worker (JSON header) and the stream between two nodes
(MessagePack header). The payload length stands after the header, so a sender can write header and tensor as
separate pieces, and a tensor never passes through the header's encoding (bytes inside JSON grow by a third
and more, and have killed workers).

`FrameDecoder` is fed whatever the transport delivered and gives the same frames, then the same error, however
the bytes were cut. To keep that promise an error waits while frames found before it in the same call are
handed out: the next `feed` or `eof` raises it. Nothing is lost by waiting: the offending length has been
refused and allocates nothing.

The payload is received into uninitialised memory of its final size (numpy's, because `bytearray(n)` would
write n zeros first: a hostile length of 512 MiB would cost half a gigabyte of resident memory before its
first byte). Each byte is copied exactly once, also when a whole frame arrives in one piece: a view into the
caller's receive buffer would pin it, alias it when it is reused, and place the tensor at an odd address.
Code that decrypts need not even copy: `room` is where the plaintext can go at once.

What the frames of a data-plane connection are: their kinds, and the hello that comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from swarmllm_proto.errors import FrameTooLarge, FrameTruncated, ProtocolError
from swarmllm_proto.limits import IPC_HEADER_MAX, IPC_PAYLOAD_MAX

VERSION = 1


class FrameKind(IntEnum):
    HELLO = 0
    MESSAGE = 1
    PING = 2
    PONG = 3
    GOODBYE = 4
    LINK = 5
    LAST = 6
    ACK = 7
    LOAD = 8


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    v: int
    link: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """The dialler wants a link, and this is what for."""
    bulk: bool = False
    """The dialler wants it for bulk's questions and answers."""
    acks: bool = False
    """The sender acknowledges messages."""
    rests: bool = False
    """The sender pings, and expects pings, more rarely while there are no messages."""
    seen: Annotated[str, msgspec.Meta(max_length=80)] = ""
    """Where the sender sees the receiver's end, as `/ip4/192.0.2.1/tcp/40000`; empty: it does not know."""


Buffer: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Buffer | Sequence[Buffer]
"""One buffer, or the pieces of one payload in order (what `encode_tensor` returns)."""
Pieces: TypeAlias = list[bytes | memoryview]
"""Ready for `writev`/`sendmsg`, or for one send each."""

_LENGTH: Final = Struct("<I")
_EMPTY: Final = memoryview(b"")

_PARTS: Final = ("header_length", "header", "payload_length", "payload")
_HEADER_LENGTH, _HEADER, _PAYLOAD_LENGTH, _PAYLOAD = range(4)


class Frame(NamedTuple):
    header: bytes
    payload: memoryview
    """Format "B", one dimension; empty where the frame has no payload. Owned by the frame, 16-byte
    aligned unless it was part of `feed_owned`."""


def as_pieces(payload: Payload) -> Pieces:
    """The payload's non-empty pieces as flat byte buffers; copies nothing that is contiguous."""
    if isinstance(payload, bytes):
        return [payload] if payload else []
    buffers = [payload] if isinstance(payload, (bytes, bytearray, memoryview)) else payload
    return [_flat(b) for b in buffers if _n_bytes(b)]


def encode_frame(
    header: bytes,
    payload: Payload = b"",
    *,
    header_max: int = IPC_HEADER_MAX,
    payload_max: int = IPC_PAYLOAD_MAX,
) -> Pieces:
    """The frame as pieces to write in order. The payload is referenced, not copied: leave it alone until it
    is written.

    Raises FrameTooLarge, so that the sender learns of it and not the receiver, who could only hang up.
    """
    pieces = as_pieces(payload)
    payload_size = sum(map(len, pieces))
    if len(header) > header_max:
        raise FrameTooLarge("header", f"{len(header)} bytes, at most {header_max}")
    if payload_size > payload_max:
        raise FrameTooLarge("payload", f"{payload_size} bytes, at most {payload_max}")
    return [b"".join((_LENGTH.pack(len(header)), header, _LENGTH.pack(payload_size))), *pieces]


class FrameDecoder:
    """Bytes in, frames out. After an error the stream is lost: every further call raises the same error."""

    def __init__(self, header_max: int = IPC_HEADER_MAX, payload_max: int = IPC_PAYLOAD_MAX) -> None:
        self._header_max = header_max
        self._payload_max = payload_max
        self._part = _HEADER_LENGTH
        self._part_size = _LENGTH.size
        self._received = _EMPTY
        """Memory for the part in progress; only its first `_n_received` bytes mean anything."""
        self._n_received = 0
        self._header = b""
        self._failure: ProtocolError | None = None

    def __repr__(self) -> str:
        state = "failed" if self._failure else f"{_PARTS[self._part]} {self._n_received}/{self._part_size}"
        return f"<FrameDecoder {state}>"

    @property
    def inside_frame(self) -> bool:
        """Whether part of a frame has arrived and its end has not."""
        return self._part != _HEADER_LENGTH or self._n_received > 0

    @property
    def payload_size(self) -> int:
        """Bytes of the payload in progress; 0 where none is."""
        return self._part_size if self._part == _PAYLOAD else 0

    @property
    def payload_received(self) -> int:
        """How many of them have come."""
        return self._n_received if self._part == _PAYLOAD else 0

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes; it may be reused afterwards. Raises FrameTooLarge."""
        if self._failure is not None:
            raise self._failure
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        frames: list[Frame] = []
        offset = 0
        try:
            if not self.inside_frame:
                offset = self._take_whole(view, frames)
                if offset == len(view):
                    return frames
            while True:
                offset, part = self._take(view, offset)
                if part is None:
                    return frames
                if (frame := self._finish_part(part)) is not None:
                    frames.append(frame)
        except FrameTooLarge as error:
            self._failure = error
            if not frames:
                raise
            return frames

    def feed_owned(self, data: bytes) -> list[Frame]:
        """As `feed`, of bytes that nobody else has: where they are one whole frame, which they are of a link
        as a rule, its payload is a view of them, at whatever address it lies."""
        if self._failure is None and not self.inside_frame and len(data) >= 2 * _LENGTH.size:
            header_size = _LENGTH.unpack_from(data)[0]
            start = header_size + 2 * _LENGTH.size
            if header_size <= self._header_max and start <= len(data):
                size = _LENGTH.unpack_from(data, start - _LENGTH.size)[0]
                if size <= self._payload_max and start + size == len(data):
                    header = data[_LENGTH.size : start - _LENGTH.size]
                    return [Frame(header, memoryview(data)[start:] if size else _EMPTY)]
        return self.feed(data)

    def _take_whole(self, view: memoryview, frames: list[Frame]) -> int:
        """Move the frames that `view` begins with, and holds whole, to `frames`: where they end. What is left
        to do then is what `feed` does without this, with more lines of code: after a decode step each of
        them comes from memory, and a frame took 40 microseconds."""
        n_bytes, offset = len(view), 0
        while n_bytes - offset >= 2 * _LENGTH.size:
            header_at = offset + _LENGTH.size
            header_size = _LENGTH.unpack_from(view, offset)[0]
            start = header_at + header_size + _LENGTH.size
            if header_size > self._header_max or start > n_bytes:
                break
            size = _LENGTH.unpack_from(view, start - _LENGTH.size)[0]
            if size > self._payload_max or start + size > n_bytes:
                break
            payload = _EMPTY
            if size:
                payload = np.empty(size, np.uint8).data
                payload[:] = view[start : start + size]
            frames.append(Frame(bytes(view[header_at : header_at + header_size]), payload))
            offset = start + size
        return offset

    def eof(self) -> None:
        """The stream ended. Raises FrameTruncated where a frame was incomplete, or the error still to be
        told."""
        if self._failure is None and self.inside_frame:
            self._failure = FrameTruncated(
                _PARTS[self._part], f"the stream ended after {self._n_received} of {self._part_size} bytes"
            )
        if self._failure is not None:
            raise self._failure

    def room(self, n_bytes: int) -> memoryview | None:
        """Memory of the payload in progress that the stream's next bytes may be written to instead of being
        fed, where they all belong there; `filled` must follow."""
        if self._part != _PAYLOAD or self._failure or not 0 < n_bytes <= self._part_size - self._n_received:
            return None
        if self._n_received == 0:
            self._received = np.empty(self._part_size, np.uint8).data
        return self._received[self._n_received : self._n_received + n_bytes]

    def filled(self, n_bytes: int) -> list[Frame]:
        """What `room` gave has been written: the frame that this completes, if it does."""
        self._n_received += n_bytes
        frame = self._finish_part(self._received) if self._n_received == self._part_size else None
        return [] if frame is None else [frame]

    def _take(self, view: memoryview, offset: int) -> tuple[int, memoryview | None]:
        """Move bytes into the part in progress: the new offset, and the part where it is complete."""
        size = self._part_size
        n_available = len(view) - offset
        if self._n_received == 0:
            if self._part != _PAYLOAD and n_available >= size:
                return offset + size, view[offset : offset + size]
            if n_available == 0 and size > 0:
                return offset, None
            self._received = np.empty(size, np.uint8).data if size else _EMPTY
        n = min(size - self._n_received, n_available)
        if n:
            self._received[self._n_received : self._n_received + n] = view[offset : offset + n]
            self._n_received += n
        return offset + n, self._received if self._n_received == size else None

    def _finish_part(self, part: memoryview) -> Frame | None:
        finished = self._part
        self._n_received = 0
        self._received = _EMPTY
        if finished == _HEADER_LENGTH:
            self._part_size = _checked("header", part, self._header_max)
            self._part = _HEADER
        elif finished == _HEADER:
            self._header = bytes(part)
            self._part_size = _LENGTH.size
            self._part = _PAYLOAD_LENGTH
        elif finished == _PAYLOAD_LENGTH:
            self._part_size = _checked("payload", part, self._payload_max)
            self._part = _PAYLOAD
        else:
            frame = Frame(self._header, part)
            self._header = b""
            self._part_size = _LENGTH.size
            self._part = _HEADER_LENGTH
            return frame
        return None


def _checked(field: str, length: memoryview, maximum: int) -> int:
    size: int = _LENGTH.unpack(length)[0]
    if size > maximum:
        raise FrameTooLarge(field, f"{size} bytes announced, at most {maximum}")
    return size


def _n_bytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _flat(buffer: Buffer) -> bytes | memoryview:
    if isinstance(buffer, bytes):
        return buffer
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
