"""Private swarms: the keys that make a node a member, and where they are kept.

A network is an id and one or more keys. The id is made from the first key and stays for the network's life:
topics and the DHT are named by it, so a change of keys splits nothing. A key is 32 random bytes that only
members know. Rotation adds a key. The previous key stays valid for a while, so that members can be told one
after the other, and then expires. The person who rotates chooses how long. The end of each older key travels
in invitations, so that it is the same for all members; a key whose end nobody named ends at once.

`network.json` in the data folder (mode 0600, never logged) also remembers the addresses that came with an
invitation. A network without keys is the open swarm, of which only addresses need remembering.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarmllm.errors import ConfigError
from swarmllm.private_files import locked, write_private

NETWORK_FILE = "network.json"
SECRET_BYTES = 32
KEYS_MAX = 2
"""The current key and the one before: a third would be a rotation inside a rotation's overlap."""
ENDS_MAX = 16
"""Keys that were replaced, and are remembered as such."""
KEY_ID_BYTES = 16
ADDRESSES_MAX = 16
_FILE_MAX_BYTES = 64 * 1024

Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
NetworkId = Annotated[str, Meta(max_length=32, pattern="^([0-9a-f]{32})?$")]
NodeAddressText = Annotated[str, Meta(min_length=1, max_length=400)]


class NetworkKey(msgspec.Struct, frozen=True, kw_only=True):
    secret: Secret
    accepted_until: float | None = None
    """Seconds since the epoch; None: this is the current key."""

    def __repr__(self) -> str:
        return f"<NetworkKey accepted_until={self.accepted_until}>"


class KeyEnd(msgspec.Struct, frozen=True, array_like=True):
    """The time until which a replaced key is accepted."""

    key_id: Annotated[bytes, Meta(min_length=KEY_ID_BYTES, max_length=KEY_ID_BYTES)]
    until: Annotated[float, Meta(ge=0, le=1e11)]
    """Seconds since the epoch."""


class Network(msgspec.Struct, frozen=True, kw_only=True):
    network_id: NetworkId = ""
    """32 hexadecimal digits; empty: the open swarm."""
    keys: Annotated[tuple[NetworkKey, ...], Meta(max_length=KEYS_MAX)] = ()
    """The current one first."""
    bootstrap: Annotated[tuple[NodeAddressText, ...], Meta(max_length=ADDRESSES_MAX)] = ()
    replaced: Annotated[tuple[KeyEnd, ...], Meta(max_length=ENDS_MAX)] = ()
    """Of older keys that this node does not hold, the newest first."""

    @property
    def is_private(self) -> bool:
        return bool(self.keys)

    @property
    def prefix_key(self) -> str:
        """What names of kept KV are keyed with, 64 hexadecimal digits: only members can guess a prompt. In
        the open swarm they have no key: ""."""
        if not self.keys:
            return ""
        return blake3(self.keys[0].secret, derive_key_context="swarmllm 2026 kept prefixes").hexdigest()

    def accepted(self, now: float) -> tuple[bytes, ...]:
        """The secrets that prove membership at this time (seconds since the epoch), the current one first."""
        return tuple(k.secret for k in self.keys if k.accepted_until is None or now < k.accepted_until)

    def key_ends(self) -> tuple[KeyEnd, ...]:
        """Of all keys that are known to have been replaced, the newest first."""
        held = (KeyEnd(key_id(k.secret), k.accepted_until) for k in self.keys if k.accepted_until is not None)
        return (*held, *self.replaced)[:ENDS_MAX]

    def rotated(self, secret: bytes, now: float, overlap_s: float) -> Network:
        """With a new current key; the one before it is accepted for `overlap_s` more. A key that is here
        already changes nothing."""
        if any(secret == key.secret for key in self.keys):
            return self
        return self.taking(secret, (KeyEnd(key_id(self.keys[0].secret), now + overlap_s),), now)

    def taking(self, secret: bytes, ends: tuple[KeyEnd, ...], now: float) -> Network:
        """With this current key; of the older ones each is accepted until `ends` says, never longer than
        before, and one without an end only until now. An older key that is here changes nothing."""
        until = {end.key_id: end.until for end in ends}
        if any(secret == key.secret for key in self.keys[1:]):
            return self
        older = [
            msgspec.structs.replace(key, accepted_until=_end(key, until.get(key_id(key.secret)), now))
            for key in self.keys
            if key.secret != secret
        ]
        keys = (NetworkKey(secret=secret), *older)
        taken = msgspec.structs.replace(self, keys=keys)
        held = {key_id(key.secret) for key in keys[:KEYS_MAX]}
        known = {end.key_id: end for end in (*ends, *self.replaced, *taken.key_ends())}
        replaced = tuple(end for key, end in known.items() if key not in held)[:ENDS_MAX]
        return msgspec.structs.replace(self, keys=keys[:KEYS_MAX], replaced=replaced)

    def met_through(self, addresses: tuple[str, ...]) -> Network:
        """Remembering these addresses too, newest first."""
        kept = tuple(dict.fromkeys((*addresses, *self.bootstrap)))[:ADDRESSES_MAX]
        return msgspec.structs.replace(self, bootstrap=kept)


OPEN_SWARM = Network()


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def private_network(secret: bytes) -> Network:
    return Network(network_id=network_id(secret), keys=(NetworkKey(secret=secret),))


def network_id(secret: bytes) -> str:
    """Says nothing about the key it is made from."""
    return blake3(secret, derive_key_context="swarmllm 2026 network id").hexdigest(length=16)


def key_id(secret: bytes) -> bytes:
    """Tells keys apart, and says nothing about them."""
    return blake3(secret, derive_key_context="swarmllm 2026 network key id").digest(length=KEY_ID_BYTES)


def _end(key: NetworkKey, until: float | None, now: float) -> float:
    """`until`: what others say."""
    if key.accepted_until is None:
        return now if until is None else until
    return key.accepted_until if until is None else min(key.accepted_until, until)


class NetworkFile:
    """The network this node belongs to, on disk. Every method blocks, and raises ConfigError where the file
    cannot be used."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / NETWORK_FILE

    def read(self) -> Network:
        """The open swarm where there is no file: a damaged file is an error, never an open door."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    os.fchmod(file.fileno(), 0o600)
                content = file.read(_FILE_MAX_BYTES)
            return msgspec.json.decode(content, type=Network)
        except FileNotFoundError:
            return OPEN_SWARM
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # msgspec's words may quote what it read.
            raise ConfigError(
                f"cannot read the network key in {self.path} ({type(error).__name__}); join again, or remove "
                "it to belong to the open swarm",
                field="data_dir",
            ) from None

    def change(self, change: Callable[[Network], Network]) -> Network:
        """Replace what is there by what `change` makes of it, which may raise."""
        with locked(self.path):
            network = change(self.read())
            write_private(self.path, msgspec.json.format(msgspec.json.encode(network)) + b"\n")
        return network

    def remove(self) -> None:
        with locked(self.path):
            self.path.unlink(missing_ok=True)

    def state(self) -> tuple[int, int, int] | None:
        """Differs when the file has been written; None where there is none."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
