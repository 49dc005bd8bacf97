"""Messages on a libp2p stream as libp2p's own protocols frame them: their length as a varint, then the bytes.

The length is checked before anything is read, and the varint itself may not go on for ever. Shared by the
protocols of libp2p that this house speaks by itself (the DHT, the relay, hole punching).
"""

from __future__ import annotations

from swarmllm.swarm.libp2p.host import Stream
from swarmllm_proto.errors import FrameTooLarge, FrameTruncated

_VARINT_MAX_BYTES = 4
_READ_BYTES = 64 * 1024


def framed(content: bytes) -> bytes:
    prefix = bytearray()
    left = len(content)
    while left >= 0x80:
        prefix.append(left & 0x7F | 0x80)
        left >>= 7
    prefix.append(left)
    return bytes(prefix) + content


async def read_framed(stream: Stream, size_max: int) -> bytes:
    """Raises FrameTooLarge, FrameTruncated, and what libp2p raises for a stream that was reset. Reads not one
    byte more than the message."""
    size_bytes = 0
    for position in range(_VARINT_MAX_BYTES):
        (byte,) = await _read_exactly(stream, 1)
        size_bytes |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            break
    else:
        raise FrameTooLarge("message_length", f"has more than {_VARINT_MAX_BYTES} bytes")
    if size_bytes > size_max:
        raise FrameTooLarge("message_length", f"{size_bytes} bytes are more than {size_max}")
    return await _read_exactly(stream, size_bytes)


async def _read_exactly(stream: Stream, n_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < n_bytes:
        piece = await stream.read(min(_READ_BYTES, n_bytes - len(received)))
        if not piece:
            raise FrameTruncated("message", f"the stream ended {n_bytes - len(received)} bytes early")
        received += piece
    return bytes(received)
