"""Signed statements of a node about itself, so that it may pass through anybody's hands.

An *envelope* wraps the node's record with what the routers themselves need: where to reach the node on both
planes, and which of its envelopes is the newest. A *heartbeat* says only "I live, and my newest envelope is
this one": it costs a few hundred bytes, and a node that missed the envelope notices and asks for it. In a
large swarm the envelope has a brief record only, and the *details* are a statement of their own, for those
that ask for it (see `record_parts`).

On the wire each is a MessagePack array `[body, signature]`: body is the MessagePack of the struct, signature
is Ed25519 over a domain prefix and the body. Signing the bytes as sent means no canonical encoding is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.codec import field_and_reason
from swarmllm_proto.errors import BadMessage, UnsupportedVersion
from swarmllm_proto.identifiers import Multiaddr, NodeId, require_multiaddrs
from swarmllm_proto.identifiers import Sign as Sign
from swarmllm_proto.identifiers import Verify as Verify
from swarmllm_proto.limits import DETAILS_MAX, LOAD_MAX, RECORD_MAX

ENVELOPE_VERSION = 1
ENVELOPE_MAX = RECORD_MAX + 8 * 1024
"""Bytes on the wire: the record, and room for addresses and the signature."""
HEARTBEAT_MAX = 1024
SEALED_DETAILS_MAX = DETAILS_MAX + 1024
ADDRESSES_MAX = 16

_Addresses = Annotated[tuple[Multiaddr, ...], Meta(max_length=ADDRESSES_MAX)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]
AUDIENCE_BYTES = 8
_Audience = Annotated[bytes, Meta(min_length=AUDIENCE_BYTES, max_length=AUDIENCE_BYTES)]


def audience_of(node_ids: Iterable[NodeId]) -> bytes:
    """A fingerprint of a set of nodes, in whatever order they come: the exclusive or of the first eight bytes
    of each id's SHA-256."""
    mixed = 0
    for node_id in node_ids:
        mixed ^= _fingerprint(node_id)
    return mixed.to_bytes(AUDIENCE_BYTES, "big")


@lru_cache(maxsize=4096)
def _fingerprint(node_id: NodeId) -> int:
    return int.from_bytes(sha256(node_id.encode()).digest()[:AUDIENCE_BYTES], "big")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    v: int = ENVELOPE_VERSION
    node_id: NodeId
    started_at_ms: _Count
    """When the writer's life began, by its own clock and never twice the same: a restarted node's envelopes
    are newer."""
    sequence: _Count
    addresses: _Addresses = ()
    """Control plane, as multiaddrs without /p2p."""
    data_addresses: _Addresses = ()
    """Data plane, as /ip4/ADDRESS/tcp/PORT or /ip6/..."""
    record: Annotated[bytes, Meta(max_length=RECORD_MAX)] = b""
    """Empty until the node has published one."""
    audience: _Audience | UnsetType = UNSET
    """`audience_of` the writer and all to whom it sends this itself. A neighbour that has it from the writer,
    and would pass it on to nobody else, need not pass it on."""
    details: _Count | UnsetType = UNSET
    """The record is a brief one, and there are Details with this number, or a higher one; unset: the record
    is whole."""

    def __post_init__(self) -> None:
        require_multiaddrs(addresses=self.addresses, data_addresses=self.data_addresses)

    @property
    def version(self) -> tuple[int, int]:
        return self.started_at_ms, self.sequence


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    v: int = ENVELOPE_VERSION
    node_id: NodeId
    started_at_ms: _Count
    sequence: _Count
    beat: _Count
    """Counts up within a life, so that no two heartbeats are the same bytes (gossip drops repeats)."""
    load: Annotated[bytes, Meta(min_length=1, max_length=LOAD_MAX)] | UnsetType = UNSET
    """What the writer has to do now, if that has changed since this envelope. See `node_load`."""
    audience: _Audience | UnsetType = UNSET
    """As in an envelope."""
    details: _Count | UnsetType = UNSET
    """As in an envelope: the number of now."""

    @property
    def version(self) -> tuple[int, int]:
        return self.started_at_ms, self.sequence


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """What the writer's brief record leaves out."""

    v: int = ENVELOPE_VERSION
    node_id: NodeId
    started_at_ms: _Count
    """Of the writer's life."""
    number: _Count
    """Counts up within a life: the highest is the newest."""
    details: Annotated[bytes, Meta(max_length=DETAILS_MAX)]
    """A RecordDetails."""


class _Signed(msgspec.Struct, frozen=True, array_like=True):
    body: bytes
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class _Author(msgspec.Struct, frozen=True):
    """What is read of a statement that is malformed otherwise."""

    node_id: NodeId
    v: int = ENVELOPE_VERSION


Statement = TypeVar("Statement", Envelope, Heartbeat, Details)

_DOMAINS: dict[type[Any], bytes] = {
    Envelope: b"swarmllm envelope 1:",
    Heartbeat: b"swarmllm heartbeat 1:",
    Details: b"swarmllm details 1:",
}
_LIMITS: dict[type[Any], int] = {
    Envelope: ENVELOPE_MAX,
    Heartbeat: HEARTBEAT_MAX,
    Details: SEALED_DETAILS_MAX,
}
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


class BadStatement(BadMessage):
    """A malformed or forged statement. `author` is the node that signed it, where its signature is right."""

    def __init__(self, field: str, reason: str, author: NodeId | None = None) -> None:
        super().__init__(field, reason)
        self.author = author


def seal(statement: Envelope | Heartbeat | Details, sign: Sign) -> bytes:
    body = msgspec.msgpack.encode(statement)
    return msgspec.msgpack.encode(_Signed(body, sign(_DOMAINS[type(statement)] + body)))


def unseal(sealed: bytes, kind: type[Statement], verify: Verify) -> Statement:
    """Raises BadStatement: too large, undecodable, or not signed by the node it speaks of; UnsupportedVersion
    for another version."""
    name = kind.__name__.lower()
    if len(sealed) > _LIMITS[kind]:
        raise BadStatement(name, f"{len(sealed)} bytes, at most {_LIMITS[kind]}")
    try:
        signed = msgspec.msgpack.decode(sealed, type=_Signed)
    except _UNREADABLE as error:
        raise BadStatement(*field_and_reason(error, name)) from None
    signed_text = _DOMAINS[kind] + signed.body
    try:
        statement = msgspec.msgpack.decode(signed.body, type=kind)
    except _UNREADABLE as error:
        author = _author(signed, signed_text, verify)
        raise BadStatement(*field_and_reason(error, name), author) from None
    if statement.v != ENVELOPE_VERSION:
        raise UnsupportedVersion(statement.v, ENVELOPE_VERSION)
    if not verify(statement.node_id, signed_text, signed.signature):
        raise BadStatement("signature", "does not match the node id")
    return statement


def _author(signed: _Signed, signed_text: bytes, verify: Verify) -> NodeId | None:
    """Raises UnsupportedVersion: a newer version may differ in any field."""
    try:
        author = msgspec.msgpack.decode(signed.body, type=_Author)
    except _UNREADABLE:
        return None
    if author.v != ENVELOPE_VERSION:
        raise UnsupportedVersion(author.v, ENVELOPE_VERSION)
    return author.node_id if verify(author.node_id, signed_text, signed.signature) else None
