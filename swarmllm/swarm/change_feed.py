"""Fans changes out to any number of readers; a slow reader never delays the network.

Each reader has a bounded queue that loses its oldest entries when the reader is slow: a change is a hint to
look at `Router.records()` and `Router.connected()` again, and those are always complete, so a lost hint costs
nothing that the next one does not repair. A memory channel per reader was rejected: it can only refuse the
newest change, which is the one that matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarmllm.swarm.router import Change

QUEUE_MAX = 1024
"""Changes kept per reader: every node of a thousand-node swarm may come at once without a loss."""


class _Reader:
    """One subscription: an endless async iterator of changes."""

    def __init__(self) -> None:
        self._queue: deque[Change] = deque(maxlen=QUEUE_MAX)
        self._waiting = trio.lowlevel.ParkingLot()

    def put(self, change: Change) -> None:
        self._queue.append(change)
        self._waiting.unpark()

    def __aiter__(self) -> AsyncIterator[Change]:
        return self

    async def __anext__(self) -> Change:
        await trio.lowlevel.checkpoint()
        while not self._queue:
            await self._waiting.park()
        return self._queue.popleft()


class ChangeFeed:
    def __init__(self) -> None:
        self._readers: set[_Reader] = set()

    def announce(self, change: Change) -> None:
        for reader in self._readers:
            reader.put(change)

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[Change]]:
        reader = _Reader()
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
