"""What every test may count on, however the test run itself was started."""

from __future__ import annotations

import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import Iterator
from typing import Any

import certifi
import pytest
from hypothesis import HealthCheck, settings
from trio.testing import MockClock
from url_builders import leave_out_url_builders

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

_new_context = ssl.create_default_context
_authorities: dict[str, ssl.SSLContext] = {}


def _create_default_context(*purpose: ssl.Purpose, **of_whom: Any) -> ssl.SSLContext:
    """Each client of httpx reads the list of authorities, for a fortieth of a second of processor time, and
    many a test has several clients, none of which needs it. They share what was read once."""
    file = of_whom.get("cafile")
    if purpose or len(of_whom) > 1 or file not in (certifi.where(), os.environ.get("SSL_CERT_FILE", "")):
        return _new_context(*purpose, **of_whom)
    if file not in _authorities:
        _authorities[file] = _new_context(cafile=file)
    return _authorities[file]


ssl.create_default_context = _create_default_context


leave_out_url_builders()

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
    """Files that take long come first, then those with slow tests. Whole files are dealt out to the processes
    of a run, and none should wait at the end for another that has just begun a long one."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in long, item.path not in slow))


def pytest_collection_finish() -> None:
    """Thousands of tests, and the modules that they import, stay to the end: the garbage collector need not
    look at them again and again, which took a twentieth of the processor time of tests in this process."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """llama_cpp opens /dev/null twice when it is imported, and closes neither."""
    if utils := sys.modules.get("llama_cpp._utils"):
        utils.outnull_file.close()
        utils.errnull_file.close()


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


@pytest.fixture
def forked_demo_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemons that a benchmark starts are forks, as those of tests are."""
    from daemon_process import forked_demo_node

    monkeypatch.setattr("swarmllm.cli.demo.launch", forked_demo_node)
