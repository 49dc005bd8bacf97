"""Measures the memory of this machine, or of the part of it that is this process's."""

from __future__ import annotations

import os
from pathlib import Path

from swarmllm import control_group, operating_system


def memory_bytes() -> tuple[int, int]:
    """(total, available) of this machine, as Linux counts them, or of this process's control group if that
    has less; elsewhere nobody says what is available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines() if operating_system.IS_LINUX else []
    except OSError:
        lines = []
    if not lines:
        return max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total_bytes, available_bytes = kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024
    limit = control_group.memory()
    if limit is None:
        return total_bytes, available_bytes
    return min(total_bytes, limit.total_bytes), min(available_bytes, limit.free_bytes)
