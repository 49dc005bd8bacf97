"""How fast this machine reads memory and multiplies: a guess for layers that have never run here.

One second, once: the result stays in the data folder. What else runs at that moment must not be in it, or a
node would look slow for ever and never be asked to prove otherwise; so one thread works, and the time that
counts is what the processor gave to it. Both figures are a lower bound of what libllama reaches; the route
scales estimates by how far those of observed nodes were off, so only their ratio between machines matters.
"""

from __future__ import annotations

import contextlib
import os
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
PRODUCT_SIZE = 64
"""BLAS gives no threads to products as small as this; threads that wait for each other on busy cores have
made a machine look seventy times slower than it is."""
N_PRODUCTS = 64
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
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _memory_bytes_per_s() -> float:
    words = np.ones(SUM_BYTES // 8, np.int64)
    return words.nbytes / _best_s(lambda: int(words.sum()), MEMORY_BUDGET_S)


def _flops() -> float:
    matrices = np.ones((N_PRODUCTS, PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    product_s = _best_s(lambda: float((matrices @ matrices)[0, 0, 0]), FLOPS_BUDGET_S) / N_PRODUCTS
    return len(os.sched_getaffinity(0)) * 2 * PRODUCT_SIZE**3 / product_s


def _best_s(work: Callable[[], object], budget_s: float) -> float:
    """The quickest of as many runs as fit the budget, in processor time: what disturbs only ever makes it
    slower."""
    best_s = float("inf")
    end_s = time.perf_counter() + budget_s
    n_runs = 0
    while True:
        n_runs += 1
        began_s = time.thread_time()
        work()
        best_s = min(best_s, time.thread_time() - began_s)
        if time.perf_counter() >= end_s and n_runs >= MIN_RUNS:
            return max(best_s, 1e-9)
