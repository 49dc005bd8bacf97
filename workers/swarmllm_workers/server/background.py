"""Threads beside the one that decodes: they run the long parts of operations (`engine/operation.py`).

The decode thread owns contexts, KV, sockets and all that is known of requests. A thread here owns nothing: it
is given one part at a time and hands the result back through a `ThreadInbox`, which wakes the decode
thread's `poll`. So an operation's own code, and whatever it tells the daemon, runs between two decode steps.

A thread takes up one operation after the other, in the order in which they were begun: each finds what the
one before it left.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from swarmllm_workers import operating_system
from swarmllm_workers.engine.operation import Operation, complete
from swarmllm_workers.errors import Stopped

log = logging.getLogger(__name__)

STOP_S: Final = 1.0
"""How long the end of the process waits for a part to notice that it is no longer wanted."""

Fail = Callable[[Exception], None]


class Place(Protocol):
    """Runs the long parts of operations."""

    def begin(self, operation: Operation[None], fail: Fail, n_bytes: int = 0) -> None:
        """Run an operation after those that were begun before. `fail` is called with the exception that it
        raises. `n_bytes`: the bytes that it holds or will answer with."""

    def tell(self, call: Callable[[], None]) -> None:
        """Called by a part: have the decode thread call this. Raises Stopped if the process is ending."""

    @property
    def n_waiting(self) -> int:
        """The number of operations that have not ended."""

    @property
    def n_bytes_waiting(self) -> int:
        """The bytes that these operations hold or will answer with."""


class InPlace:
    """Runs operations at once, in the calling thread, where nothing decodes beside them."""

    n_waiting = n_bytes_waiting = 0

    def begin(self, operation: Operation[None], fail: Fail, n_bytes: int = 0) -> None:
        try:
            complete(operation)
        except Exception as error:
            fail(error)

    def tell(self, call: Callable[[], None]) -> None:
        call()


class ThreadInbox:
    """Calls from other threads for the decode thread, in order. `descriptor` is readable while there are
    any."""

    def __init__(self) -> None:
        self._wakeup = operating_system.Wakeup()
        self.descriptor = self._wakeup.descriptor
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        self._wakeup.set()

    def run(self) -> None:
        self._wakeup.clear()
        for _ in range(self._calls.qsize()):
            self._calls.get_nowait()()

    def close(self) -> None:
        self._wakeup.close()


class BackgroundThread:
    """A thread that runs the parts of one operation at a time."""

    def __init__(
        self, name: str, inbox: ThreadInbox, *, cores: Collection[int] = (), niceness: int = 0
    ) -> None:
        """`cores`: where it may run; a thread inherits the one core that libgomp keeps its starter to.
        `niceness`: how much the decode steps come first."""
        self._inbox = inbox
        self._cores = cores
        self._niceness = niceness
        self._parts: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._waiting: deque[tuple[Operation[None], Fail, int]] = deque()
        """Operations that are not over; the first one is under way."""
        self.n_bytes_waiting = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<BackgroundThread {self._thread.name} waiting={len(self._waiting)}>"

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def begin(self, operation: Operation[None], fail: Fail, n_bytes: int = 0) -> None:
        self._waiting.append((operation, fail, n_bytes))
        self.n_bytes_waiting += n_bytes
        if len(self._waiting) == 1:
            self._resume(operation.send, None)

    def tell(self, call: Callable[[], None]) -> None:
        if self._is_stopping:
            raise Stopped
        self._inbox.put(call)

    def stop(self) -> None:
        """End the thread: no further part begins, and a part that reports progress ends there."""
        self._is_stopping = True
        self._parts.put(None)
        self._thread.join(STOP_S)

    def _resume(self, resume: Callable[[Any], Callable[[], Any]], value: Any) -> None:
        """Go on with the first operation up to its next part, or with the next operation."""
        while True:
            _, fail, n_bytes = self._waiting[0]
            try:
                self._parts.put(resume(value))
                return
            except StopIteration:
                pass
            except Exception as error:
                fail(error)
            self._waiting.popleft()
            self.n_bytes_waiting -= n_bytes
            if not self._waiting:
                return
            resume, value = self._waiting[0][0].send, None

    def _work(self) -> None:
        operating_system.settle_thread(self._cores, self._niceness)
        while (part := self._parts.get()) is not None and not self._is_stopping:
            self._inbox.put(self._run(part))
            del part

    def _run(self, part: Callable[[], Any]) -> Callable[[], None]:
        """How the decode thread goes on."""
        operation = self._waiting[0][0]
        try:
            result = part()
        except Exception as error:
            failure = error
            return lambda: self._resume(operation.throw, failure)
        return lambda: self._resume(operation.send, result)
