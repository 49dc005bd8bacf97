"""Private swarms: the keys that make a node a member, and where they are kept.

A network is an id and one or more keys. The id is made from the first key and stays for the network's life:
topics and the DHT are named by it, so a change of keys splits nothing. A key is 32 random bytes that only
members know. Rotation adds a key; the one before it is accepted for a while, so that members can be told one
after the other, and then it is worth nothing.

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


class Network(msgspec.Struct, frozen=True, kw_only=True):
    network_id: NetworkId = ""
    """32 hexadecimal digits; empty: the open swarm."""
    keys: Annotated[tuple[NetworkKey, ...], Meta(max_length=KEYS_MAX)] = ()
    """The current one first."""
    bootstrap: Annotated[tuple[NodeAddressText, ...], Meta(max_length=ADDRESSES_MAX)] = ()

    @property
    def is_private(self) -> bool:
        return bool(self.keys)

    def accepted(self, now: float) -> tuple[bytes, ...]:
        """The secrets that prove membership at this time (seconds since the epoch), the current one first."""
        return tuple(k.secret for k in self.keys if k.accepted_until is None or now < k.accepted_until)

    def rotated(self, secret: bytes, now: float, overlap_s: float) -> Network:
        """With a new current key; the one before it is accepted for `overlap_s` more. A key that is here
        already changes nothing."""
        if any(secret == key.secret for key in self.keys):
            return self
        old = [msgspec.structs.replace(k, accepted_until=now + overlap_s) for k in self.keys[:1]]
        new = NetworkKey(secret=secret)
        return msgspec.structs.replace(self, keys=(new, *old)[:KEYS_MAX])

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
