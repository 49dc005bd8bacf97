"""How fast this machine reads memory and multiplies: a guess for layers that have never run here.

One second, once: the result stays in the data folder, because a probe at every start would measure what
else is starting. Both figures are a lower bound of what libllama reaches (one thread sums; the product uses
what numpy's BLAS takes); the route scales estimates by how far those of observed nodes were off, so only
their ratio between machines matters.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from swarmllm.scheduling.observation import MachineSpeed

MEMORY_BUDGET_S = 0.75
"""Decode is bound by it, and it wavers more than arithmetic does."""
FLOPS_BUDGET_S = 0.25
MIN_RUNS = 5
"""However long they take: the first one meets cold caches and threads that are still starting."""
SUM_BYTES = 64 * 2**20
"""More than the caches of most machines."""
PRODUCT_SIZE = 384
FILE_MAX_BYTES = 4096


class _Measured(msgspec.Struct, frozen=True):
    memory_bytes_per_s: Annotated[float, Meta(gt=0, le=1e15)]
    flops: Annotated[float, Meta(gt=0, le=1e18)]


def machine_speed(file: Path) -> MachineSpeed:
    """What `file` says, else measured now and written there. Blocks for a second; never raises for
    the file: what cannot be kept is measured again next time."""
    measured = _read(file)
    if measured is None:
        measured = _Measured(_memory_bytes_per_s(), _flops())
        with contextlib.suppress(OSError):
            file.write_bytes(msgspec.json.encode(measured) + b"\n")
    return MachineSpeed(measured.memory_bytes_per_s, measured.flops)


def _read(file: Path) -> _Measured | None:
    try:
        with file.open("rb") as stream:
            return msgspec.json.decode(stream.read(FILE_MAX_BYTES), type=_Measured)
    except (OSError, msgspec.MsgspecError):
        return None


def _memory_bytes_per_s() -> float:
    words = np.ones(SUM_BYTES // 8, np.int64)
    return words.nbytes / _best_s(lambda: int(words.sum()), MEMORY_BUDGET_S)


def _flops() -> float:
    matrix = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    return 2 * PRODUCT_SIZE**3 / _best_s(lambda: float((matrix @ matrix)[0, 0]), FLOPS_BUDGET_S)


def _best_s(work: Callable[[], object], budget_s: float) -> float:
    """The quickest of as many runs as fit the budget: what disturbs only ever makes it slower."""
    best_s = float("inf")
    end_s = time.perf_counter() + budget_s
    n_runs = 0
    while True:
        n_runs += 1
        began_s = time.perf_counter()
        work()
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - began_s)
        if now_s >= end_s and n_runs >= MIN_RUNS:
            return max(best_s, 1e-9)
