"""libp2p's kad-dht messages, as far as they are spoken here: their keys, and what they may contain.

A key is a multihash, as other implementations take it from a CID: that of a model is its ModelId, which is a
BLAKE3 hash already; that of a name is a hash with a context of its own, so that no name is another's ModelId.

Foreign bytes become `Message` or BadMessage. What is merely of no use is dropped, not refused: an address of
another transport, a peer whose id cannot be one. Lists are cut at what is ever needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final

from blake3 import blake3
from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb import kademlia_pb2
from libp2p.peer.id import ID

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p.stream_framing import node_id_of, packed, unpacked
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import ModelId, NodeId, is_model_id

KEY_MAX_BYTES = 64
"""The longest multihash that is looked at; ours have 34."""
_BLAKE3 = bytes((0x1E, 0x20))
_NAME_CONTEXT = "swarmllm 2026 model name in the DHT"
_SERVICE_CONTEXT = "swarmllm 2026 service in the DHT"


def model_key(model_id: ModelId) -> bytes:
    """`model_id`: 64 hexadecimal digits."""
    return _BLAKE3 + bytes.fromhex(model_id)


def name_key(name: str) -> bytes:
    return _BLAKE3 + blake3(name.encode(), derive_key_context=_NAME_CONTEXT).digest()


def service_key(service: str) -> bytes:
    """What nodes that volunteer for something are found under."""
    return _BLAKE3 + blake3(service.encode(), derive_key_context=_SERVICE_CONTEXT).digest()


RELAY_KEY: Final = service_key("relay")


def keys_of(name_or_id: str) -> tuple[bytes, ...]:
    """The beginning of an id leads nowhere: a hash has no near misses."""
    return (*([model_key(name_or_id)] if is_model_id(name_or_id) else []), name_key(name_or_id))


def place(content: bytes) -> int:
    """Where a key, or a node by the bytes of its id, is in the space of distances."""
    return int.from_bytes(hashlib.sha256(content).digest(), "big")


@lru_cache(4096)
def node_key(node_id: NodeId) -> bytes:
    """What FIND_NODE asks for."""
    return bytes(ID.from_base58(node_id).to_bytes())


def node_place(node_id: NodeId) -> int:
    return place(node_key(node_id))


MESSAGE_MAX_BYTES = 64 * 1024
"""On the wire. Forty peers with eight addresses each are 20 KiB; the libp2p specification allows 4 MiB."""
CONTACTS_MAX = 32
ADDRESSES_MAX = 8


class DhtMessageKind(IntEnum):
    """libp2p's numbers."""

    PUT_VALUE = 0
    GET_VALUE = 1
    ADD_PROVIDER = 2
    GET_PROVIDERS = 3
    FIND_NODE = 4
    PING = 5


@dataclass(frozen=True, slots=True)
class Contact:
    """A node, and the addresses that somebody gave for it."""

    node_id: NodeId
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    kind: DhtMessageKind
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
        kind = DhtMessageKind(parsed.type)
    except (DecodeError, ValueError) as error:
        raise BadMessage("message", "is no message of the DHT") from error
    if len(parsed.key) > KEY_MAX_BYTES:
        raise BadMessage("key", f"{len(parsed.key)} bytes are more than {KEY_MAX_BYTES}")
    return Message(kind, bytes(parsed.key), _contacts(parsed.closerPeers), _contacts(parsed.providerPeers))


def _peer(contact: Contact) -> kademlia_pb2.Message.Peer:
    return kademlia_pb2.Message.Peer(
        id=ID.from_base58(contact.node_id).to_bytes(),
        addrs=[packed(address) for address in contact.addresses[:ADDRESSES_MAX]],
        connection="CAN_CONNECT",
    )


def _contacts(peers: Sequence[kademlia_pb2.Message.Peer]) -> tuple[Contact, ...]:
    found: dict[NodeId, Contact] = {}
    for peer in peers[:CONTACTS_MAX]:
        node_id = node_id_of(peer.id)
        if node_id is not None:
            found[node_id] = Contact(node_id, _addresses(peer.addrs))
    return tuple(found.values())


def _addresses(contents: Iterable[bytes]) -> tuple[Address, ...]:
    found = (unpacked(content) for content in list(contents)[:ADDRESSES_MAX])
    return tuple(dict.fromkeys(address for address in found if address is not None))
