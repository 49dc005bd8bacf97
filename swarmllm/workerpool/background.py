"""Work that goes on when those who wait for it leave.

Starting a worker, loading layers and cancelling a request change what is true of the worker; a caller who
is cancelled in the middle must not leave the pool believing something else. Such work runs in the pool's
nursery, and callers wait for its outcome.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from swarmllm.errors import SwarmLLMError, WorkerDied

T = TypeVar("T")


class Background(Generic[T]):
    def __init__(self, nursery: trio.Nursery, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._finished = trio.Event()
        self._value: list[T] = []
        self._error: Exception = WorkerDied("the worker pool was closed")
        try:
            nursery.start_soon(self._run)
        except RuntimeError:
            # The nursery is closed: the pool has ended, and the error says so.
            self._finished.set()

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    async def finish(self) -> None:
        """Wait for the end, however it came out."""
        await self._finished.wait()

    async def wait(self) -> T:
        """The outcome, or the error; any number of tasks may wait, and leave."""
        await self._finished.wait()
        if self._value:
            return self._value[0]
        if isinstance(self._error, SwarmLLMError):
            # A copy, because each raise adds to an exception's traceback.
            raise copy.copy(self._error) from self._error
        raise self._error

    async def _run(self) -> None:
        try:
            self._value.append(await self._work())
        except Exception as error:
            self._error = error
        finally:
            self._finished.set()
