"""How much memory this machine has."""

from __future__ import annotations

from pathlib import Path


def memory_bytes() -> tuple[int, int]:
    """(total, available) of this machine, as Linux counts them; zeros elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024
