"""An invitation: one string with a network's key, the addresses of its nodes, its expiry date, and the expiry
dates of the keys that this key replaced.

    swarmllm-join-<base64url of MessagePack and 4 bytes of its BLAKE3>

Anyone who has the string has the key: it is to be handed over like a password. The end of its validity is a
promise of the program that reads it, not of mathematics; what takes a leaked key's worth away is a rotation.
The checksum is there for what copying does to strings, not against anybody.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarmllm.errors import InvalidRequest
from swarmllm.swarm.discovery.addresses import NodeAddress
from swarmllm.swarm.membership.network_key import (
    ADDRESSES_MAX,
    ENDS_MAX,
    OPEN_SWARM,
    SECRET_BYTES,
    KeyEnd,
    Network,
    NetworkId,
    NetworkKey,
    NodeAddressText,
    key_id,
)

PREFIX = "swarmllm-join-"
TEXT_MAX = 16 * 1024
_VERSION = 1
_CHECK_BYTES = 4


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    v: int
    network_id: NetworkId
    """Empty: the open swarm."""
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES)]
    addresses: Annotated[tuple[NodeAddressText, ...], Meta(min_length=1, max_length=ADDRESSES_MAX)]
    expires_at: Annotated[float, Meta(ge=0, le=1e11)] | None = None
    """Seconds since the epoch."""
    replaced: Annotated[tuple[KeyEnd, ...], Meta(max_length=ENDS_MAX)] = ()
    """Older keys of the network, by an id of each."""

    def __post_init__(self) -> None:
        if bool(self.network_id) != bool(self.secret) or len(self.secret) not in (0, SECRET_BYTES):
            raise ValueError("field `secret`: a private network has an id and a key, an open one neither")

    def __repr__(self) -> str:
        return f"<Invitation to {self.network_id or 'the open swarm'}>"


def invitation(network: Network, addresses: tuple[str, ...], expires_at: float | None) -> Invitation:
    """Into this network as it is now. Raises InvalidRequest where no address could be dialled."""
    for text in addresses:
        NodeAddress.parse(text, field="address")
    if not addresses:
        raise InvalidRequest("An invitation needs an address of a node.", field="address")
    secret = network.keys[0].secret if network.is_private else b""
    return Invitation(
        _VERSION,
        network.network_id,
        secret,
        addresses[:ADDRESSES_MAX],
        expires_at,
        network.key_ends(),
    )


def outward(addresses: Iterable[str]) -> tuple[str, ...]:
    """Those that other machines may dial: none of this machine's own loopback."""
    return tuple(each for each in addresses if not each.startswith(("/ip4/127.", "/ip6/::1/")))


def join_command(network: Network, addresses: Iterable[str]) -> str:
    """What to type on another machine for it to join; empty where that takes an invitation, or where none of
    this node's `addresses` can be dialled from there."""
    reachable = outward(addresses)
    return f"swarmllm daemon --bootstrap {reachable[0]}" if reachable and not network.is_private else ""


def to_text(invited: Invitation) -> str:
    body = msgspec.msgpack.encode(invited)
    return PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")


def from_text(text: str, now: float) -> Invitation:
    """Raises InvalidRequest: damaged, out of date, or no invitation at all; never quotes what was read."""
    text = "".join(text.split())
    if not text.startswith(PREFIX) or len(text) > TEXT_MAX:
        raise InvalidRequest(f"That is no invitation: they begin with {PREFIX}.", field="invitation")
    encoded = text.removeprefix(PREFIX)
    try:
        content = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _damaged() from None
    body, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    if check != _check(body):
        raise _damaged()
    try:
        invited = msgspec.msgpack.decode(body, type=Invitation)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _damaged() from None
    if invited.v != _VERSION:
        raise InvalidRequest("That invitation was made by a newer version of SwarmLLM.", field="invitation")
    for address in invited.addresses:
        NodeAddress.parse(address, field="invitation")
    if invited.expires_at is not None and now >= invited.expires_at:
        raise InvalidRequest("That invitation is out of date; ask for a new one.", field="invitation")
    return invited


def accept(invited: Invitation, network: Network, now: float) -> Network:
    """The network after joining: a member who joins again has the newer key, and the older ones until the
    invitation says that they end.

    Raises InvalidRequest where this node belongs to another private network, and where the invitation's key
    is known to have been replaced by one that this node has.
    """
    if network.is_private and network.network_id != invited.network_id:
        raise InvalidRequest(
            "This node belongs to another private network; leave that first: swarmllm network leave.",
            field="invitation",
        )
    if not invited.secret:
        return OPEN_SWARM.met_through((*invited.addresses, *network.bootstrap))
    if not network.is_private:
        keys = (NetworkKey(secret=invited.secret),)
        return Network(
            network_id=invited.network_id,
            keys=keys,
            bootstrap=invited.addresses,
            replaced=invited.replaced,
        )
    if any(end.key_id == key_id(invited.secret) for end in network.replaced):
        raise InvalidRequest(
            "That invitation holds a key that has been replaced; ask for a new one.", field="invitation"
        )
    return network.taking(invited.secret, invited.replaced, now).met_through(invited.addresses)


def _check(body: bytes) -> bytes:
    return blake3(body).digest(length=_CHECK_BYTES)


def _damaged() -> InvalidRequest:
    return InvalidRequest("That invitation is damaged; was all of it copied?", field="invitation")
