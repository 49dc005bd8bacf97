"""Reads what this process's control group (versions 1 and 2) leaves to it, as in a container or a service
with CPUQuota= or MemoryMax=.

A group that is nested in others has no more than each of them. In a container the group's path is that
outside, and the files lie at the base; nobody says then what the groups around it leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class MemoryLimit(NamedTuple):
    total_bytes: int
    free_bytes: int
    """Page cache that can go included."""


def processors(root: Path = ROOT) -> float:
    """How many processors' time it may use; infinite where nobody limits it. `root`: of the file system."""
    found = [math.inf]
    for folder, version in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # else "max", or -1
            found.append(int(quota) / int(period))
    return min(found)


def memory(root: Path = ROOT) -> MemoryLimit | None:
    """The least total, and the least that is free; None where nobody limits it."""
    found = []
    for folder, version in _groups(root, "memory"):
        limit = _text(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        usage = _text(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limit.isdigit() and usage.isdigit():
            prefix = "" if version == 2 else "total_"
            free = int(limit) - int(usage) + _file_bytes(_text(folder / "memory.stat"), prefix)
            found.append(MemoryLimit(int(limit), max(0, free)))
    if not found:
        return None
    return MemoryLimit(min(each.total_bytes for each in found), min(each.free_bytes for each in found))


def _file_bytes(stat: str, prefix: str) -> int:
    words = [line.split() for line in stat.splitlines()]
    names = f"{prefix}inactive_file", f"{prefix}active_file"
    return sum(int(each[1]) for each in words if len(each) == 2 and each[0] in names and each[1].isdigit())


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of this process's group and of those it is in, with their version."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each == base or base in each.parents:
                yield each, (1 if controllers else 2)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
