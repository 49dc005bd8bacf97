"""Node ids and addresses as the bytes that libp2p's own messages carry.

Strict, and short: what cannot be the id of a node is none, and an address is an IP literal and a TCP port or
it is none, whatever else a multiaddr may be.
"""

from __future__ import annotations

import ipaddress

from libp2p.peer.id import ID

from swarmllm.swarm.discovery.addresses import Address
from swarmllm_proto.identifiers import PEER_ID_BYTES, NodeId, is_node_id

_IP4, _TCP, _IP6 = 0x04, 0x06, 0x29


def node_id_of(content: bytes) -> NodeId | None:
    """None where it cannot be the id of a node."""
    if len(content) != PEER_ID_BYTES:
        return None
    text = str(ID(content))
    return text if is_node_id(text) else None


def peer_id_of(node_id: NodeId) -> ID:
    """The same as libp2p has it."""
    return ID.from_base58(node_id)


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
