"""Segment files on disk: cut once, found again by name, forgotten by age.

A file's name holds the identity of its source (path, size, modification time), the layout version of this
code and the range, so nothing needs to be recorded and a changed source is never mistaken. Files appear by
rename, complete or not at all. Removing one that a worker has mapped is harmless: its pages stay until they
are unmapped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from swarmllm_proto.architectures import Architecture
from swarmllm_proto.segment_names import copy_name, copy_prefix
from swarmllm_proto.split_files import joint_mtime_ns
from swarmllm_workers.engine import segment_file
from swarmllm_workers.engine.gguf_file import GgufFile
from swarmllm_workers.engine.ranges import Range
from swarmllm_workers.errors import CallError

QUOTA_BYTES: Final = 64 * 2**30
YOUNG_S: Final = 120.0
"""Files used this recently are never pruned: their worker may be about to open them."""


class SegmentCache:
    def __init__(self, folder: Path, source: GgufFile, quota_bytes: int = QUOTA_BYTES) -> None:
        self._folder = folder
        self._source = source
        self._quota_bytes = quota_bytes
        files = [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in source.paths)]
        mtime_ns = files[0][1] if len(files) == 1 else joint_mtime_ns(files)
        self._prefix = copy_prefix(str(source.path.resolve()), sum(size for size, _ in files), mtime_ns)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CallError("bad_message", f"{folder}: {error.strerror}", "cache_dir") from error

    def path(self, start: int, end: int) -> Path:
        return self._folder / copy_name(self._prefix, start, end)

    def ensure(
        self, architecture: Architecture, start: int, end: int, progress: segment_file.Progress | None = None
    ) -> Path:
        """The segment file of [start, end), cut now where it is missing. Raises CallError as `cut` does."""
        path = self.path(start, end)
        try:
            os.utime(path)
        except FileNotFoundError:
            segment_file.cut(self._source, architecture, start, end, path, progress)
            self.prune()
        return path

    def whole(self) -> Path:
        """The file itself."""
        return self._source.path

    def settle(self, running: Collection[Range]) -> None:
        """These are copies of a user's file; nothing is to be put in order."""

    def prune(self) -> None:
        """Remove the files that were not used for longest until the folder keeps its quota."""
        files = []
        for path in self._folder.glob("*.gguf"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            files.append((status.st_mtime, status.st_blocks * 512, path))
        excess = sum(size for _, size, _ in files) - self._quota_bytes
        now = time.time()
        for used_at, size, path in sorted(files):
            if excess <= 0 or now - used_at < YOUNG_S:
                break
            path.unlink(missing_ok=True)
            excess -= size
