"""Waits for room in the byte budget: the sender is not read meanwhile, which is the back-pressure.

A payload takes its room as it comes, so that announcing one costs the others nothing; what comes in one
piece, as all decode jobs do, needs none. Where there is no room for it, slow payloads of others give way,
the largest first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol

import trio

from swarmllm.swarm.byte_budget import ByteBudget, Grant, Kind
from swarmllm.swarm.data.wire import WireClosed
from swarmllm_proto.identifiers import NodeId

LOOK_S = 0.05


async def reserve_within(
    budget: ByteBudget, peer: NodeId, kind: Kind, n_bytes: int, seconds: float
) -> Grant | None:
    """None: there was no room in that time, or there never can be."""
    grant = budget.reserve(peer, kind, n_bytes)
    if grant is not None or not budget.can_ever_hold(kind, n_bytes):
        return grant
    with trio.move_on_after(seconds):
        while (grant := budget.reserve(peer, kind, n_bytes)) is None:  # noqa: ASYNC110 (the budget is pure)
            await trio.sleep(LOOK_S)
    return grant


class Receiver(Protocol):
    """A connection."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def n_reserved_bytes(self) -> int:
        """For the payload that it receives."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether that payload comes slowly."""
        ...

    def give_way(self) -> None:
        """End, and give back what is reserved."""
        ...


async def reserve_or_displace(
    budget: ByteBudget,
    receivers: Callable[[], Iterable[Receiver]],
    node_id: NodeId,
    n_bytes: int,
    seconds: float,
) -> Grant | None:
    """Room among the messages for `node_id`. None: there was none within that time."""
    kind = Kind.MESSAGES
    with trio.move_on_after(seconds):
        while (grant := budget.reserve(node_id, kind, n_bytes)) is None:
            if not budget.is_for_others_to_give(node_id, kind, n_bytes):
                return None
            slowest = largest_slow(receivers(), node_id)
            if slowest is not None:
                slowest.give_way()
            await trio.sleep(0.0 if slowest is not None else LOOK_S)
        return grant
    return None


def largest_slow(receivers: Iterable[Receiver], node_id: NodeId) -> Receiver | None:
    """Of other nodes than `node_id`."""
    slow = [each for each in receivers if each.node_id != node_id and each.n_reserved_bytes and each.is_slow]
    return max(slow, key=lambda each: each.n_reserved_bytes, default=None)


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
