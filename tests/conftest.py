"""What every test may count on, however the test run itself was started."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, settings
from trio.testing import MockClock

import swarmllm_workers  # noqa: F401  (before any test loads libllama: small_batches.py)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background of a script ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and as long for each as the machine takes: to run, and to think of.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A daemon in the test's own process sets up the log, which must not change what later tests see."""
    root, ours = logging.getLogger(), logging.getLogger("swarmllm")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    filters = {handler: handler.filters[:] for handler in handlers}
    yield
    for handler, before in filters.items():  # caplog's handler is one for the whole run
        handler.filters[:] = before
    for handler in root.handlers[:]:
        if handler not in handlers and type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture
def patient_clock(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """Jumps to the next deadline like `autojump_clock`, but not while a thread works, however long it takes:
    to trio that looks idle too."""
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
