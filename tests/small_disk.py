"""A real file system that is small, so that it can be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self, leave_bytes: int = 0) -> None:
        """Until nothing more can be written but `leave_bytes`."""
        try:
            with self._ballast.open("ab", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        except OSError:
            pass
        with self._ballast.open("r+b") as file:
            file.truncate(max(0, self._ballast.stat().st_size - leave_bytes))

    def free(self) -> None:
        self._ballast.unlink()


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Skips the test where nothing may be mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)
