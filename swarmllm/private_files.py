"""Small files that are this user's only (keys, identities): written whole or not at all, by one at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarmllm.errors import ConfigError


def write_private(path: Path, content: bytes) -> None:
    """Under another name first: a crash must not leave half a file behind. Raises ConfigError."""
    temporary = path.with_suffix(".tmp")
    try:
        # A link that somebody has put there is not followed.
        temporary.unlink(missing_ok=True)
        with os.fdopen(_open(temporary, os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        with suppress(OSError):
            # Some file systems cannot: there a power cut may bring the file back that was replaced.
            sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="data_dir") from None


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of `path`; its folder is made where it is missing. Raises
    ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.fdopen(_open(path.with_suffix(".lock")), "wb")
    except OSError as error:
        raise ConfigError(
            f"cannot use the folder {path.parent}: {error.strerror}", field="data_dir"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
