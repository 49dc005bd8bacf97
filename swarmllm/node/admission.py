"""Turns for the requests of this node's own users. Event-driven: a turn that ends, however it ends, wakes the
next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarmllm.errors import Overloaded


class Admission:
    """At most `max_running` requests at a time; the next `max_queued` wait in order, for `timeout_s` at
    most.
    """

    def __init__(self, max_running: int, max_queued: int, timeout_s: float) -> None:
        self.max_running = max_running
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self._turns = trio.Semaphore(max_running, max_value=max_running)
        self.n_queued = 0

    @property
    def n_active(self) -> int:
        return self.max_running - self._turns.value

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[float]:
        """Holds one turn; yields the seconds waited for it. Raises Overloaded."""
        since_s = trio.current_time()
        await self._wait()
        try:
            yield trio.current_time() - since_s
        finally:
            self._turns.release()

    async def _wait(self) -> None:
        try:
            self._turns.acquire_nowait()
        except trio.WouldBlock:
            if self.n_queued >= self._max_queued:
                raise Overloaded(f"This node is busy and {self.n_queued} requests wait already.") from None
        else:
            return
        self.n_queued += 1
        try:
            with trio.fail_after(self._timeout_s):
                await self._turns.acquire()
        except trio.TooSlowError:
            raise Overloaded(f"This node was busy for {self._timeout_s:g} s; try again later.") from None
        finally:
            self.n_queued -= 1
