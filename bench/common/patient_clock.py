"""A mock clock that jumps to the next deadline when all tasks wait, but not while a thread works.

To trio a task that waits for a thread looks idle too, and `autojump_clock` would let its deadlines pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from trio.testing import MockClock


@contextmanager
def patient_clock() -> Iterator[MockClock]:
    """For `trio.run(..., clock=...)` inside the block. Replaces `trio.to_thread.run_sync` there."""
    clock = MockClock(autojump_threshold=0.0)
    run_in_thread, n_working = trio.to_thread.run_sync, 0

    async def stand_still(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal n_working
        n_working += 1
        clock.autojump_threshold = math.inf
        try:
            return await run_in_thread(function, *arguments, **options)
        finally:
            n_working -= 1
            if not n_working:
                clock.autojump_threshold = 0.0

    trio.to_thread.run_sync = stand_still
    try:
        yield clock
    finally:
        trio.to_thread.run_sync = run_in_thread
