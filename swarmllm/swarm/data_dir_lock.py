"""One daemon per data folder.

libp2p listens with SO_REUSEPORT, so a second daemon would take the same port without an error and the kernel
would deal connections to both at random; two daemons with one identity would also overwrite each other's
record. An flock is released by the kernel when its process ends, however it ends, so there is no stale lock
to clean up (a pid file would need that).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmllm.errors import ConfigError

LOCK_NAME = "lock"


@contextmanager
def locked_data_dir(data_dir: Path) -> Iterator[None]:
    """Create the folder if need be and hold its lock. Raises ConfigError when another process holds it."""
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
                "stop it or give this one its own folder",
                field="data_dir",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
