"""Room in the byte budget for the payload that one connection is receiving.

Room is taken as the payload comes, so that announcing one costs the others nothing. What comes in one piece,
as all decode jobs do, needs none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from swarmllm.swarm.byte_budget import Grant
from swarmllm.swarm.data.wire import WireClosed

UNRESERVED_BYTES: Final = 64 * 1024
AT_ONCE_BYTES: Final = 1024 * 1024
ROOM_S: Final = 30.0
"""Payloads that hold the room either are quick or give way to this one; its sender waits meanwhile."""

Reserve = Callable[[int, float], Awaitable[Grant | None]]
"""(bytes, seconds) -> room for them, if there is any within that time."""


class PayloadRoom:
    def __init__(self, reserve: Reserve | None) -> None:
        """Without `reserve` there is always room."""
        self._reserve = reserve
        self._grant: Grant | None = None

    def __repr__(self) -> str:
        return f"<PayloadRoom {self.n_bytes} bytes>"

    @property
    def n_bytes(self) -> int:
        return self._grant.n_bytes if self._grant is not None else 0

    @property
    def is_in_use(self) -> bool:
        return self._grant is not None

    def take_now(self, n_received: int, size: int) -> bool:
        """Room for the next piece of a payload of which so many bytes have come. False: `take` has to wait
        for it."""
        more = self._more(n_received, size)
        return not more or (self._grant is not None and self._grant.grow(more))

    async def take(self, n_received: int, size: int) -> None:
        """Raises WireClosed where there is no room within ROOM_S."""
        grant = None
        if self._reserve is not None:
            grant = await self._reserve(self._more(n_received, size), ROOM_S)
        if grant is None:
            raise WireClosed(f"no room for a payload of {size} bytes")
        if self._grant is not None:
            grant.absorb(self._grant)
        self._grant = grant

    def release(self) -> None:
        if self._grant is not None:
            self._grant.release()
            self._grant = None

    def _more(self, n_received: int, size: int) -> int:
        due = min(size, n_received + UNRESERVED_BYTES)
        if self._reserve is None or size <= UNRESERVED_BYTES or due <= self.n_bytes:
            return 0
        return min(size - self.n_bytes, max(due - self.n_bytes, AT_ONCE_BYTES))
