"""How the places for requests of other nodes are shared among the nodes that ask for them. Pure: the clock
comes in as `now_s`.

While nobody else asks, one origin may have every place. When all are taken and another origin is turned away,
its want is remembered for a while, and origins that have their fair share get no more until it is served.
Places that were assigned and never used are given up for others: after FIRST_JOB_S always, before that where
their origin has more than its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarmllm_proto.identifiers import NodeId

FIRST_JOB_S = 5.0
"""An assignment without a job for so long holds no place that somebody else could use. It is not ended for
that: the stages before it may take their time."""
WANT_S = 30.0
WANTING_MAX = 256


@dataclass(frozen=True, slots=True)
class Place:
    """One request of another node here."""

    request_id: str
    origin: NodeId
    assigned_s: float
    has_begun: bool
    """A job has come."""


@dataclass(frozen=True, slots=True)
class Admission:
    is_granted: bool
    instead_of: str | None = None
    """The request that has to go."""


@dataclass(slots=True)
class Shares:
    """Of `capacity` places."""

    capacity: int
    _wanting: dict[NodeId, float] = field(default_factory=dict)
    """Origins that were turned away, and until when that counts."""

    def ask(self, origin: NodeId, places: Iterable[Place], now_s: float) -> Admission:
        """`places`: those that are taken."""
        taken = list(places)
        held = Counter(place.origin for place in taken)
        self._wanting = {each: until_s for each, until_s in self._wanting.items() if until_s > now_s}
        fair = max(1, self.capacity // len({*held, *self._wanting, origin}))
        others = (each for each in self._wanting if each != origin)
        if held[origin] >= fair and any(held[each] < fair for each in others):
            return Admission(is_granted=False)
        if len(taken) < self.capacity:
            self._wanting.pop(origin, None)
            return Admission(is_granted=True)
        unused = [
            place
            for place in taken
            if not place.has_begun
            and (
                now_s - place.assigned_s >= FIRST_JOB_S or (held[place.origin] > fair and held[origin] < fair)
            )
        ]
        if not unused:
            if len(self._wanting) < WANTING_MAX or origin in self._wanting:
                self._wanting[origin] = now_s + WANT_S
            return Admission(is_granted=False)
        self._wanting.pop(origin, None)
        chosen = min(unused, key=lambda place: (-held[place.origin], place.assigned_s, place.request_id))
        return Admission(is_granted=True, instead_of=chosen.request_id)
