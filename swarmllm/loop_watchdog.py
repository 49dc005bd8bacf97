"""Measures every step of the event loop, and names the task and the line that hold it up.

While a task runs between two checkpoints, no other task of the daemon does: a slow step delays every stream.
Trio calls `before_task_step`; a step ends where the next one begins, or where the loop begins to wait. (A
second call per step, `after_task_step`, would double the cost.) A thread looks at the main thread's stack
while a step lasts too long, because only then the line at fault is known. A call into C that keeps the
interpreter's lock hides its line from the thread; the log then says where the task waits after the step.

Cost: one clock reading per step, and ten wake-ups of the thread per second (bench/loop_watchdog.py). While
the loop has nothing to do the thread sleeps: its wake-ups were a third of what an idle daemon took. Then the
first step after a wait sets the thread's timer, and the next wait takes it back, so it ends only where steps
take too long. Where there is no such timer, the thread looks twice a second.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType

import trio

from swarmllm.operating_system import WakeTimer, wake_timer

log = logging.getLogger(__name__)

SLOW_STEP_S = 0.25
_STUCK_S = 5.0
"""A step that has lasted this long is reported before it ends."""
_WINDOW_S = 60.0
_QUIET_S = 10.0
"""Between two log lines about the same task."""
_NAMES_MAX = 64
_FRAMES_MAX = 8
_WORTH_NOTING_S = 0.001
_IDLE_PERIODS = 5
"""So much rarer are the thread's looks while the loop waits, where there is no timer. The line of a step that
follows such a wait may stay unknown where the step is over sooner."""
_PACKAGES = "site-packages"

_now_s = time.perf_counter


@dataclass(frozen=True, slots=True)
class SlowStep:
    """One step that took too long. `stack`: "file:line function", the innermost first; empty where the
    thread could not look. `cpu_share`: of the time after the look, the share in which the thread computed;
    None without a look."""

    task: str
    took_s: float
    stack: tuple[str, ...]
    cpu_share: float | None
    n_unreported: int = 0

    def __str__(self) -> str:
        where = " < ".join(self.stack) or "in a call that cannot be looked into"
        share = "" if self.cpu_share is None else f" ({self.cpu_share:.0%} of it on the CPU)"
        more = f"; {self.n_unreported} more of this task were not logged" if self.n_unreported else ""
        return f"a step of task {self.task} took {self.took_s:.3f} s{share}: {where}{more}"


@dataclass(frozen=True, slots=True)
class _Look:
    """What the thread saw of the step that began at `began_s`."""

    began_s: float
    at_s: float
    cpu_s: float
    stack: tuple[str, ...]


class LoopWatchdog(trio.abc.Instrument):
    """`watching()` installs it in the running event loop."""

    def __init__(self, slow_s: float = SLOW_STEP_S) -> None:
        self.slow_s = slow_s
        self.n_slow = 0
        """Steps that took longer than `slow_s`, since the start."""
        self.longest_ever_s = 0.0
        self.latest: SlowStep | None = None
        self._began_s = 0.0
        """Of the step that runs; 0 between steps."""
        self._waits_since_s = 0.0
        """Since the latest step, where none runs."""
        self._task: trio.lowlevel.Task | None = None
        self._noted_above_s = _WORTH_NOTING_S
        self._longest_s = self._longest_before_s = 0.0
        self._window_ends_s = _now_s() + _WINDOW_S
        self._look: _Look | None = None
        self._timer: WakeTimer | None = None
        self._thread_rests = False
        """The thread sleeps until the timer ends."""
        self._reported_at_s: dict[str, float] = {}
        self._n_unreported: dict[str, int] = {}

    @property
    def longest_s(self) -> float:
        """The longest step of the last one to two minutes, in seconds."""
        return max(self._longest_s, self._longest_before_s)

    def reset(self) -> None:
        """Forget the longest step, for a benchmark that measures one phase."""
        self._longest_s = self._longest_before_s = self.longest_ever_s = 0.0
        self._noted_above_s = _WORTH_NOTING_S

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        now_s = _now_s()
        if now_s - self._began_s > self._noted_above_s and self._began_s:
            self._note(now_s - self._began_s)
            now_s = _now_s()
        was_waiting = not self._began_s
        self._began_s = now_s
        self._task = task
        # In this order: the thread says that it rests, and then looks whether a step has begun.
        if was_waiting and self._thread_rests and self._timer is not None:
            self._timer.set(self._period_s)

    def before_io_wait(self, timeout: float) -> None:
        now_s = _now_s()
        took_s = now_s - self._began_s
        if took_s > self._noted_above_s and self._began_s:
            self._note(took_s)
            now_s = _now_s()
        self._waits_since_s = now_s
        self._began_s = 0.0
        if self._thread_rests and self._timer is not None:
            self._timer.clear()
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + _WINDOW_S
            self._longest_before_s, self._longest_s = self._longest_s, 0.0
            self._noted_above_s = _WORTH_NOTING_S

    @property
    def _period_s(self) -> float:
        """Between the thread's looks at steps."""
        return 0.4 * self.slow_s

    @contextmanager
    def watching(self) -> Iterator[LoopWatchdog]:
        """Enter it in the event loop's thread."""
        stop = threading.Event()
        thread = threading.Thread(
            target=self._keep_looking, args=(threading.get_ident(), stop), name="loop watchdog", daemon=True
        )
        with wake_timer() or nullcontext() as self._timer:
            trio.lowlevel.add_instrument(self)
            thread.start()
            try:
                yield self
            finally:
                trio.lowlevel.remove_instrument(self)
                stop.set()
                if self._timer is not None:
                    self._timer.set(0.0)
                thread.join()

    def _note(self, took_s: float) -> None:
        task = self._task
        assert task is not None
        self._longest_s = max(self._longest_s, took_s)
        self.longest_ever_s = max(self.longest_ever_s, took_s)
        self._noted_above_s = min(self._longest_s, self.slow_s)
        if took_s <= self.slow_s:
            return
        self.n_slow += 1
        look, share = self._look, None
        if look is not None:
            share = min(1.0, (time.thread_time() - look.cpu_s) / max(1e-6, _now_s() - look.at_s))
            self._look = None
        self._report(task.name, took_s, look.stack if look else _waiting_at(task), share)

    def _report(self, name: str, took_s: float, stack: tuple[str, ...], share: float | None) -> None:
        now_s = _now_s()
        is_quiet = now_s - self._reported_at_s.get(name, -_QUIET_S) < _QUIET_S
        n_unreported = 0 if is_quiet else self._n_unreported.pop(name, 0)
        self.latest = SlowStep(name, took_s, stack, share, n_unreported)
        if is_quiet:
            self._n_unreported[name] = self._n_unreported.get(name, 0) + 1
            return
        if len(self._reported_at_s) >= _NAMES_MAX:
            oldest = next(iter(self._reported_at_s))
            del self._reported_at_s[oldest]
            self._n_unreported.pop(oldest, None)
        self._reported_at_s.pop(name, None)
        self._reported_at_s[name] = now_s
        log.warning("event loop: %s", self.latest)

    def _keep_looking(self, ident: int, stop: threading.Event) -> None:
        period_s = self._period_s
        clock = time.pthread_getcpuclockid(ident)
        stuck_began_s = 0.0
        is_idle = False
        while not self._rest(stop, is_idle=is_idle):
            now_s, began_s = _now_s(), self._began_s
            is_idle = not began_s and now_s - self._waits_since_s >= period_s
            if not began_s or now_s - began_s < period_s:
                continue
            task, stack = self._task, _stack(sys._current_frames().get(ident))
            if self._began_s != began_s or task is None:
                continue  # It ended meanwhile.
            known = self._look
            if known is None or known.began_s != began_s:
                self._look = _Look(began_s, now_s, time.clock_gettime(clock), stack)
            if now_s - began_s > _STUCK_S and stuck_began_s != began_s:
                stuck_began_s = began_s
                log.warning(
                    "event loop: a step of task %s has not ended after %.1f s: %s",
                    task.name,
                    now_s - began_s,
                    " < ".join(stack),
                )

    def _rest(self, stop: threading.Event, *, is_idle: bool) -> bool:
        """The thread's wait for its next look. Returns whether it is to stop."""
        timer = self._timer
        if timer is None or not is_idle:
            return stop.wait(_IDLE_PERIODS * self._period_s if is_idle else self._period_s)
        self._thread_rests = True
        try:
            if self._began_s or stop.is_set():
                return stop.wait(self._period_s)
            timer.wait()
        finally:
            self._thread_rests = False
        return stop.is_set()


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES_MAX:
        if frame.f_globals.get("__name__") == "trio._core._run":
            break
        lines.append(_line(frame))
        frame = frame.f_back
    return tuple(lines)


def _waiting_at(task: trio.lowlevel.Task) -> tuple[str, ...]:
    """Where a task that was not looked at waits now, or ended."""
    lines = [_line(frame) for frame, _ in task.iter_await_frames()]
    return (f"afterwards at {lines[-1]}",) if lines else ()


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    if _PACKAGES in path:
        path = path.partition(f"{_PACKAGES}/")[2]
    else:
        path = "/".join(path.rsplit("/", 3)[-3:])
    return f"{path}:{frame.f_lineno} {frame.f_code.co_qualname}"
