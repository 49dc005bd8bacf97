"""A bound in time and memory for Python code that works on what strangers wrote."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

MEMORY_MAX: Final = 512 * 2**20
"""Bytes of address space that the code may add."""


class TookTooLong(Exception):
    """Raised inside the code, wherever it was."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """In the main thread only: an interval timer interrupts the code, a limit on the address space makes
    it fail with MemoryError."""

    def on_alarm(_signal: int, _frame: FrameType | None) -> None:
        raise TookTooLong(f"it ran for more than {seconds:g} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MEMORY_MAX
    handler = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft < 0 else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
