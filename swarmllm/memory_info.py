"""Measures the memory of this machine."""

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
