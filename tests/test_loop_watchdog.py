"""The watchdog of the event loop: what it measures, what it says, what it leaves alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
import trio

from swarmllm import operating_system
from swarmllm.loop_watchdog import LoopWatchdog

SLOW_S = 0.02


def spin(until: Callable[[], bool]) -> None:
    """Compute without a checkpoint."""
    gives_up_at_s = time.monotonic() + 30
    while not until():
        assert time.monotonic() < gives_up_at_s


def slow_step(watchdog: LoopWatchdog) -> None:
    """Ends when the step has taken too long and the thread has looked at it."""
    began_s = time.perf_counter()
    spin(lambda: watchdog._look is not None and time.perf_counter() - began_s > 2 * SLOW_S)


async def culprit(watchdog: LoopWatchdog) -> None:
    await trio.lowlevel.checkpoint()
    slow_step(watchdog)
    await trio.lowlevel.checkpoint()


async def run_culprits(watchdog: LoopWatchdog, n: int = 1) -> None:
    with watchdog.watching():
        await trio.lowlevel.checkpoint()
        for _ in range(n):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(culprit, watchdog)


async def test_a_slow_step_is_logged_with_its_task_and_its_line(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = LoopWatchdog(SLOW_S)
    await run_culprits(watchdog)
    (record,) = [r for r in caplog.records if "loop_watchdog.culprit" in r.getMessage()]
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "task test_loop_watchdog.culprit took" in message
    assert "test_loop_watchdog.py:" in message
    assert " slow_step" in message
    assert watchdog.n_slow >= 1
    assert watchdog.longest_s > SLOW_S
    assert watchdog.latest is not None
    assert watchdog.latest.cpu_share is not None


async def test_the_same_task_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = LoopWatchdog(SLOW_S)
    await run_culprits(watchdog, 3)
    assert len([r for r in caplog.records if "loop_watchdog.culprit" in r.getMessage()]) == 1
    assert watchdog.n_slow >= 3


async def test_waiting_is_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """The time in which the loop waits for the world belongs to no task."""
    watchdog = LoopWatchdog(SLOW_S)
    with watchdog.watching():
        await trio.to_thread.run_sync(time.sleep, 5 * SLOW_S)
    waits = [r for r in caplog.records if "test_waiting_is_no_step" in r.getMessage()]
    assert not waits


async def test_a_step_is_charged_to_its_own_task_and_not_to_the_next() -> None:
    watchdog = LoopWatchdog(SLOW_S)

    async def innocent() -> None:
        for _ in range(20):
            await trio.lowlevel.checkpoint()

    with watchdog.watching():
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(innocent)
                nursery.start_soon(culprit, watchdog)
    assert watchdog.latest is not None
    assert watchdog.latest.task == "test_loop_watchdog.culprit"


def test_its_thread_looks_rarely_while_the_loop_waits() -> None:
    watchdog = LoopWatchdog(SLOW_S)
    periods_s: list[float] = []

    class Looks(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            periods_s.append(timeout)
            # The loop waits until the third look; from the fourth on there are steps.
            watchdog._waits_since_s = -1.0 if len(periods_s) < 4 else time.perf_counter()
            return len(periods_s) > 5

    watchdog._keep_looking(threading.get_ident(), Looks())
    often_s, rarely_s = periods_s[0], periods_s[1]
    assert often_s < SLOW_S < rarely_s
    assert periods_s == [often_s, *[rarely_s] * 3, often_s, often_s]


async def test_reset_forgets_the_longest_step() -> None:
    watchdog = LoopWatchdog(SLOW_S)
    await run_culprits(watchdog)
    watchdog.reset()
    assert watchdog.longest_s == 0


async def test_it_is_gone_when_its_block_is_left() -> None:
    watchdog = LoopWatchdog(SLOW_S)
    with watchdog.watching():
        await trio.lowlevel.checkpoint()
    n_slow = watchdog.n_slow
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spin_a_little)
    assert watchdog.n_slow == n_slow


async def spin_a_little() -> None:
    began_s = time.perf_counter()
    spin(lambda: time.perf_counter() - began_s > 2 * SLOW_S)


async def until_the_thread_rests(watchdog: LoopWatchdog) -> None:
    with trio.fail_after(30):
        while not watchdog._thread_rests:  # noqa: ASYNC110 (it tells nobody)
            await trio.sleep(SLOW_S)


@pytest.mark.skipif(not operating_system.IS_LINUX, reason="no such timer")
async def test_while_the_loop_waits_its_thread_sleeps_and_sees_the_slow_step_that_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watchdog = LoopWatchdog(SLOW_S)
    with watchdog.watching():
        await until_the_thread_rests(watchdog)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(culprit, watchdog)
    (record,) = [r for r in caplog.records if "loop_watchdog.culprit" in r.getMessage()]
    assert " slow_step" in record.getMessage()


@pytest.mark.skipif(not operating_system.IS_LINUX, reason="no such timer")
async def test_short_steps_do_not_wake_its_thread_up() -> None:
    watchdog = LoopWatchdog(1000.0)  # whose thread would look after 400 s
    with watchdog.watching():
        watchdog._waits_since_s = -1000.0
        watchdog._thread_rests = True
        timer = RecordedTimer()
        watchdog._timer, real = timer, watchdog._timer
        for _ in range(3):
            await trio.sleep(0.001)
        watchdog._timer = real
    assert timer.said[:4] == ["clear", "set", "clear", "set"]
    assert set(timer.said) == {"clear", "set"}


class RecordedTimer(operating_system.WakeTimer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def set(self, after_s: float) -> None:
        self.said.append("set")

    def clear(self) -> None:
        self.said.append("clear")


@pytest.mark.skipif(not operating_system.IS_LINUX, reason="no such timer")
async def test_its_thread_ends_with_its_block_also_while_it_sleeps() -> None:
    watchdog = LoopWatchdog(SLOW_S)
    with watchdog.watching():
        await until_the_thread_rests(watchdog)
    assert not [each for each in threading.enumerate() if each.name == "loop watchdog"]


async def test_a_minute_without_a_slow_step_makes_shorter_ones_count() -> None:
    watchdog = LoopWatchdog(SLOW_S)
    await run_culprits(watchdog)
    longest_s = watchdog.longest_s
    with watchdog.watching():
        for _ in range(2):
            watchdog._window_ends_s = 0.0
            await trio.sleep(0.001)
    assert watchdog.longest_s < longest_s
