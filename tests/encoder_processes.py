"""A pool of workers whose processes that encode pictures can be told."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kernel_timings import KERNEL_TIMINGS

from swarmllm.workerpool import WorkerPool, WorkerSettings


@asynccontextmanager
async def pool_in(folder: Path) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(
        WorkerSettings(
            cache_dir=folder / "cache",
            kernel_timings=KERNEL_TIMINGS,
        ),
        folder / "run",
    )
    async with pool.running():
        yield pool


def children() -> list[int]:
    """Process ids of workers that encode pictures, of this process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = status.with_name("cmdline").read_bytes()
        except (OSError, IndexError, ValueError):
            continue
        if parent == os.getpid() and b"--pictures" in command:
            found.append(int(status.parent.name))
    return found
