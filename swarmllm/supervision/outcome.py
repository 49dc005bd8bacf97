"""Work that continues when the code that waits for it is cancelled.

Half a dial or half a write cancelled breaks a connection that others use; half a load leaves the pool
believing something that is not true of the worker. Such work runs in a task of its own (`detach`), and the
waiter's deadline or cancellation does not reach it. The waiter waits for the `Outcome`. Other code can also
set the outcome, where the answer comes from somewhere else: a frame on a connection, the loss of a peer.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from swarmllm.errors import DeadlineExceeded, SwarmLLMError
from swarmllm.log_filter import REQUEST_ID
from swarmllm.supervision.runner import spawn

T = TypeVar("T")


class Outcome(Generic[T]):
    """The first result counts: a value or an error. Any number of tasks may wait for it, and stop waiting."""

    def __init__(self, dropped: Callable[[T], object] | None = None) -> None:
        """`dropped(value)` takes a value that comes after `abandon`: for what must be closed."""
        self.is_over = False
        """Read for each call to a worker, where a property costs two Python functions."""
        self._over = trio.Event()
        self._value: list[T] = []
        self._error: SwarmLLMError | None = None
        self._dropped = dropped
        self._is_abandoned = False

    def succeed(self, value: T) -> None:
        if self.is_over:
            return
        self._value.append(value)
        self._end()
        if self._is_abandoned:
            self._drop()

    def fail(self, error: Exception) -> None:
        """What is not of our tree becomes an internal error: it may quote anything."""
        if self.is_over:
            return
        if not isinstance(error, SwarmLLMError):
            error = SwarmLLMError(f"internal error ({type(error).__name__})")
        self._error = error
        self._end()

    def abandon(self) -> None:
        """No task waits any more, nor will: a value that is there, or comes, is dropped."""
        self._is_abandoned = True
        self._drop()

    async def over(self) -> None:
        """Returns at the end, whatever it is."""
        await self._over.wait()

    async def wait(self) -> T:
        """The value. Raises the error."""
        await self._over.wait()
        return self.result()

    def result(self) -> T:
        """The value, once it is over. Raises the error."""
        if self._error is not None:
            # A copy, because each raise adds to an exception's traceback.
            raise copy.copy(self._error) from self._error
        return self._value[0]

    async def within(self, timeout_s: float, what: str) -> T:
        """The same; raises DeadlineExceeded, which begins with `what`, when nothing comes in time."""
        with trio.move_on_after(timeout_s):
            await self._over.wait()
        if not self.is_over:
            raise DeadlineExceeded(f"{what} within {timeout_s:g} s")
        return self.result()

    def _end(self) -> None:
        self.is_over = True
        self._over.set()

    def _drop(self) -> None:
        if self._value and self._dropped is not None:
            dropped, self._dropped = self._dropped, None
            dropped(self._value[0])


def detach(
    nursery: trio.Nursery,
    scope: str,
    work: Callable[..., Awaitable[T]],
    *args: object,
    closed: SwarmLLMError | None = None,
    dropped: Callable[[T], object] | None = None,
    outcome: Outcome[T] | None = None,
) -> Outcome[T]:
    """Start `work` in `nursery`, as `spawn` does; returns where its outcome will be. `closed`: the error
    where the nursery ends first, or has ended. `outcome`: one that `work` has too, so that it can settle it
    and clean up afterwards; `dropped` is not used then."""
    outcome = Outcome(dropped) if outcome is None else outcome
    ended = closed or SwarmLLMError("the node is stopping")
    request_id = REQUEST_ID.get()

    async def run() -> None:
        REQUEST_ID.set(request_id)  # That of who waits for it.
        try:
            outcome.succeed(await work(*args))
        except SwarmLLMError as error:
            outcome.fail(error)
        except trio.Cancelled:
            outcome.fail(ended)
            raise

    try:
        spawn(nursery, scope, run, failed=outcome.fail, name=work)
    except RuntimeError:  # The nursery is closed.
        outcome.fail(ended)
    return outcome
