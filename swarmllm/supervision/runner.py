"""Starts the daemon's tasks: the driver around `policy.py`.

`supervise` starts a task that lives as long as the daemon; the table says what its failure means. `spawn`
starts a task of a request, a peer, a connection or a download; `contained` is the same for a block of code.
Neither swallows a cancellation: from a group that holds both, the failure is handled and the cancellation
goes on.

What happened is kept by the `Supervision` of the running daemon. It is found through a context variable,
which a task inherits from the task that starts it, so that packages need not pass it to each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import trio

from swarmllm.errors import ConfigError, SwarmLLMError
from swarmllm.log_filter import REQUEST_ID
from swarmllm.log_limit import LogLimit, Rate
from swarmllm.supervision.policy import Backoff, TaskRecord, TaskStatus
from swarmllm.supervision.table import BY_NAME, OUTLIVING, SCOPE_NAMES, SCOPES, TASKS

if TYPE_CHECKING:
    from trio_typing import TaskStatus as Started

log = logging.getLogger("swarmllm.supervision")

SCOPE_LOG_RATE: Final = Rate(burst=1, per_s=1 / 60)
"""Of one cause: the scope, the code and the kind of exception."""
_CAUSES_MAX = 256

Work = Callable[..., Awaitable[object]]
Failed = Callable[[Exception], object]


class EssentialTaskFailed(SwarmLLMError):
    """The daemon cannot run without this task."""

    code = "essential_task_failed"


class Supervision:
    """The tasks of one daemon: what runs, what failed and how often."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._records = {task.name: TaskRecord(task) for task in TASKS}
        self._n_scope_failures = dict.fromkeys((scope.name for scope in SCOPES), 0)
        self._log_limit = LogLimit(own=SCOPE_LOG_RATE, keys_max=_CAUSES_MAX)
        self._attempts: dict[str, list[_Attempt]] = {}
        self._faults: dict[str, tuple[str, Exception]] = {}

    @contextmanager
    def active(self) -> Iterator[Supervision]:
        """Tasks that are started inside the block, and by those tasks, are of this daemon."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def statuses(self) -> tuple[TaskStatus, ...]:
        """In the order of the table."""
        return tuple(record.status() for record in self._records.values())

    def status(self, name: str) -> TaskStatus:
        return self._records[name].status()

    def scope_failures(self) -> dict[str, int]:
        """By scope: unexpected exceptions since the start."""
        return dict(self._n_scope_failures)

    def fail(self, name: str, error: Exception) -> None:
        """For tests: the running tasks of this name fail with `error` at their next checkpoint."""
        for attempt in list(self._attempts.get(name, ())):
            attempt.fail(error)

    def fail_next(self, of: str, error: Exception, what: str = "") -> None:
        """For tests: the next task of this name or scope, whose function's name contains `what`, fails with
        `error` as it starts."""
        assert of in SCOPE_NAMES or of in BY_NAME
        self._faults[of] = what, error

    async def run(
        self, name: str, work: Work, args: tuple[object, ...], started: Started[Any] | None = None
    ) -> None:
        """Drive a task of the table until it returns, is cancelled or is given up."""
        record, backoff = self._records[name], Backoff()
        record.started()
        is_up = started is None
        while True:
            began_s = trio.current_time()
            attempt = _Attempt(self._attempts.setdefault(name, []))
            try:
                if (fault := self.injected(name, _name(work))) is not None:
                    raise fault
                if started is None:
                    await attempt.run(work, args, {})
                else:
                    known = _Known(started) if not is_up else trio.TASK_STATUS_IGNORED
                    try:
                        await attempt.run(work, args, {"task_status": known})
                    finally:
                        is_up = is_up or (isinstance(known, _Known) and known.is_up)
            except BaseException as error:
                failure, rest = _split(error)
                if rest is not None:
                    record.ended()
                    raise
                assert failure is not None, "what is no failure must go on"
                record.failed(_words(failure), self._clock())
                if not is_up:
                    raise  # It never began: its caller learns why.
                if isinstance(_only(failure), ConfigError) and record.task.policy != "restart":
                    raise _only(failure) from failure
                if record.task.policy == "essential":
                    raise EssentialTaskFailed(
                        f"The task {name!r} failed, and the node cannot run without it: {_words(failure)}"
                    ) from failure
                if record.task.policy == "give up":
                    self._tell_given_up(record, failure)
                    return
                pause_s = backoff.pause_s(trio.current_time() - began_s)
                self._tell_restart(record, failure, pause_s)
                try:
                    await trio.sleep(pause_s)
                except BaseException:
                    record.stopped_waiting()
                    raise
                record.restarted()
            else:
                record.ended()
                return

    def scope_failed(self, scope: str, what: str, error: Exception) -> None:
        """Count and log an unexpected exception of a short-lived task."""
        self._n_scope_failures[scope] += 1
        leaf = _only(error)
        n_left_out = self._log_limit.admit((scope, what, type(leaf).__name__), self._now(), is_provoked=False)
        if n_left_out is None:
            return
        more = f" ({n_left_out} more were not logged)" if n_left_out else ""
        if isinstance(leaf, SwarmLLMError | OSError):
            log.warning("%s of a %s failed: %s%s", what, scope, _words(error), more)
        else:
            log.error("%s of a %s failed: %s%s", what, scope, _words(error), more, exc_info=error)

    def injected(self, of: str, what: str) -> Exception | None:
        if of in self._faults and self._faults[of][0] in what:
            return self._faults.pop(of)[1]
        return None

    def _tell_given_up(self, record: TaskRecord, failure: Exception) -> None:
        log.error(
            "task %s failed and is not started again; %s: %s",
            record.task.name,
            record.task.meanwhile,
            _words(failure),
            exc_info=_trace(failure),
        )

    def _tell_restart(self, record: TaskRecord, failure: Exception, pause_s: float) -> None:
        log.error(
            "task %s failed (%d times now) and is started again in %.1f s; meanwhile %s: %s",
            record.task.name,
            record.n_failures,
            pause_s,
            record.task.meanwhile,
            _words(failure),
            exc_info=_trace(failure) if record.n_failures == 1 else None,
        )

    def _now(self) -> float:
        return time.monotonic()


class _Attempt:
    """One life of a long-lived task."""

    def __init__(self, among: list[_Attempt]) -> None:
        self._among = among
        self._scope = trio.CancelScope()
        self._fault: Exception | None = None

    def fail(self, error: Exception) -> None:
        self._fault = error
        self._scope.cancel()

    async def run(self, work: Work, args: tuple[object, ...], keywords: dict[str, Any]) -> None:
        self._among.append(self)
        try:
            with self._scope:
                await work(*args, **keywords)
        finally:
            self._among.remove(self)
        if self._fault is not None and self._scope.cancelled_caught:
            raise self._fault


class _Known:
    """A TaskStatus that remembers whether it was reported."""

    def __init__(self, started: Started[Any]) -> None:
        self._started = started
        self.is_up = False

    def started(self, value: object = None) -> None:
        self.is_up = True
        self._started.started(value)


_default = Supervision()
_current: ContextVar[Supervision | None] = ContextVar("supervision", default=None)


def current() -> Supervision:
    """That of the daemon which this task belongs to."""
    return _current.get() or _default


def supervise(nursery: trio.Nursery, name: str, work: Work, *args: object) -> None:
    """Start the task `name` of the table in `nursery`."""
    if name not in BY_NAME:
        raise LookupError(f"{name!r} is not in the table of long-lived tasks")
    nursery.start_soon(current().run, name, work, args, name=f"{name}: {_name(work)}")


async def supervise_started(nursery: trio.Nursery, name: str, work: Work, *args: object) -> None:
    """The same for work that takes `task_status`: returns when it has begun for the first time. Raises what
    keeps it from beginning."""
    if name not in BY_NAME:
        raise LookupError(f"{name!r} is not in the table of long-lived tasks")
    supervision = current()

    async def run(*, task_status: Started[Any]) -> None:
        await supervision.run(name, work, args, task_status)

    await nursery.start(run, name=f"{name}: {_name(work)}")


def spawn(
    nursery: trio.Nursery,
    scope: str,
    work: Work,
    *args: object,
    failed: Failed | None = None,
    name: Work | None = None,
) -> None:
    """Start a short-lived task in `nursery`. Where it raises an Exception, `failed` is called with it, to end
    what the task belongs to. `name`: the function that the log shall name, where it is not `work`."""
    if scope not in SCOPE_NAMES:
        raise LookupError(f"{scope!r} is not in the table of scopes")
    what = _name(name or work)
    nursery.start_soon(_run_contained, current(), scope, what, work, args, failed, name=what)


async def _run_contained(
    supervision: Supervision,
    scope: str,
    what: str,
    work: Work,
    args: tuple[object, ...],
    failed: Failed | None,
) -> None:
    if scope in OUTLIVING:
        REQUEST_ID.set("")
    with contained(scope, what, failed, supervision):
        if (fault := supervision.injected(scope, what)) is not None:
            raise fault
        await work(*args)


@contextmanager
def contained(
    scope: str, what: str, failed: Failed | None = None, supervision: Supervision | None = None
) -> Iterator[None]:
    """No Exception leaves the block. `what` names the code in the log; it comes from the program, never from
    outside."""
    try:
        yield
    except BaseException as error:
        failure, rest = _split(error)
        if failure is None:
            raise
        (supervision or current()).scope_failed(scope, what, failure)
        if failed is not None:
            try:
                failed(failure)
            except Exception as second:
                (supervision or current()).scope_failed(scope, f"the end of {what}", second)
        if rest is not None:
            raise rest from None


def _split(error: BaseException) -> tuple[Exception | None, BaseException | None]:
    """(what failed, what must go on: cancellation, KeyboardInterrupt ...)"""
    if isinstance(error, Exception):
        return error, None
    if not isinstance(error, BaseExceptionGroup):
        return None, error
    failed, rest = error.split(Exception)
    if failed is None:
        return None, error
    assert isinstance(failed, ExceptionGroup)
    return failed, rest


def _only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _words(error: BaseException) -> str:
    error = _only(error)
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_words(each) for each in error.exceptions)
    if isinstance(error, SwarmLLMError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _trace(error: Exception) -> Exception | None:
    """The exception, where its trace tells more than its words."""
    return None if isinstance(_only(error), SwarmLLMError | OSError) else error


def _name(work: Work) -> str:
    function = getattr(work, "func", work)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(work).__name__)}"
