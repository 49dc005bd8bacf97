"""How much memory this machine has, and how much a process of it holds."""

from __future__ import annotations

import os
from pathlib import Path

from swarmllm import operating_system


def memory_bytes() -> tuple[int, int]:
    """(total, available) of this machine, as Linux counts them; elsewhere nobody says what is available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines() if operating_system.IS_LINUX else []
    except OSError:
        lines = []
    if not lines:
        return max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024


def resident_bytes(pid: int) -> int:
    """What a process has in memory, pages that it shares with others included; 0 where it is gone or nobody
    counts."""
    if not operating_system.IS_LINUX:
        return 0
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
