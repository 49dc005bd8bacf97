"""Reads the processor time and memory of a process, as Linux counts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from swarmllm import operating_system


@dataclass(frozen=True, slots=True)
class ProcessUse:
    cpu_s: float
    """Of all its threads, in user and kernel mode."""
    resident_bytes: int
    """What it has in memory, pages that it shares with others included."""
    n_files: int
    """Open files, sockets and pipes."""


def process_use(pid: int) -> ProcessUse | None:
    """None where it is gone, belongs to somebody else, or nobody counts."""
    if not operating_system.IS_LINUX:
        return None
    process = Path(f"/proc/{pid}")
    try:
        # The name of the program may hold anything, but no closing bracket comes after it.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        n_files = sum(1 for _ in (process / "fd").iterdir())
        ticks = int(fields[11]) + int(fields[12])
        pages = int(fields[21])
    except (OSError, IndexError, ValueError):
        return None
    return ProcessUse(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"), n_files)


def resident_bytes(pid: int) -> int:
    """0 where nobody says."""
    use = process_use(pid)
    return 0 if use is None else use.resident_bytes
