"""Shared by the pipeline's tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock


@pytest.fixture
def patient_clock(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """Jumps to the next deadline like `autojump_clock`, but not while a thread works, however long it takes:
    to trio that looks idle too, and a stage looks its model up in a thread."""
    clock = MockClock(autojump_threshold=0.0)
    run_in_thread = trio.to_thread.run_sync
    n_working = 0

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

    monkeypatch.setattr(trio.to_thread, "run_sync", stand_still)
    return clock
