"""The queue of one request's session: bounded for what other nodes send, apart from what this node puts in.

A sender that overruns its part breaks the protocol. A sender for whose bytes there is no room in the byte
budget does not: others may have used it up. What this node's own worker and the origin's side put in
is limited by the tokens asked for, comes in bursts when the processor is busy, and is nobody's fault.

What another node sent also keeps its bytes reserved in the byte budget, until the item after it is asked for:
the worker holds it that long.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final

import trio

from swarmllm.pipeline.stage.arrivals import Item
from swarmllm.swarm.byte_budget import ByteBudget, Grant, Kind
from swarmllm_proto.identifiers import NodeId

SPARE_JOBS: Final = 8
"""Room beyond the window: repeats and credits."""
OWN_MAX: Final = 4096


class Put(Enum):
    """What became of an item."""

    QUEUED = auto()
    """Or dropped, because the request is over."""
    OVERRUN = auto()
    """There were more items than the window allows."""
    NO_ROOM = auto()
    """The byte budget has no room for it, which need not be its sender's doing."""


class SessionQueue:
    def __init__(self, n_stages: int, budget: ByteBudget | None = None) -> None:
        self._foreign_max = 2 * (n_stages + 1) + SPARE_JOBS
        self._n_foreign = 0
        self._budget = budget or ByteBudget()
        self._items: deque[tuple[Item, bool, Grant | None]] = deque()
        self._came = trio.Event()
        self._taken: Grant | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<SessionQueue {len(self._items)} items, {self._n_foreign} of other nodes>"

    def put(self, item: Item, *, is_foreign: bool, sender: NodeId | None = None, n_bytes: int = 0) -> Put:
        """`sender`: the node that it came from, with so many bytes."""
        if self._is_closed:
            return Put.QUEUED
        n_own = len(self._items) - self._n_foreign
        if self._n_foreign >= self._foreign_max if is_foreign else n_own >= OWN_MAX:
            return Put.OVERRUN
        grant = None
        if sender is not None and n_bytes:
            grant = self._budget.reserve(sender, Kind.JOBS, n_bytes)
            if grant is None:
                return Put.NO_ROOM
        self._items.append((item, is_foreign, grant))
        self._n_foreign += is_foreign
        self._came.set()
        return Put.QUEUED

    async def get(self) -> Item:
        """The next item. The one before has been dealt with."""
        self._release_taken()
        await trio.lowlevel.checkpoint()
        while not self._items:
            self._came = trio.Event()
            await self._came.wait()
        item, is_foreign, self._taken = self._items.popleft()
        self._n_foreign -= is_foreign
        return item

    def close(self) -> None:
        """Give everything up; what still comes is dropped."""
        self._is_closed = True
        self._release_taken()
        for _, _, grant in self._items:
            if grant is not None:
                grant.release()
        self._items.clear()
        self._n_foreign = 0

    @property
    def is_empty(self) -> bool:
        return not self._items

    def _release_taken(self) -> None:
        grant, self._taken = self._taken, None
        if grant is not None:
            grant.release()
