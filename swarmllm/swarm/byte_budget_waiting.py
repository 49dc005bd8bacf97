"""Waits for room in the byte budget: the sender is not read meanwhile, which is the back-pressure."""

from __future__ import annotations

import trio

from swarmllm.swarm.byte_budget import ByteBudget, Grant, Kind

LOOK_S = 0.05


async def reserve_within(
    budget: ByteBudget, peer: str, kind: Kind, n_bytes: int, seconds: float
) -> Grant | None:
    """None: there was no room in that time, or there never can be."""
    grant = budget.reserve(peer, kind, n_bytes)
    if grant is not None or not budget.can_ever_hold(kind, n_bytes):
        return grant
    with trio.move_on_after(seconds):
        while (grant := budget.reserve(peer, kind, n_bytes)) is None:  # noqa: ASYNC110 (the budget is pure)
            await trio.sleep(LOOK_S)
    return grant
