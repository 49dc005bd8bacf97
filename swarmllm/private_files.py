"""Files of the data folder that belong to one user: written whole or not at all, under locks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarmllm.errors import ConfigError

LOCK_NAME = "lock"


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


@contextmanager
def locked_data_dir(data_dir: Path) -> Iterator[None]:
    """Create the folder if need be and hold its lock, as one daemon does. Raises ConfigError when another
    process holds it.

    libp2p listens with SO_REUSEPORT, so a second daemon would take the same port without an error and the
    kernel would deal connections to both at random; two daemons with one identity would also overwrite each
    other's record. An flock is released by the kernel when its process ends, however it ends, so there is no
    stale lock to clean up (a pid file would need that).
    """
    path = data_dir / LOCK_NAME
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot use the data folder {data_dir}: {error.strerror}", field="data_dir"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"the data folder {data_dir} is in use by another daemon (process {owner}); "
                "stop it, or give this one a folder of its own: swarmllm daemon --data-dir DIR",
                field="data_dir",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
