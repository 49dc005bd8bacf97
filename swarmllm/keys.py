"""API keys: who may use a node's HTTP endpoint from elsewhere.

A key is 32 random bytes, shown once when it is made. What is kept is its SHA-256: a slow password hash would
protect words that people choose, and nobody guesses 256 random bits. The keys of a node are one small JSON
file in the data folder, readable by its user only; `swarmllm key` writes it and the daemon reads it again
when it has changed, so keys come and go without a restart and without the daemon's help.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Literal

import msgspec

from swarmllm.errors import ConfigError, Conflict, InvalidRequest, reason_of
from swarmllm.private_files import locked, write_private

KEY_FILE = "keys.json"
PREFIX = "sk-swarm-"
SECRET_BYTES = 32

Tier = Literal["bronze", "silver", "gold", "platinum"]
"""How much of a node a key may use, and before whom (see `scheduling.tiers`)."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """8 hexadecimal digits, to name it by; says nothing about the secret."""
    name: str
    is_admin: bool
    """May load and unload models and read this node's files into the catalogue."""
    created_at: float
    """Seconds since the epoch."""
    sha256: str
    tier: Tier = "gold"
    rate_limit: int = 0
    """Requests per minute; 0: no limit."""


class KeyFile:
    """The keys on disk. Every method blocks, and raises ConfigError where the file cannot be used."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / KEY_FILE

    def list(self) -> tuple[ApiKey, ...]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=tuple[ApiKey, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"Cannot read the keys in {self.path}: {reason_of(error)}") from None

    def create(
        self, name: str, *, is_admin: bool = False, tier: Tier = "gold", rate_limit: int = 0
    ) -> tuple[ApiKey, str]:
        """The key and its secret, which is nowhere else. Raises Conflict for a name that is taken."""
        secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        key = ApiKey(
            id=secrets.token_hex(4),
            name=name,
            is_admin=is_admin,
            created_at=time.time(),
            sha256=_hash(secret),
            tier=tier,
            rate_limit=rate_limit,
        )
        # Two commands at once must not lose a key: a lost revocation would be a hole.
        with locked(self.path):
            keys = self.list()
            if any(other.name == name for other in keys):
                raise Conflict(f"There is a key {name!r} already; revoke it first.", field="name")
            self._write((*keys, key))
        return key, secret

    def revoke(self, name_or_id: str) -> ApiKey:
        """Raises InvalidRequest where there is no such key."""
        with locked(self.path):
            keys = self.list()
            for key in keys:
                if name_or_id in (key.name, key.id):
                    self._write(tuple(other for other in keys if other is not key))
                    return key
        raise InvalidRequest(f"There is no key {name_or_id!r}.", field="name")

    def _write(self, keys: tuple[ApiKey, ...]) -> None:
        write_private(self.path, msgspec.json.format(msgspec.json.encode(keys)) + b"\n")


class KeyRing:
    """The daemon's view of the keys: `refresh` (blocking) now and then, `find` for every request.

    `is_required`: a key is needed although there is none (the endpoint is open to other machines).
    """

    def __init__(self, file: KeyFile, *, is_required: bool = False) -> None:
        self._file = file
        self._is_required = is_required
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[ApiKey, ...] = ()

    @property
    def is_required(self) -> bool:
        return self._is_required or bool(self._keys)

    def refresh(self) -> None:
        """Raises ConfigError; then the keys stay as they were."""
        seen = self._look()
        if seen != self._seen:
            self._keys = self._file.list()
            self._seen = seen

    def find(self, secret: str) -> ApiKey | None:
        """Takes the same time whichever key it is, and whether it is one."""
        digest, found = _hash(secret), None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def _look(self) -> tuple[int, int, int] | None:
        try:
            state = self._file.path.stat()
        except OSError:
            return None
        return state.st_ino, state.st_mtime_ns, state.st_size


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
