"""What the store asks of the file system. Blocking."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from swarmllm.private_files import sync_folder

MTIME_STEP_NS = 10**9
"""Whole seconds: every file system keeps those."""


def share_file(part: Path, target: Path) -> None:
    """The same file under a second name."""
    try:
        os.link(part, target)
    except OSError:
        # A file system without hard links.
        part.rename(target)


def give_back(origin: Path, names: Sequence[Path]) -> None:
    """Undo `share_file` where that could only rename."""
    for name in names:
        if not origin.exists() and name.exists():
            name.rename(origin)


def put(incoming: Path, final: Path) -> None:
    """A complete folder to its place; what was there is kept aside until `drop_all`, or `take_back`."""
    if final.exists():
        final.rename(_aside(incoming))
    incoming.rename(final)
    sync_folder(final.parent)


def take_back(incoming: Path, final: Path) -> None:
    """Undo `put`, if it came so far."""
    if not incoming.exists():
        shutil.rmtree(final, ignore_errors=True)
    if _aside(incoming).exists():
        _aside(incoming).rename(final)


def drop_all(incoming: Path) -> None:
    """What is neither at its place nor wanted any more."""
    for folder in (incoming, _aside(incoming)):
        shutil.rmtree(folder, ignore_errors=True)


def _aside(incoming: Path) -> Path:
    return incoming.with_name(f"{incoming.name}-before")


def whole_seconds_ns() -> int:
    return time.time_ns() // MTIME_STEP_NS * MTIME_STEP_NS


def allocated_bytes(file: Path) -> int:
    """On the disk, holes not counted; 0 where there is no such file."""
    with suppress(OSError):
        return file.stat().st_blocks * 512
    return 0
