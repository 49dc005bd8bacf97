"""libp2p's kad-dht messages, as far as they are spoken here, and what they may contain.

Foreign bytes become `Message` or BadMessage. What is merely of no use is dropped, not refused: an address of
another transport, a peer whose id cannot be one. Lists are cut at what is ever needed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb import kademlia_pb2
from libp2p.peer.id import ID

from swarmllm.swarm.addresses import Address
from swarmllm.swarm.dht.keys import KEY_MAX_BYTES
from swarmllm_proto.errors import BadMessage

MESSAGE_MAX_BYTES = 64 * 1024
"""On the wire. Forty peers with eight addresses each are 20 KiB; the libp2p specification allows 4 MiB."""
CONTACTS_MAX = 32
ADDRESSES_MAX = 8

_IP4, _TCP, _IP6 = 0x04, 0x06, 0x29
_IDENTITY, _SHA256 = b"\x00", b"\x12\x20"
_ID_MAX_BYTES = 64


class Kind(IntEnum):
    """libp2p's numbers."""

    PUT_VALUE = 0
    GET_VALUE = 1
    ADD_PROVIDER = 2
    GET_PROVIDERS = 3
    FIND_NODE = 4
    PING = 5


@dataclass(frozen=True, slots=True)
class Contact:
    """A node and where somebody says it is."""

    node_id: str
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    key: bytes = b""
    closer: tuple[Contact, ...] = ()
    providers: tuple[Contact, ...] = ()


def encode(message: Message) -> bytes:
    return bytes(
        kademlia_pb2.Message(
            type=message.kind.name,
            key=message.key,
            closerPeers=[_peer(contact) for contact in message.closer[:CONTACTS_MAX]],
            providerPeers=[_peer(contact) for contact in message.providers[:CONTACTS_MAX]],
        ).SerializeToString()
    )


def decode(content: bytes) -> Message:
    """Raises BadMessage."""
    if len(content) > MESSAGE_MAX_BYTES:
        raise BadMessage("message", f"{len(content)} bytes are more than {MESSAGE_MAX_BYTES}")
    try:
        parsed = kademlia_pb2.Message.FromString(content)
        kind = Kind(parsed.type)
    except (DecodeError, ValueError) as error:
        raise BadMessage("message", "is no message of the DHT") from error
    if len(parsed.key) > KEY_MAX_BYTES:
        raise BadMessage("key", f"{len(parsed.key)} bytes are more than {KEY_MAX_BYTES}")
    return Message(kind, bytes(parsed.key), _contacts(parsed.closerPeers), _contacts(parsed.providerPeers))


def _peer(contact: Contact) -> kademlia_pb2.Message.Peer:
    return kademlia_pb2.Message.Peer(
        id=ID.from_base58(contact.node_id).to_bytes(),
        addrs=[_packed(address) for address in contact.addresses[:ADDRESSES_MAX]],
        connection="CAN_CONNECT",
    )


def _contacts(peers: Sequence[kademlia_pb2.Message.Peer]) -> tuple[Contact, ...]:
    found: dict[str, Contact] = {}
    for peer in peers[:CONTACTS_MAX]:
        node_id = _node_id(peer.id)
        if node_id:
            found[node_id] = Contact(node_id, _addresses(peer.addrs))
    return tuple(found.values())


def _node_id(content: bytes) -> str:
    """Empty where it cannot be the id of a node."""
    is_hash = content[:2] == _SHA256 and len(content) == 34
    is_key = content[:1] == _IDENTITY and 2 < len(content) <= _ID_MAX_BYTES and content[1] == len(content) - 2
    return str(ID(content)) if is_hash or is_key else ""


def _addresses(contents: Iterable[bytes]) -> tuple[Address, ...]:
    found = (_unpacked(content) for content in list(contents)[:ADDRESSES_MAX])
    return tuple(dict.fromkeys(address for address in found if address is not None))


def _packed(address: Address) -> bytes:
    """As a multiaddr of libp2p: two protocols with their values, nothing else."""
    ip = ipaddress.ip_address(address.ip)
    return bytes((_IP4 if ip.version == 4 else _IP6,)) + ip.packed + bytes((_TCP,)) + address.port.to_bytes(2)


def _unpacked(content: bytes) -> Address | None:
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
