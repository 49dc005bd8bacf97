"""Decides what happens after a task's failure: pure, with `now` passed in.

One `TaskRecord` per name of the table. A name may stand for several tasks (one bootstrap resolver per
address); then the record counts the failures of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from swarmllm.supervision.table import LongLived, Policy

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
"""A task that ran this long without a failure starts over with the shortest pause."""
ERROR_LENGTH_MAX: Final = 300

State = Literal["not started", "running", "waiting", "given up", "ended"]


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One long-lived task as `swarmllm status` shows it. `last_failed_at`: the clock of the caller, in
    seconds; None before the first failure."""

    name: str
    policy: Policy
    state: State
    n_failures: int
    n_restarts: int
    last_error: str
    last_failed_at: float | None
    meanwhile: str

    @property
    def is_down(self) -> bool:
        return self.state in ("waiting", "given up")


class Backoff:
    """The pauses of one task."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, ran_s: float) -> float:
        """After a failure that followed `ran_s` seconds of work."""
        if ran_s > STEADY_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


class TaskRecord:
    """The state of a task of the table."""

    def __init__(self, task: LongLived) -> None:
        self.task = task
        self.n_failures = 0
        self.n_restarts = 0
        self._n_running = 0
        self._n_waiting = 0
        self._was_started = False
        self._is_given_up = False
        self._last_error = ""
        self._last_failed_at: float | None = None

    def started(self) -> None:
        self._was_started = True
        self._n_running += 1

    def restarted(self) -> None:
        self._n_waiting -= 1
        self.n_restarts += 1
        self.started()

    def ended(self) -> None:
        """It returned, or was cancelled."""
        self._n_running -= 1

    def stopped_waiting(self) -> None:
        """It was cancelled before its restart."""
        self._n_waiting -= 1

    def failed(self, error: str, now: float) -> None:
        self._n_running -= 1
        self.n_failures += 1
        self._last_error = error[:ERROR_LENGTH_MAX]
        self._last_failed_at = now
        if self.task.policy == "restart":
            self._n_waiting += 1
        else:
            self._is_given_up = True

    def status(self) -> TaskStatus:
        return TaskStatus(
            name=self.task.name,
            policy=self.task.policy,
            state=self._state(),
            n_failures=self.n_failures,
            n_restarts=self.n_restarts,
            last_error=self._last_error,
            last_failed_at=self._last_failed_at,
            meanwhile=self.task.meanwhile,
        )

    def _state(self) -> State:
        if self._is_given_up:
            return "given up"
        if self._n_waiting:
            return "waiting"
        if self._n_running:
            return "running"
        return "ended" if self._was_started else "not started"
