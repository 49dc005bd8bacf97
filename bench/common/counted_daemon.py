"""A daemon that counts what wakes it up: `python -m bench.common.counted_daemon daemon --config FILE`.

It runs as `swarmllm` does with the same arguments. The first SIGUSR2 begins to count, the second one ends
that and writes COUNTS next to the configuration.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import trio

COUNTS = "counts.json"
_now_ns = time.thread_time_ns


class Owner(msgspec.Struct):
    """What one task, or one function that runs in threads, did."""

    n_woken: int = 0
    """The process slept, and this was to be done."""
    n_alone: int = 0
    """Of these, it was the only one: so often the process would have slept on without it."""
    n_steps: int = 0
    """Of a task, or calls of a function."""
    cpu_ns: int = 0


class Counts(msgspec.Struct):
    """What a process did in `seconds`."""

    seconds: float
    n_wake_ups: int
    """Of the event loop."""
    tasks: dict[str, Owner]
    functions: dict[str, Owner]
    """In trio's threads."""
    threads: dict[int, str]
    """Names by native id."""


class Counter(trio.abc.Instrument):
    """Counts steps, by the name of the task. Step times are processor time of the loop's thread."""

    def __init__(self) -> None:
        self.is_counting = False
        self.begin()

    def begin(self) -> None:
        self._began_s = time.monotonic()
        self.n_wake_ups = 0
        self.tasks: defaultdict[str, Owner] = defaultdict(Owner)
        self.functions: defaultdict[str, Owner] = defaultdict(Owner)
        self._scheduled: list[str] | None = None
        self._step_ns = 0

    def before_io_wait(self, timeout: float) -> None:
        self._note_woken()
        if timeout > 0:
            self._slept_ns = _now_ns()
            self._scheduled = []
            self.n_wake_ups += 1

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if self._scheduled is not None:
            self._scheduled.append(task.name)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._note_woken()
        self._step_ns = _now_ns()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        owner = self.tasks[task.name]
        owner.n_steps += 1
        owner.cpu_ns += _now_ns() - self._step_ns

    def _note_woken(self) -> None:
        """The first step after a sleep: all that the sleep ended for is scheduled by now."""
        names, self._scheduled = self._scheduled, None
        for name in names or ():
            self.tasks[name].n_woken += 1
            self.tasks[name].n_alone += len(names or ()) == 1

    def counts(self) -> Counts:
        threads = {each.native_id: each.name for each in threading.enumerate() if each.native_id is not None}
        return Counts(time.monotonic() - self._began_s, self.n_wake_ups, self.tasks, self.functions, threads)


def count_function(counter: Counter, function: Callable[..., Any], *args: Any) -> Any:
    """Run it and note what it took. In one of trio's threads."""
    began_ns = _now_ns()
    try:
        return function(*args)
    finally:
        name = getattr(function, "__qualname__", None) or repr(getattr(function, "func", function))
        owner = counter.functions[name]
        owner.n_steps += 1
        owner.cpu_ns += _now_ns() - began_ns


def main() -> None:
    file = Path(sys.argv[sys.argv.index("--config") + 1]).with_name(COUNTS)
    counter = Counter()
    run_sync = trio.to_thread.run_sync

    def on_signal(number: int, frame: FrameType | None) -> None:
        if counter.is_counting:
            trio.lowlevel.remove_instrument(counter)
            file.write_bytes(msgspec.json.encode(counter.counts()))
        else:
            counter.begin()
            trio.lowlevel.add_instrument(counter)
        counter.is_counting = not counter.is_counting

    async def run_sync_counted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not counter.is_counting:
            return await run_sync(function, *args, **options)
        return await run_sync(partial(count_function, counter, function), *args, **options)

    trio.to_thread.run_sync = run_sync_counted  # type: ignore[assignment]
    signal.signal(signal.SIGUSR2, on_signal)
    from swarmllm.cli.main import main as swarmllm

    swarmllm()


if __name__ == "__main__":
    main()
