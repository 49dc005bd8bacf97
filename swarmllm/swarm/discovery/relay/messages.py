"""The messages of circuit relay v2 and DCUtR, as far as they are used here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, TypeVar

from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2, dcutr_pb2

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p.stream_framing import node_id_of, packed, unpacked
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import NodeId

# The generated types know enumerations only as numbers of their own kind.
_circuit: Any = circuit_pb2
_dcutr: Any = dcutr_pb2

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
DCUTR = "/libp2p/dcutr"
MESSAGE_MAX_BYTES = 4096
"""libp2p's limit for these protocols."""
OBSERVED_MAX = 8
T = TypeVar("T")


class Status(IntEnum):
    """libp2p's numbers."""

    NONE = 0
    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True, slots=True)
class Hop:
    """A message between a node and a relay."""

    kind: Literal["reserve", "connect", "status"]
    node_id: NodeId | None = None
    """Whom to connect with."""
    status: Status = Status.NONE
    expires_at: int = 0
    """Of a reservation, in seconds since the epoch; 0: none was made."""
    data_bytes: int = 0
    """That the relay will carry on this circuit; 0: it names no limit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A message between a relay and the node that is dialled through it."""

    kind: Literal["connect", "status"]
    node_id: NodeId | None = None
    """Who dials."""
    status: Status = Status.NONE


@dataclass(frozen=True, slots=True)
class Punch:
    kind: Literal["connect", "sync"]
    addresses: tuple[Address, ...] = ()
    """Where the sender may be dialled at the agreed moment."""


def encode_hop(message: Hop, *, duration_s: int = 0) -> bytes:
    encoded = _circuit.HopMessage(type=message.kind.upper())
    if message.node_id:
        encoded.peer.id = ID.from_base58(message.node_id).to_bytes()
    if message.status:
        encoded.status = int(message.status)
    if message.expires_at:
        encoded.reservation.expire = message.expires_at
    if duration_s or message.data_bytes:
        encoded.limit.duration, encoded.limit.data = duration_s, message.data_bytes
    return bytes(encoded.SerializeToString())


def decode_hop(content: bytes) -> Hop:
    """Raises BadMessage."""
    parsed = _parse(_circuit.HopMessage, content)
    kinds: tuple[Literal["reserve", "connect", "status"], ...] = ("reserve", "connect", "status")
    kind = _kind(kinds, parsed.type)
    expires_at = min(int(parsed.reservation.expire), 2**40)
    data_bytes = min(int(parsed.limit.data), 2**62)
    return Hop(kind, _peer(parsed) if kind == "connect" else None, _status(parsed), expires_at, data_bytes)


def encode_stop(message: Stop) -> bytes:
    encoded = _circuit.StopMessage(type=message.kind.upper())
    if message.node_id:
        encoded.peer.id = ID.from_base58(message.node_id).to_bytes()
    if message.status:
        encoded.status = int(message.status)
    return bytes(encoded.SerializeToString())


def decode_stop(content: bytes) -> Stop:
    """Raises BadMessage."""
    parsed = _parse(_circuit.StopMessage, content)
    kinds: tuple[Literal["connect", "status"], ...] = ("connect", "status")
    kind = _kind(kinds, parsed.type)
    return Stop(kind, _peer(parsed) if kind == "connect" else None, _status(parsed))


def encode_punch(message: Punch) -> bytes:
    addresses = [packed(address) for address in message.addresses[:OBSERVED_MAX]]
    encoded = _dcutr.HolePunch(type=message.kind.upper(), ObsAddrs=addresses)
    return bytes(encoded.SerializeToString())


def decode_punch(content: bytes) -> Punch:
    """Raises BadMessage."""
    parsed = _parse(_dcutr.HolePunch, content)
    if parsed.type not in (_dcutr.HolePunch.CONNECT, _dcutr.HolePunch.SYNC):
        raise BadMessage("type", "is unknown")
    is_sync = parsed.type == _dcutr.HolePunch.SYNC
    return Punch("sync" if is_sync else "connect", _known(parsed.ObsAddrs))


def _known(contents: Iterable[bytes]) -> tuple[Address, ...]:
    found = [unpacked(content) for content in list(contents)[:OBSERVED_MAX]]
    return tuple(dict.fromkeys(address for address in found if address is not None))


def _parse(kind: Any, content: bytes) -> Any:
    if len(content) > MESSAGE_MAX_BYTES:
        raise BadMessage("message", f"{len(content)} bytes are more than {MESSAGE_MAX_BYTES}")
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise BadMessage("message", "is no message of a relay") from error


def _kind(kinds: tuple[T, ...], number: int) -> T:
    if not 0 <= number < len(kinds):
        raise BadMessage("type", "is unknown")
    return kinds[number]


def _peer(parsed: Any) -> NodeId:
    node_id = node_id_of(parsed.peer.id)
    if node_id is None:
        raise BadMessage("peer.id", "is not a node id")
    return node_id


def _status(parsed: Any) -> Status:
    try:
        return Status(parsed.status)
    except ValueError:
        raise BadMessage("status", "is unknown") from None
