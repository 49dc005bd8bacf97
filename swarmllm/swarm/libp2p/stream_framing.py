"""Length-prefixed messages of libp2p's own protocols, and the ids and addresses in them.

A message is its length as a varint, then the bytes. The length is checked before anything is read, and the
varint itself may not go on for ever. Shared by the protocols of libp2p that are spoken here without the
library (the DHT, the relay, hole punching).

Ids and addresses are read strictly: what cannot be the id of a node is none, and an address is an IP
literal and a TCP port or it is none, whatever else a multiaddr may be.
"""

from __future__ import annotations

import ipaddress

from libp2p.peer.id import ID

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p.host import Stream
from swarmllm_proto.errors import FrameTooLarge, FrameTruncated
from swarmllm_proto.identifiers import PEER_ID_BYTES, NodeId, is_node_id

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


_IP4, _TCP, _IP6 = 0x04, 0x06, 0x29


def node_id_of(content: bytes) -> NodeId | None:
    """None where it cannot be the id of a node."""
    if len(content) != PEER_ID_BYTES:
        return None
    text = str(ID(content))
    return text if is_node_id(text) else None


def packed(address: Address) -> bytes:
    """As a multiaddr of libp2p: two protocols with their values, nothing else."""
    ip = ipaddress.ip_address(address.ip)
    return bytes((_IP4 if ip.version == 4 else _IP6,)) + ip.packed + bytes((_TCP,)) + address.port.to_bytes(2)


def unpacked(content: bytes) -> Address | None:
    """None for any other transport. What follows the port can only be the node's id, which is known."""
    size = {_IP4: 4, _IP6: 16}.get(content[0]) if content else None
    if size is None or len(content) < size + 4 or content[size + 1] != _TCP:
        return None
    rest = content[size + 4 :]
    port = int.from_bytes(content[size + 2 : size + 4])
    if not port or (rest and rest[:2] != b"\xa5\x03"):
        return None
    if rest and len(rest) != 3 + rest[2]:
        return None
    return Address(str(ipaddress.ip_address(content[1 : size + 1])), port)
