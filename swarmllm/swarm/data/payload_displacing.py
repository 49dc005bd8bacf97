"""Reserves room for a payload. Where there is none, slow payloads of others give way, the largest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import trio

from swarmllm.swarm.byte_budget import ByteBudget, Grant, Kind
from swarmllm.swarm.byte_budget_waiting import LOOK_S
from swarmllm_proto.identifiers import NodeId


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
