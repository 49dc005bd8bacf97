"""Questions and answers between routers about other nodes, as MessagePack maps.

They travel in requests of kinds of their own (see wire.md), below what the daemons say to each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from swarmllm_proto.codec import field_and_reason
from swarmllm_proto.errors import BadMessage, UnsupportedVersion
from swarmllm_proto.identifiers import Multiaddr, NodeId, parse_ip, require_multiaddrs
from swarmllm_proto.swarm.base import WIRE_VERSION

PEERS_MAX: Final = 64
"""Nodes in one answer: enough to find any swarm, little enough that a liar cannot fill a book."""
ADDRESSES_MAX: Final = 16

Addresses = Annotated[tuple[Multiaddr, ...], Meta(max_length=ADDRESSES_MAX)]


class PeerExchangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request: the addresses of the nodes that the peer knows."""

    v: int = WIRE_VERSION
    n_max: Annotated[int, Meta(ge=1, le=PEERS_MAX)] = PEERS_MAX


class KnownPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A node, and where it was found: hearsay until a connection proves it."""

    node_id: NodeId
    addresses: Addresses
    """Control plane, as multiaddrs without /p2p."""

    def __post_init__(self) -> None:
        require_multiaddrs(addresses=self.addresses)


class PeerExchangeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response to PeerExchangeRequest: the connected ones first, then those remembered, latest first."""

    v: int = WIRE_VERSION
    peers: Annotated[tuple[KnownPeer, ...], Meta(max_length=PEERS_MAX)] = ()


class DialBackRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request: dial the sender back, only at the addresses of its newest envelope."""

    v: int = WIRE_VERSION


class DialBack(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt."""

    address: Multiaddr
    reached: bool
    """The asking node answered there and proved its id."""

    def __post_init__(self) -> None:
        require_multiaddrs(address=(self.address,))


class DialBackResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response to DialBackRequest."""

    v: int = WIRE_VERSION
    control: Annotated[tuple[DialBack, ...], Meta(max_length=ADDRESSES_MAX)] = ()
    data: Annotated[tuple[DialBack, ...], Meta(max_length=ADDRESSES_MAX)] = ()
    observed_ip: Annotated[str, Meta(max_length=45)] = ""
    """Where the asking node's connection comes from; empty: unknown."""

    def __post_init__(self) -> None:
        if self.observed_ip:
            try:
                parse_ip(self.observed_ip)
            except ValueError:
                raise ValueError("field `observed_ip`: is not an IP address") from None


Message = TypeVar("Message", PeerExchangeRequest, PeerExchangeResponse, DialBackRequest, DialBackResponse)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (PeerExchangeRequest, PeerExchangeResponse, DialBackRequest, DialBackResponse)
}


class _Versioned(msgspec.Struct, frozen=True):
    v: int = WIRE_VERSION


_versions: Final = msgspec.msgpack.Decoder(_Versioned)


def encode_neighbour(
    message: PeerExchangeRequest | PeerExchangeResponse | DialBackRequest | DialBackResponse,
) -> bytes:
    return _encoder.encode(message)


def decode_neighbour(data: bytes, kind: type[Message]) -> Message:
    """Raises BadMessage, UnsupportedVersion. The size was limited where it was read."""
    try:
        message: Message = _decoders[kind].decode(data)
    except _UNREADABLE as error:
        _refuse_other_version(data)
        raise BadMessage(*field_and_reason(error, kind.__name__)) from None
    if message.v != WIRE_VERSION:
        raise UnsupportedVersion(message.v, WIRE_VERSION)
    return message


def _refuse_other_version(data: bytes) -> None:
    """A newer version may differ in any field."""
    try:
        version = _versions.decode(data).v
    except _UNREADABLE:
        return
    if version != WIRE_VERSION:
        raise UnsupportedVersion(version, WIRE_VERSION)
