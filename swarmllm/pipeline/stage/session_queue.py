"""The queue of one request's session: bounded for what other nodes send, apart from what this node puts in.

A sender that overruns its part breaks the protocol. What this node's own worker and the origin's side put in
is limited by the tokens asked for, comes in bursts when the processor is busy, and is nobody's fault.
"""

from __future__ import annotations

from typing import Final

import trio

from swarmllm.pipeline.stage.arrivals import Item

SPARE_JOBS: Final = 8
"""Room beyond the window: repeats and credits."""
OWN_MAX: Final = 4096


class SessionQueue:
    def __init__(self, n_stages: int) -> None:
        self._foreign_max = 2 * (n_stages + 1) + SPARE_JOBS
        self._n_foreign = 0
        self._entrance, self._exit = trio.open_memory_channel[tuple[Item, bool]](OWN_MAX + self._foreign_max)

    def put(self, item: Item, *, is_foreign: bool) -> bool:
        """False: there is no room for it."""
        if is_foreign and self._n_foreign >= self._foreign_max:
            return False
        try:
            self._entrance.send_nowait((item, is_foreign))
        except trio.WouldBlock:
            return False
        self._n_foreign += is_foreign
        return True

    async def get(self) -> Item:
        item, is_foreign = await self._exit.receive()
        self._n_foreign -= is_foreign
        return item

    @property
    def is_empty(self) -> bool:
        return not self._exit.statistics().current_buffer_used
