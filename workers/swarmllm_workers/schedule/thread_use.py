"""Sets how many threads compute, where other workers on this machine are at work too.

A worker says when it begins to compute and when it has rested for a while (AtWork), and the daemon shares the
threads out among those at work (UseThreads). With fewer threads than cores none may be kept to one core
each, as libgomp is told when a worker has all of them: every worker would keep to the same first ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from swarmllm_proto import ipc
from swarmllm_workers import operating_system
from swarmllm_workers.engine.libllama import Threads

REST_S: Final = 0.2
"""Without a step for so long, a worker rests. Between two tokens of a chain over distance it does not."""


class ThreadUse:
    def __init__(
        self,
        send: Callable[[ipc.AtWork], None],
        cores: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cores`: on which this process could run before libgomp was loaded; (): its threads are left where
        they are."""
        self.threads = Threads(1)
        """What contexts compute with."""
        self._configured = 1
        self._send = send
        self._cores = cores
        self._clock = clock
        self._pinned = operating_system.PinnedThreads()
        self._is_at_work = False
        self._stepped_s = 0.0
        self._is_settled = True

    @property
    def has_spare_core(self) -> bool:
        return self.threads.n < len(operating_system.cores() if not self._cores else self._cores)

    def configure(self, n_threads: int) -> None:
        """Set the number of threads for when no other worker is at work."""
        self.threads.n = self._configured = n_threads

    def use(self, n_threads: int) -> None:
        """Use so many threads from the next step on, but never more than configured."""
        self.threads.n = min(n_threads, self._configured)
        self._is_settled = False

    def begins(self) -> None:
        """Call before a step: tells the daemon at once that this worker computes."""
        if not self._is_at_work:
            self._is_at_work = True
            self._send(ipc.AtWork(is_at_work=True))

    def stepped(self) -> None:
        """Call after each step."""
        if not self._is_at_work:
            self.begins()
        self._stepped_s = self._clock()
        if not self._is_settled:
            # Threads that the step has started are there now.
            self._is_settled = True
            if self.threads.n < self._configured:
                self._pinned.let_move(self._cores)
            else:
                self._pinned.keep_again()

    def pause_ms(self) -> int | None:
        """Call when there is no step to run. The milliseconds until it is to be called again; None: there is
        nothing to report."""
        if not self._is_at_work:
            return None
        left_s = self._stepped_s + REST_S - self._clock()
        if left_s > 0:
            return int(left_s * 1000) + 1
        self._is_at_work = False
        self._send(ipc.AtWork(is_at_work=False))
        return None
