"""One way between two nodes in memory: ordered, bounded, and as fast as it is told to be."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import trio

from swarmllm.errors import NodeUnreachable

MESSAGES_MAX = 16
"""Messages under way before `send` waits: about what the buffers of a TCP connection hold."""


@dataclass(frozen=True, slots=True)
class LinkQuality:
    latency_s: float = 0.0
    """One way."""
    bytes_per_s: float = math.inf
    loss: float = 0.0
    """Chance that a message, or one way of a request, has to be sent again: it comes a round trip later, and
    what was sent behind it waits, as on any ordered line."""

    def way_s(self, rng: random.Random) -> float:
        """How long something small is under way now."""
        is_lost = self.loss > 0 and rng.random() < self.loss
        return self.latency_s * (3 if is_lost else 1)


class _Message(NamedTuple):
    arrival_s: float
    header: bytes
    payload: memoryview


Receive = Callable[[str, bytes, memoryview], Awaitable[None]]


class MemoryLink:
    """Messages from `sender` to whoever `receive` belongs to."""

    def __init__(
        self, sender: str, receive: Receive, quality: LinkQuality, rng: random.Random | None = None
    ) -> None:
        self._sender = sender
        self._receive = receive
        self.quality = quality
        self._entrance, self._exit = trio.open_memory_channel[_Message](MESSAGES_MAX)
        self._free_at_s = -math.inf
        self._rng = rng or random.Random(sender)
        self._closed = False
        self.n_bytes = 0

    async def send(self, header: bytes, payload: bytes, size_bytes: int) -> None:
        """Returns when the message is under way. Raises NodeUnreachable when the link is closed, also
        meanwhile."""
        self._free_at_s = max(self._free_at_s, trio.current_time()) + size_bytes / self.quality.bytes_per_s
        message = _Message(self._free_at_s + self.quality.way_s(self._rng), header, memoryview(payload))
        try:
            await self._entrance.send(message)
        except trio.ClosedResourceError:
            raise NodeUnreachable("the node was lost while a message was on its way to it") from None
        self.n_bytes += size_bytes

    async def carry(self) -> None:
        """Deliver one message after the other until the link is closed."""
        while True:
            try:
                message = await self._exit.receive()
            except (trio.ClosedResourceError, trio.EndOfChannel):
                return
            if message.arrival_s > trio.current_time():
                await trio.sleep_until(message.arrival_s)
            if self._closed:
                return
            await self._receive(self._sender, message.header, message.payload)

    def close(self) -> None:
        """What is under way is lost; whoever waits in `send` gets NodeUnreachable."""
        self._closed = True
        self._entrance.close()
        self._exit.close()
