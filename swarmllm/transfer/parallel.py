"""Several tasks side by side on one piece of work: the first failure ends them all, and is the one told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableSequence
from typing import TypeVar

import trio

from swarmllm.errors import SwarmLLMError

T = TypeVar("T")


async def run_lanes(lanes: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Raises the SwarmLLMError of the lane that failed first, when all have ended."""
    failure: SwarmLLMError | None = None

    async def run(lane: Callable[[], Awaitable[None]]) -> None:
        nonlocal failure
        try:
            await lane()
        except SwarmLLMError as error:
            failure = failure or error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for lane in lanes:
            nursery.start_soon(run, lane)
    if failure is not None:
        raise failure


async def share_out(n_lanes: int, pending: MutableSequence[T], act: Callable[[T], Awaitable[None]]) -> None:
    """`act` on each, `n_lanes` at a time; each leaves `pending` when its turn comes. Raises as
    `run_lanes`."""

    async def lane() -> None:
        while pending:
            await act(pending.pop(0))

    await run_lanes([lane] * min(n_lanes, len(pending)))
