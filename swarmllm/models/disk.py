"""What the store asks of the file system. Blocking."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

MTIME_STEP_NS = 10**9
"""Whole seconds: every file system keeps those."""


def share_file(part: Path, target: Path) -> None:
    """The same file under a second name."""
    try:
        os.link(part, target)
    except OSError:
        # A file system without hard links.
        part.rename(target)


def whole_seconds_ns() -> int:
    return time.time_ns() // MTIME_STEP_NS * MTIME_STEP_NS


def allocated_bytes(file: Path) -> int:
    """On the disk, holes not counted; 0 where there is no such file."""
    with suppress(OSError):
        return file.stat().st_blocks * 512
    return 0


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
