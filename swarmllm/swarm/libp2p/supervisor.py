"""Keeps libp2p running under a router that does not stop when libp2p does.

The library is a large body of young code; some day an exception will get past every guard and end its host.
Only what runs on it ends then: connections of the control plane, gossip, requests under way. The data plane
is ours, and so are its connections and the pipelines on them; peers wait ten seconds for a neighbour that
libp2p has lost while its data connection lives (see liveness.py), and a new host on the same port, with the
same key, is up in well under one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import trio

from swarmllm.errors import ConfigError

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0
"""Who ran this long without a crash starts over with the shortest pause."""

Running = Callable[[], AbstractAsyncContextManager[object]]
"""One life of libp2p: entered when it is up, left when it is down; raises what ended it."""


class Supervisor:
    def __init__(self, running: Running) -> None:
        self._running = running
        self.n_restarts = 0

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; started when it is up for the first time. Raises what keeps it from that."""
        is_first = True
        pause_s = _FIRST_PAUSE_S
        while True:
            up_at_s = trio.current_time()
            try:
                async with self._running():
                    if is_first:
                        is_first = False
                        task_status.started()
                    up_at_s = trio.current_time()
                    await trio.sleep_forever()
            except Exception as error:
                if is_first:
                    raise
                log.error(  # noqa: TRY400 (the names say enough; the library's traces are long)
                    "libp2p has failed and is started again: %s",
                    _names(error),
                    exc_info=log.isEnabledFor(logging.DEBUG),
                )
            else:
                log.error("libp2p has ended and is started again")
            if trio.current_time() - up_at_s > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.n_restarts += 1


def _names(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(_names(each) for each in error.exceptions)
    return str(error) if isinstance(error, ConfigError) else type(error).__name__
