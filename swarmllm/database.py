"""Opens the SQLite databases of a node, and tells a locked one from a damaged one.

Another process (a backup, a person with the sqlite3 shell) may hold a database for longer than a write waits.
Nothing is wrong with the file then: the caller gets StoreLocked and tries again later.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from swarmllm.errors import StoreLocked

BUSY_TIMEOUT_S = 10.0
"""How long a statement waits for another process."""


@contextmanager
def open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction, committed unless the block raises. Blocking. Raises StoreLocked, and sqlite3.Error for
    all else."""
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as database, database:
            yield database
    except sqlite3.OperationalError as error:
        if is_locked(error):
            raise StoreLocked(
                f"{path} is locked by another process; try again when that has ended"
            ) from error
        raise


def is_locked(error: sqlite3.Error) -> bool:
    # Extended codes keep the primary one in their low byte.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
