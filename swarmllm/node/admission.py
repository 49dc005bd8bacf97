"""Admits the requests of this node's own users in turn: the driver of `scheduling.tiers`.

Event-driven: a turn that ends, however it ends, wakes the next one, once; nobody polls. A request that
cannot wait any longer, or cannot wait at all, is refused with the seconds after which it may try again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Literal

import trio

from swarmllm.errors import NodeStopping, Overloaded
from swarmllm.keys import Tier
from swarmllm.scheduling.tiers import LOCAL, Caller, QueueChanges, QueueFull, RateLimits, Ticket, TurnQueue

Refusal = Literal["full", "timeout", "rate"]
LONGEST_ADVICE_S = 60.0
_ALPHA = 0.2
"""Of the moving average of how long requests run."""


class Admission:
    """At most `caps` requests at a time; the next `max_queued` wait, for `timeout_s` at most."""

    def __init__(self, caps: Mapping[Tier, int], max_queued: int, timeout_s: float) -> None:
        self.caps = dict(caps)
        self.refused: Counter[tuple[Tier, Refusal]] = Counter()
        self._queue = TurnQueue(self.caps, max_queued)
        self._rates = RateLimits()
        self.timeout_s = timeout_s
        self._changed: dict[Ticket, trio.Event] = {}
        self._run_s = 0.0
        """Moving average."""
        self.is_closed = False
        self._scopes: set[trio.CancelScope] = set()
        """Of those that wait or have a turn."""
        self._left = trio.lowlevel.ParkingLot()

    @property
    def max_running(self) -> int:
        """Of requests without a key, and of gold."""
        return self.caps["gold"]

    @property
    def n_active(self) -> int:
        return self._queue.n_running()

    @property
    def n_queued(self) -> int:
        return self._queue.n_waiting()

    def n_active_of(self, tier: Tier) -> int:
        return self._queue.n_running(tier)

    def n_queued_of(self, tier: Tier) -> int:
        return self._queue.n_waiting(tier)

    @asynccontextmanager
    async def turn(self, caller: Caller = LOCAL) -> AsyncIterator[float]:
        """Holds one turn; yields the seconds waited for it. Raises Overloaded, and NodeStopping after `close`
        and where `end_all` ended it."""
        if self.is_closed:
            raise NodeStopping("This node is about to stop; ask again in a moment, or another node.")
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                async with self._held_turn(caller) as queue_s:
                    yield queue_s
            finally:
                self._scopes.discard(scope)
                self._left.unpark_all()
        if scope.cancelled_caught:
            raise NodeStopping("This node stopped before the answer was complete.")

    def close(self) -> None:
        """Refuse every turn from now on; those that wait for one or hold one go on."""
        self.is_closed = True

    async def wait_empty(self) -> None:
        """Until nobody waits for a turn or holds one."""
        while self._scopes:
            await self._left.park()

    def end_all(self) -> None:
        """Cancel those that wait for a turn or hold one; they raise NodeStopping."""
        for scope in self._scopes:
            scope.cancel()

    @asynccontextmanager
    async def _held_turn(self, caller: Caller) -> AsyncIterator[float]:
        since_s = trio.current_time()
        wait_s = self._rates.wait_s(caller, since_s)
        if wait_s:
            text = f"This key may send {caller.rate_limit} requests per minute."
            raise self._refuse(caller, "rate", text, wait_s)
        ticket = Ticket(caller)
        try:
            await self._begin(ticket)
            started_s = trio.current_time()
            try:
                yield started_s - since_s
            finally:
                run_s = trio.current_time() - started_s
                self._run_s += _ALPHA * (run_s - self._run_s) if self._run_s else run_s
        finally:
            self._changed.pop(ticket, None)
            self._tell(self._queue.leave(ticket))

    async def _begin(self, ticket: Ticket) -> None:
        changed = self._changed[ticket] = trio.Event()
        try:
            self._tell(self._queue.submit(ticket, trio.current_time()))
        except QueueFull:
            n_waiting = self._queue.n_waiting()
            text = f"This node is busy and {n_waiting} requests wait already."
            raise self._refuse(ticket.caller, "full", text) from None
        with trio.move_on_after(self.timeout_s):
            await changed.wait()
        if self._queue.is_running(ticket):
            return
        if changed.is_set():
            text = "This node is busy, and other keys have fewer requests waiting."
            raise self._refuse(ticket.caller, "full", text)
        text = f"This node was busy for {self.timeout_s:g} s; try again later."
        raise self._refuse(ticket.caller, "timeout", text)

    def _tell(self, moves: QueueChanges) -> None:
        for ticket in (*moves.started, moves.evicted):
            if ticket is not None and ticket in self._changed:
                self._changed[ticket].set()

    def _refuse(self, caller: Caller, why: Refusal, text: str, retry_after_s: float = 0.0) -> Overloaded:
        self.refused[caller.tier, why] += 1
        if not retry_after_s:
            # When those who wait now have had their turns, as far as one can tell.
            retry_after_s = self._run_s * (self._queue.n_waiting() + 1) / self.caps[caller.tier]
        return Overloaded(text, retry_after_s=min(max(retry_after_s, 1.0), LONGEST_ADVICE_S))
