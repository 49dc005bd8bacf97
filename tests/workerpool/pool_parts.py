"""What the tests of the pool share: a pool over fake or real workers, and a look at the process table."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from deadlines import DEADLINE_S
from kernel_timings import KERNEL_TIMINGS

from swarmllm.models.layers import LayerRange
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
MODEL = ModelFile("ab" * 32, Path("/nowhere/fake.gguf"))
OTHER_MODEL = ModelFile("cd" * 32, Path("/nowhere/other.gguf"))
BROKEN_MODEL = ModelFile("ef" * 32, Path("/nowhere/broken.gguf"))
ROWS = np.arange(24, dtype=np.float32).reshape(3, 8)
CALL_TIMEOUT_S = 1.0
"""Short, and yet more than a worker that answers at once takes on a busy machine."""


@asynccontextmanager
async def fake_pool(
    folder: Path, habit: str = "", *, on_change: Any = None, **settings: Any
) -> AsyncIterator[WorkerPool]:
    """A pool of fake workers; at the end none of their processes is left."""
    command = [sys.executable, str(FAKE_WORKER), *([habit] if habit else [])]
    settings = {"start_timeout_s": DEADLINE_S, "stop_timeout_s": 5.0, **settings}
    pool = WorkerPool(
        WorkerSettings(cache_dir=folder / "cache", kernel_timings=KERNEL_TIMINGS, **settings),
        folder / "run",
        command=command,
        on_change=on_change,
    )
    seen: set[int] = set()
    async with pool.running():
        yield pool
        seen = set(pids(pool))
    assert not [pid for pid in seen if process_exists(pid)]
    assert list((folder / "run").iterdir()) == []


async def forward(pool: WorkerPool, order: str = "r", *, position: int = 0) -> np.ndarray:
    result = await pool.forward(
        MODEL, request_id=order, layers=LayerRange(0, 4), position=position, tensor=ROWS, want="hidden"
    )
    assert result.tensor is not None
    return result.tensor


def pids(pool: WorkerPool) -> list[int]:
    return [each.pid for each in pool.statistics() if each.pid is not None]


def process_exists(pid: int) -> bool:
    """Zombies count: they have not been reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
