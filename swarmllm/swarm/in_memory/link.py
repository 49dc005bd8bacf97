"""One direction between two nodes in memory: ordered, bounded, with a configured speed, and acknowledged.

Acknowledging follows the same rules as on a connection of the data plane (see data.keepalive): the receiver
tells about once a second what it has taken, and again while it is at work on what follows. Here that is
done only while something is unacknowledged, so that idle links cost a simulation nothing.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data.keepalive import Deliveries
from swarmllm_proto.identifiers import NodeId

MESSAGES_MAX = 16
"""Messages under way before `send` waits: about what the buffers of a TCP connection hold."""
ACKNOWLEDGE_EVERY_S = 1.0


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


class MemoryLine:
    """Carries everything that goes in one direction between two nodes. A silent line delivers nothing and
    reports nothing; messages under way arrive when it works again, as with TCP's retransmission."""

    def __init__(self) -> None:
        self._speaks = trio.Event()
        self._speaks.set()

    @property
    def is_silent(self) -> bool:
        return not self._speaks.is_set()

    def fall_silent(self) -> None:
        self._speaks = trio.Event()

    def speak(self) -> None:
        self._speaks.set()

    async def opened(self) -> None:
        while self.is_silent:
            await self._speaks.wait()


class _Message(NamedTuple):
    arrival_s: float
    header: bytes
    payload: memoryview


Receive = Callable[[NodeId, bytes, memoryview], Awaitable[None]]


class MemoryLink:
    """Messages from `sender` to the router that `receive` belongs to."""

    def __init__(
        self,
        sender: NodeId,
        receive: Receive,
        quality: LinkQuality,
        rng: random.Random | None = None,
        line: MemoryLine | None = None,
    ) -> None:
        self._sender = sender
        self._receive = receive
        self.quality = quality
        self._entrance, self._exit = trio.open_memory_channel[_Message](MESSAGES_MAX)
        self._free_at_s = -math.inf
        self._rng = rng or random.Random(sender)
        self._line = line or MemoryLine()
        self._closed = False
        self.n_bytes = 0
        self.outgoing = Deliveries()
        """The sender's account."""
        self._incoming = Deliveries()
        """The receiver's."""
        self._is_carrying = False
        self.is_acknowledging = False
        self.loses_acknowledgements = False

    async def send(self, header: bytes, payload: bytes, size_bytes: int) -> None:
        """Returns when the message is under way. Raises NodeUnreachable when the link is closed, also
        meanwhile."""
        self._free_at_s = max(self._free_at_s, trio.current_time()) + size_bytes / self.quality.bytes_per_s
        message = _Message(self._free_at_s + self.quality.way_s(self._rng), header, memoryview(payload))
        try:
            await self._entrance.send(message)
        except trio.ClosedResourceError:
            raise NodeUnreachable("the node was lost while a message was on its way to it") from None
        self.outgoing.sent(trio.current_time())
        self.n_bytes += size_bytes

    async def carry(self) -> None:
        """Deliver one message after the other until the link is closed."""
        while True:
            try:
                message = await self._exit.receive()
            except (trio.ClosedResourceError, trio.EndOfChannel):
                return
            self._is_carrying = True
            if message.arrival_s > trio.current_time():
                await trio.sleep_until(message.arrival_s)
            await self._line.opened()
            if self._closed:
                return
            await self._receive(self._sender, message.header, message.payload)
            self._incoming.taken()
            self._is_carrying = False

    async def acknowledge(self, back: MemoryLine, back_latency_s: float) -> bool:
        """Returns when nothing is unacknowledged any more, False where an acknowledgement is overdue. To be
        run by one task at a time, after a message has been sent."""
        on_the_way: deque[tuple[float, int]] = deque()
        self.is_acknowledging = True
        try:
            while not self._closed and self.outgoing.n_acknowledged < self.outgoing.n_sent:
                await trio.sleep(ACKNOWLEDGE_EVERY_S)
                now = trio.current_time()
                is_at_work = self._is_carrying and not self._line.is_silent
                n_taken = self._incoming.to_tell(is_at_work=is_at_work)
                if n_taken is not None and not self.loses_acknowledgements:
                    on_the_way.append((now + back_latency_s, n_taken))
                while on_the_way and on_the_way[0][0] <= now and not back.is_silent:
                    # The receiver may have taken what its sender, still inside `send`, has not counted yet.
                    n_told = min(on_the_way.popleft()[1], self.outgoing.n_sent)
                    self.outgoing.acknowledged(n_told, now)
                if not self._closed and self.outgoing.is_overdue(now):
                    return False
            return True
        finally:
            self.is_acknowledging = False

    def close(self) -> None:
        """What is under way is lost; a task that waits in `send` gets NodeUnreachable."""
        self._closed = True
        self._entrance.close()
        self._exit.close()
