"""Decides which request of a node's users runs next, by tier and fairly among keys. Pure.

A tier is a share of `max_concurrent_requests`: bronze a quarter, silver a half, gold all of it, platinum
twice as much. The shares lie inside each other: what counts towards a tier's cap are the running requests of
that tier and of those below it. So bronze can never take what silver was promised, gold alone fills exactly
what was configured, and platinum always finds room beside a node full of gold.

Waiting requests are served by tier first, and within a tier key by key, each in order; a key with a hundred
requests and one with a single request take turns. A full queue makes room for a key that has fewer requests
in it, at the cost of the newest request of the key that has most.

Where several keys are in use, a key that has a turn leaves the last turn of each tier to the others. Where no
other key has asked for OTHERS_S, it may take all turns.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, get_args

from swarmllm.keys import Tier

TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
"""From the lowest to the highest."""
SHARES: Final[dict[Tier, Fraction]] = {
    "bronze": Fraction(1, 4),
    "silver": Fraction(1, 2),
    "gold": Fraction(1),
    "platinum": Fraction(2),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """The key and tier for which a request runs."""

    key_id: str = ""
    """Empty: anyone, on a node that asks nobody for a key."""
    tier: Tier = "gold"
    rate_limit: int = 0
    """Requests per minute; 0: no limit."""


LOCAL: Final = Caller()
OTHERS_S: Final = 300.0
"""A key that has asked within this time counts as in use."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request's place, waiting or running."""

    caller: Caller


class QueueFull(Exception):
    """The queue is full."""


@dataclass(frozen=True, slots=True)
class QueueChanges:
    """The result of a submission or a departure, for the caller to pass on; each ticket starts once."""

    started: tuple[Ticket, ...] = ()
    evicted: Ticket | None = None


def tier_caps(max_requests: int, n_slots: int) -> dict[Tier, int]:
    """How many requests of each tier and those below it may run. More than `n_slots` would find no slot in a
    worker; everybody can have one."""
    return {tier: max(1, min(int(SHARES[tier] * max_requests), n_slots)) for tier in TIERS}


@dataclass(slots=True)
class TurnQueue:
    caps: Mapping[Tier, int]
    max_waiting: int
    _running: dict[Tier, set[Ticket]] = field(default_factory=lambda: {tier: set() for tier in TIERS})
    _waiting: dict[Tier, OrderedDict[str, deque[Ticket]]] = field(
        default_factory=lambda: {tier: OrderedDict() for tier in TIERS}
    )
    """By key, the one to be served next first."""
    _asked_s: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """By key: when it asked last. The earliest first; none is older than OTHERS_S."""

    def submit(self, ticket: Ticket, now_s: float = 0.0) -> QueueChanges:
        """Raises Full; then nobody has got or lost a place."""
        caller = ticket.caller
        self._has_asked(caller.key_id, now_s)
        self._waiting[caller.tier].setdefault(caller.key_id, deque()).append(ticket)
        started = self._start()
        if self.n_waiting() <= self.max_waiting:
            return QueueChanges(started)
        greedy = self._greediest(caller)
        if greedy is None:
            self._remove(ticket)
            raise QueueFull
        self._remove(greedy)
        return QueueChanges(started, greedy)

    def leave(self, ticket: Ticket) -> QueueChanges:
        """It has run, or waits no longer; one that has left already may leave again."""
        running = self._running[ticket.caller.tier]
        if ticket in running:
            running.discard(ticket)
        else:
            self._remove(ticket)
        return QueueChanges(self._start())

    def is_running(self, ticket: Ticket) -> bool:
        return ticket in self._running[ticket.caller.tier]

    def n_running(self, tier: Tier | None = None) -> int:
        return sum(len(running) for each, running in self._running.items() if tier in (None, each))

    def n_waiting(self, tier: Tier | None = None) -> int:
        return sum(
            len(tickets)
            for each, keys in self._waiting.items()
            if tier in (None, each)
            for tickets in keys.values()
        )

    def has_room(self, caller: Caller) -> bool:
        """Whether one more request of this caller may run.

        A key that has a turn leaves the last turn of each tier to the other keys in use: however long its
        requests run, and whether or not it reads the answers, another key need not wait for them.
        """
        has_others = any(key_id != caller.key_id for key_id in self._asked_s)
        is_last_left = bool(caller.key_id) and has_others and self._has_turn(caller)
        n_below = 0
        for each in TIERS:
            n_below += len(self._running[each])
            cap = self.caps[each]
            if TIERS.index(each) >= TIERS.index(caller.tier) and n_below >= cap - (is_last_left and cap > 1):
                return False
        return True

    def _has_asked(self, key_id: str, now_s: float) -> None:
        self._asked_s[key_id] = now_s
        self._asked_s.move_to_end(key_id)
        while now_s - next(iter(self._asked_s.values())) > OTHERS_S:
            self._asked_s.popitem(last=False)

    def _has_turn(self, caller: Caller) -> bool:
        running = self._running[caller.tier]
        return any(ticket.caller.key_id == caller.key_id for ticket in running)

    def _start(self) -> tuple[Ticket, ...]:
        started: list[Ticket] = []
        for tier in reversed(TIERS):
            keys = self._waiting[tier]
            while True:
                key_id = next((k for k, each in keys.items() if self.has_room(each[0].caller)), None)
                if key_id is None:
                    break
                tickets = keys[key_id]
                ticket = tickets.popleft()
                keys.move_to_end(key_id)
                if not tickets:
                    del keys[key_id]
                self._running[tier].add(ticket)
                started.append(ticket)
        return tuple(started)

    def _greediest(self, caller: Caller) -> Ticket | None:
        """The newest ticket of the key that has most waiting, more than the caller's own and not of a higher
        tier."""
        best: deque[Ticket] = self._waiting[caller.tier][caller.key_id]
        found: Ticket | None = None
        for tier in TIERS[: TIERS.index(caller.tier) + 1]:
            for tickets in self._waiting[tier].values():
                if len(tickets) > len(best):
                    best = tickets
                    found = tickets[-1]
        return found

    def _remove(self, ticket: Ticket) -> None:
        keys, key_id = self._waiting[ticket.caller.tier], ticket.caller.key_id
        tickets = keys.get(key_id)
        if tickets is not None and ticket in tickets:
            tickets.remove(ticket)
            if not tickets:
                del keys[key_id]


@dataclass(slots=True)
class RateLimits:
    """A bucket per key: it holds `rate_limit` requests and fills up within a minute."""

    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By key: (requests left, when that was)."""

    def wait_s(self, caller: Caller, now_s: float) -> float:
        """0 and the request counts, or the seconds until one more would be let in."""
        if not caller.rate_limit:
            return 0.0
        per_s = caller.rate_limit / 60
        left, then_s = self._buckets.get(caller.key_id, (float(caller.rate_limit), now_s))
        left = min(float(caller.rate_limit), left + (now_s - then_s) * per_s)
        allowed = left >= 1.0
        self._buckets[caller.key_id] = (left - allowed, now_s)
        return 0.0 if allowed else (1.0 - left) / per_s
