"""What every test may count on, however the test run itself was started."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from trio.testing import MockClock

import swarmllm_workers  # noqa: F401  (before any test loads libllama: small_batches.py)
from bench.common.patient_clock import patient_clock
from swarmllm.operating_system import n_cores
from swarmllm_workers.__main__ import openmp_settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background of a script ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As a worker does before it loads libllama: where several tests compute with two threads each, a thread that
# waits for another one by spinning keeps it from the core that it needs, and a test took ten times as long.
os.environ.update(openmp_settings(0, os.environ))

# The same examples in every run, and as long for each as the machine takes: to run, and to think of.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one more than there are cores, as tests wait for other processes and for timers."""
    return n_cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first. Whole files are dealt out to the processes of a run, and none should
    wait at the end for another that has just begun a long one."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Thousands of tests, and the modules that they import, stay to the end: the garbage collector need not
    look at them again and again, which took a twentieth of the processor time of tests in this process."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(name="patient_clock")
def clock_that_waits_for_threads() -> Iterator[MockClock]:
    with patient_clock() as clock:
        yield clock
