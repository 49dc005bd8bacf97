"""What the routers of two nodes ask each other about the rest of the world, as MessagePack maps.

They travel in requests of kinds of their own (see wire.md), below what the daemons say to each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from swarmllm_proto.errors import BadMessage, UnsupportedVersion
from swarmllm_proto.swarm import WIRE_VERSION, NodeId

PEERS_MAX: Final = 64
"""Nodes in one answer: enough to find any swarm, little enough that a liar cannot fill a book."""
ADDRESSES_MAX: Final = 16

AddressText = Annotated[str, Meta(min_length=1, max_length=200)]
Addresses = Annotated[tuple[AddressText, ...], Meta(max_length=ADDRESSES_MAX)]


class PeerExchangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request: where are the nodes you know?"""

    v: int = WIRE_VERSION
    n_max: Annotated[int, Meta(ge=1, le=PEERS_MAX)] = PEERS_MAX


class KnownPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A node, and where it was found: hearsay until a connection proves it."""

    node_id: NodeId
    addresses: Addresses
    """Control plane, as multiaddrs without /p2p."""


class PeerExchangeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response to PeerExchangeRequest: the connected ones first, then those remembered, latest first."""

    v: int = WIRE_VERSION
    peers: Annotated[tuple[KnownPeer, ...], Meta(max_length=PEERS_MAX)] = ()


class DialBackRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request: can you reach me? The addresses tried are those of the sender's newest envelope, no others."""

    v: int = WIRE_VERSION


class DialBack(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt."""

    address: AddressText
    reached: bool
    """The asking node answered there and proved its id."""


class DialBackResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response to DialBackRequest."""

    v: int = WIRE_VERSION
    control: Annotated[tuple[DialBack, ...], Meta(max_length=ADDRESSES_MAX)] = ()
    data: Annotated[tuple[DialBack, ...], Meta(max_length=ADDRESSES_MAX)] = ()
    observed_ip: Annotated[str, Meta(max_length=45)] = ""
    """Where the asking node's connection comes from; empty: unknown."""


Message = TypeVar("Message", PeerExchangeRequest, PeerExchangeResponse, DialBackRequest, DialBackResponse)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (PeerExchangeRequest, PeerExchangeResponse, DialBackRequest, DialBackResponse)
}


def encode_neighbour(
    message: PeerExchangeRequest | PeerExchangeResponse | DialBackRequest | DialBackResponse,
) -> bytes:
    return _encoder.encode(message)


def decode_neighbour(data: bytes, kind: type[Message]) -> Message:
    """Raises BadMessage, UnsupportedVersion. The size was limited by whoever read it."""
    try:
        message: Message = _decoders[kind].decode(data)
    except _UNREADABLE as error:
        raise BadMessage(kind.__name__, str(error)[:200]) from None
    if message.v != WIRE_VERSION:
        raise UnsupportedVersion(message.v, WIRE_VERSION)
    return message
