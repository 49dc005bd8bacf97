"""One timer for the keepalives of all data connections of a node.

A timer for each connection would cost more than the looks themselves: trio ends a sleep by a cancellation,
which takes some 0.1 ms with what follows. One task wakes up here and looks at all connections at the same
time, so their pings leave, and the answers come, together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import trio

from swarmllm.supervision.runner import contained
from swarmllm.swarm.data.keepalive import CHECK_S


class Timed(Protocol):
    def look(self, now: float, check_at_s: float) -> float:
        """Do what is due. Returns when to look again: at `check_at_s`, if not before."""
        ...

    def end(self, how: str) -> None: ...


class ConnectionTimer:
    def __init__(self) -> None:
        self.is_working: Callable[[], bool] = lambda: False
        """Whether requests run on this node: then no connection rests (see `keepalive`)."""
        self._due_s: dict[Timed, float] = {}
        """When each is to be looked at."""
        self._added = trio.Event()

    @contextmanager
    def looking_at(self, connection: Timed) -> Iterator[None]:
        self._due_s[connection] = -math.inf
        self._added.set()
        try:
            yield
        finally:
            del self._due_s[connection]

    def wake(self, connection: Timed) -> None:
        """It is to be looked at now, because it is used, and all others soon: what it brings may be work."""
        if connection in self._due_s:
            soon_s = trio.current_time() + CHECK_S
            for each, due_s in self._due_s.items():
                self._due_s[each] = min(due_s, soon_s)
            self._due_s[connection] = -math.inf
            self._added.set()

    async def run(self) -> NoReturn:
        check_at_s = -math.inf
        while True:
            self._added = trio.Event()
            now = trio.current_time()
            if now >= check_at_s:
                check_at_s = now + CHECK_S
            wake_at_s = math.inf
            for connection, due_s in list(self._due_s.items()):
                if now >= due_s:
                    # Of a hundred at rest only those are looked at that are due.
                    self._due_s[connection] = due_s = _look(connection, now, check_at_s)
                wake_at_s = min(wake_at_s, due_s)
            with trio.move_on_at(wake_at_s):
                await self._added.wait()


def _look(connection: Timed, now: float, check_at_s: float) -> float:
    """An error ends the connection that it is of, and no other."""

    def failed(_: Exception) -> None:
        connection.end("an error here; see its log")

    with contained("connection", "its timer", failed):
        return connection.look(now, check_at_s)
    return check_at_s
