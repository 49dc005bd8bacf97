"""Limits the disk space of segment files that workers cut from users' files.

They are a cache: any of them can be cut again. A worker has a shared lock (flock) on each file that it runs
from, so that other processes see which files are in use, however that process ends. Files that no worker has
used for long are deleted; where all together take more than the quota, those that were not used for longest.
Their modification time says when they were used last; of one in use, it is now. Blocking.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SEGMENTS = "segments"
"""The folder of the copies, in the data folder."""
YOUNG_S = 120.0
"""A file used this recently never goes: its worker may be about to open it."""
UNUSED_S = 7 * 86400.0
"""One that was not used for so long goes."""


@dataclass(frozen=True, slots=True)
class CopiesView:
    n_files: int
    n_bytes: int
    quota_bytes: int
    """0: no limit but the disk."""


@dataclass(frozen=True, slots=True)
class _Copy:
    used_s: float
    n_bytes: int
    path: Path


class SegmentCopies:
    def __init__(self, folder: Path, quota_gib: float) -> None:
        self._folder = folder
        self._quota_bytes = int(quota_gib * 2**30)

    def view(self) -> CopiesView:
        copies = list(self._copies())
        return CopiesView(len(copies), sum(copy.n_bytes for copy in copies), self._quota_bytes)

    def tidy(self) -> int:
        """Remove what is not wanted any more; returns how many files went."""
        now_s = time.time()
        copies = list(self._copies())
        excess_bytes = sum(copy.n_bytes for copy in copies) - self._quota_bytes if self._quota_bytes else 0
        n_gone = 0
        for copy in sorted(copies, key=lambda copy: copy.used_s):
            with _unused(copy.path) as is_unused:
                if not is_unused:
                    _used_at(copy.path, now_s)
                    continue
                age_s = now_s - copy.used_s
                if age_s >= YOUNG_S and (age_s >= UNUSED_S or excess_bytes > 0):
                    try:
                        copy.path.unlink(missing_ok=True)
                    except OSError as error:
                        log.warning("%s cannot be removed: %s", copy.path, error.strerror)
                        continue
                    excess_bytes -= copy.n_bytes
                    n_gone += 1
                    log.info("removed %s, a copy of layers (%d bytes)", copy.path.name, copy.n_bytes)
        return n_gone

    def _copies(self) -> Iterator[_Copy]:
        for path in self._folder.glob("*.gguf"):
            with suppress(FileNotFoundError):
                status = path.stat()
                yield _Copy(status.st_mtime, status.st_blocks * 512, path)


@contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Whether no worker runs from a file; while the block lasts, none says that it does."""
    try:
        file = path.open("rb")
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # In use, or on a file system without locks: then nobody knows.
            yield False
        else:
            yield True


def _used_at(path: Path, now_s: float) -> None:
    with suppress(OSError):
        os.utime(path, (now_s, now_s))
