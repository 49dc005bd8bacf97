"""Counts the KV that requests hold on this node, and how much is left.

A request holds a slot of its model's worker, and cells for its prompt and for as much of its answer as is
expected: reserving all that it may say would make a node look full that is not. Other nodes read the result
in this node's record; the worker itself remains the one that refuses.

`Shares` shares the places for requests of other nodes among the nodes that ask for them. It is pure: the
clock comes in as `now_s`. While nobody else asks, one origin may have every place. When all are taken and
another origin is refused, its wish is remembered for a while, and origins that have their fair share get no
more until it is served. With `KEPT_OF` places or more, one place is kept from origins that have their share,
for an origin that was served lately and holds nothing. Places that were assigned and never used are given up
for others: after FIRST_JOB_S always, before that where their origin has more than its share. Requests that
run are given up where their origin has more than its share, after TURN_S: one that gives a job now and then
would keep its place for ever.

Where more origins want places than there are, they take turns. What each has used, in seconds of a place, is
added up and fades. A place goes to the one that has used least among those that wait and have none, and a
running request of an origin that has used more gives way after a turn, which is shorter, the more there are.

An identity costs nothing, so `OriginShares` counts all origins that have earned no trust as one: together
they get what one origin gets that has. Among themselves they share that in the same way: who has come back
for a minute counts by itself, and all others as one, or who has a new identity for each request would always
have used least. But none takes the place of another while they have more than their share and somebody waits
for it: it would never grow old.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.identifiers import ModelId, NodeId

EXPECTED_OUTPUT_TOKENS = 256
"""What a route is chosen for, where a request allows more: few answers use all they may."""
FIRST_JOB_S = 5.0
"""An assignment without a job for so long holds no place that somebody else could use. It is not ended for
that: the stages before it may take their time."""
TURN_S = 60.0
"""So long a running request keeps a place above its origin's share that another origin asks for."""
SHORTEST_TURN_S = 10.0
"""Of origins that take turns. Who gives way computes its prompt again somewhere else."""
FADES_S = 300.0
"""In which what was used counts for half."""
LEAST_USE_S = 5.0
"""A place that was taken counts for so long at least. Else requests that are broken off at once would be
charged nothing, and those of others, which run, would wait for all of them."""
KEPT_OF = 4
"""Of fewer places none stays empty: one of three is too much for an origin that may not come again."""
WANT_S = 30.0
WANTING_MAX = 256
NEWCOMERS = NodeId("newcomers")
"""Stands for all origins that have earned no trust; no node has such an id."""
KNOWN_S = 60.0
"""So long ago an origin has asked first that counts by itself among those that have earned no trust."""
MISSED_S = 300.0
"""An origin that has asked for nothing for so long is a new one when it comes again."""
SEEN_MAX = 4096
"""Origins of which it is remembered when they came: those that came last."""

Stands = Callable[[NodeId], bool]
"""Whether an origin counts by itself."""


@dataclass(frozen=True, slots=True)
class HeldCapacity:
    """The slot and cells that one request holds."""

    model_id: ModelId
    n_prompt_tokens: int
    max_tokens: int

    @property
    def n_kv_tokens(self) -> int:
        return self.n_prompt_tokens + min(self.max_tokens, EXPECTED_OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of the model that has least left."""

    slots: int = 0
    """0: nobody has said."""
    free_slots: int = 0
    free_kv_tokens: int = 0

    def lack(self, n_tokens: int) -> str:
        """Why one more request with so many tokens, answer included, does not fit; empty: it does."""
        if self.slots and self.free_slots <= 0:
            return "no free slot"
        if self.slots and self.free_kv_tokens < n_tokens:
            return f"no room for {n_tokens:,} tokens of context: {self.free_kv_tokens:,} free"
        return ""


def held_here(context: RequestContext) -> HeldCapacity | None:
    """None: other nodes run all of its layers."""
    if not context.view.runs_layers:
        return None
    return HeldCapacity(context.model.model_id, context.n_prompt_tokens, context.sampling.max_tokens)


def room_left(
    held: Iterable[HeldCapacity],
    settings: PipelineSettings,
    context_sizes: Mapping[ModelId, int] = MappingProxyType({}),
) -> Room:
    """What is left beside the requests that run. `context_sizes`: KV cells of the models that are loaded
    here, by their ids."""
    slots: Counter[ModelId] = Counter()
    tokens: Counter[ModelId] = Counter()
    for request in held:
        slots[request.model_id] += 1
        tokens[request.model_id] += request.n_kv_tokens
    n_slots = settings.max_requests_per_model
    n_cells = {**dict.fromkeys(tokens, settings.n_ctx), **context_sizes}
    free_cells = [n_ctx - tokens[model_id] for model_id, n_ctx in n_cells.items()]
    return Room(
        slots=n_slots,
        free_slots=max(0, n_slots - max(slots.values(), default=0)),
        free_kv_tokens=max(0, min(free_cells, default=settings.n_ctx)),
    )


@dataclass(frozen=True, slots=True)
class StagePlace:
    """One request of another node here."""

    request_id: str
    origin: NodeId
    assigned_s: float
    has_begun: bool
    """A job has come."""


@dataclass(frozen=True, slots=True)
class StageAdmission:
    is_granted: bool
    instead_of: str | None = None
    """The request that has to go."""


@dataclass(slots=True)
class Shares:
    """Divides `capacity` places."""

    capacity: int
    _wanting: dict[NodeId, float] = field(default_factory=dict)
    """Origins that were turned away, and until when that counts."""
    _served: dict[NodeId, float] = field(default_factory=dict)
    """The same of those that were not."""
    _used_s: dict[NodeId, float] = field(default_factory=dict)
    """Seconds of a place, by origin; of those that hold none, what has faded to less than one is left out."""
    _used_until_s: float = 0.0
    _seen: dict[str, StagePlace] = field(default_factory=dict)
    """Places that were taken at the last ask, by request."""

    def limit(self, capacity: int) -> None:
        """So many places there are now."""
        self.capacity = capacity

    def ask(
        self, origin: NodeId, places: Iterable[StagePlace], now_s: float, stands: Sequence[Stands] = ()
    ) -> StageAdmission:
        """`places`: those that are taken. `stands`: of no use here, as each origin counts by itself."""
        taken = list(places)
        held = Counter(place.origin for place in taken)
        self._add_up(taken, now_s)
        self._wanting = {each: until_s for each, until_s in self._wanting.items() if until_s > now_s}
        self._served = {each: until_s for each, until_s in self._served.items() if until_s > now_s}
        fair = self._fair(origin, held)
        if held[origin] >= fair and self._is_awaited(origin, held, fair):
            return StageAdmission(is_granted=False)
        n_free = self.capacity - len(taken)
        is_kept = self.capacity >= KEPT_OF and any(not held[each] for each in self._served if each != origin)
        n_ahead = self._n_ahead(origin, held)
        if n_free > max(n_ahead, int(is_kept and held[origin] >= fair)):
            return self._granted(origin, now_s)
        given_up = [
            place
            for place in taken
            if may_be_given_up(place, now_s, is_for_share=held[place.origin] > fair > held[origin])
        ] or self._at_the_end_of_their_turn(origin, taken, held, now_s)
        if n_free or len(given_up) <= n_ahead:
            if len(self._wanting) < WANTING_MAX or origin in self._wanting:
                self._wanting[origin] = now_s + WANT_S
            return StageAdmission(is_granted=False)
        chosen = min(
            given_up,
            key=lambda place: (
                place.has_begun,
                -held[place.origin],
                -self._used_s.get(place.origin, 0.0),
                place.assigned_s,
                place.request_id,
            ),
        )
        return self._granted(origin, now_s, chosen.request_id)

    def owes(self, origin: NodeId, places: Iterable[StagePlace]) -> bool:
        """Whether it has more than its share while another one waits for its own."""
        held = Counter(place.origin for place in places)
        fair = self._fair(origin, held)
        return held[origin] > fair and self._is_awaited(origin, held, fair)

    def _fair(self, origin: NodeId, held: Counter[NodeId]) -> int:
        return max(1, self.capacity // len({*held, *self._wanting, *self._served, origin}))

    def _is_awaited(self, origin: NodeId, held: Counter[NodeId], fair: int) -> bool:
        """Another one was turned away, and has less than its share."""
        return any(held[each] < fair for each in self._wanting if each != origin)

    def _add_up(self, taken: Sequence[StagePlace], now_s: float) -> None:
        passed_s = max(0.0, now_s - self._used_until_s)
        left, holders = 0.5 ** (passed_s / FADES_S), {place.origin for place in taken}
        self._used_s = {
            each: used_s * left
            for each, used_s in self._used_s.items()
            if each in holders or used_s * left >= 1.0
        }
        for place in taken:
            self._count(place.origin, min(passed_s, max(0.0, now_s - place.assigned_s)))
        seen = {place.request_id: place for place in taken}
        for request_id, place in self._seen.items():
            if request_id not in seen:
                self._count(place.origin, max(0.0, LEAST_USE_S - (self._used_until_s - place.assigned_s)))
        self._seen = seen
        self._used_until_s += passed_s

    def _count(self, origin: NodeId, used_s: float) -> None:
        self._used_s[origin] = self._used_s.get(origin, 0.0) + used_s

    def _n_origins(self, origin: NodeId, held: Counter[NodeId]) -> int:
        return len({*held, *self._wanting, origin})

    def _n_ahead(self, origin: NodeId, held: Counter[NodeId]) -> int:
        """Origins that wait, have none, and have used less, or as little and were turned away before. 0 where
        there are places for all."""
        if self._n_origins(origin, held) <= self.capacity:
            return 0
        mine_s, n_ahead, is_before = self._used_s.get(origin, 0.0), 0, origin in self._wanting
        for each in self._wanting:
            if each == origin:
                is_before = False
            elif not held[each]:
                theirs_s = self._used_s.get(each, 0.0)
                n_ahead += theirs_s < mine_s or (
                    theirs_s == mine_s and (is_before or origin not in self._wanting)
                )
        return n_ahead

    def _at_the_end_of_their_turn(
        self, origin: NodeId, taken: Sequence[StagePlace], held: Counter[NodeId], now_s: float
    ) -> list[StagePlace]:
        n_origins = self._n_origins(origin, held)
        if held[origin] or n_origins <= self.capacity:
            return []
        turn_s = max(SHORTEST_TURN_S, TURN_S * self.capacity / n_origins)
        least_s = self._used_s.get(origin, 0.0) + turn_s / 2
        return [
            place
            for place in taken
            if now_s - place.assigned_s >= turn_s and self._used_s.get(place.origin, 0.0) >= least_s
        ]

    def _granted(self, origin: NodeId, now_s: float, instead_of: str | None = None) -> StageAdmission:
        self._wanting.pop(origin, None)
        if len(self._served) < WANTING_MAX or origin in self._served:
            self._served[origin] = now_s + WANT_S
        return StageAdmission(is_granted=True, instead_of=instead_of)


@dataclass(slots=True)
class SeenOrigins:
    """Remembers since when origins have sent requests."""

    _seen_s: OrderedDict[NodeId, tuple[float, float]] = field(default_factory=OrderedDict)
    """When each came first, and last; who came last stands at the end."""

    def asked(self, origin: NodeId, now_s: float) -> None:
        first_s, last_s = self._seen_s.get(origin, (now_s, now_s))
        if now_s - last_s > MISSED_S:
            first_s = now_s
        self._seen_s[origin] = first_s, now_s
        self._seen_s.move_to_end(origin)
        if len(self._seen_s) > SEEN_MAX:
            self._seen_s.popitem(last=False)

    def is_known(self, origin: NodeId, now_s: float) -> bool:
        seen = self._seen_s.get(origin)
        return seen is not None and now_s - seen[0] >= KNOWN_S


@dataclass(slots=True)
class OriginShares:
    """Divides `capacity` places among origins that have earned trust and one party of all the others. In that
    party, origins that have been here for a minute share with one party of the rest."""

    capacity: int
    _among_all: PartyShares = field(init=False)
    _seen_origins: SeenOrigins = field(default_factory=SeenOrigins)

    def __post_init__(self) -> None:
        among_newcomers = PartyShares(self.capacity, Shares(self.capacity))
        self._among_all = PartyShares(self.capacity, among_newcomers)

    def ask(
        self, origin: NodeId, places: Iterable[StagePlace], now_s: float, has_earned: Stands
    ) -> StageAdmission:
        """`places`: those that are taken. `has_earned`: whether a node has shown that it is worth trust."""
        self._seen_origins.asked(origin, now_s)
        is_known = partial(self._seen_origins.is_known, now_s=now_s)
        return self._among_all.ask(origin, places, now_s, (has_earned, is_known))


@dataclass(slots=True)
class PartyShares:
    """Divides `capacity` places among origins that count by themselves and one party of all the others."""

    capacity: int
    _newcomers: Shares | PartyShares
    """Among themselves; its capacity is what they may have now."""
    _parties: Shares = field(init=False)

    def __post_init__(self) -> None:
        self._parties = Shares(self.capacity)

    def limit(self, capacity: int) -> None:
        """So many places there are now."""
        self.capacity = capacity
        self._parties.limit(capacity)

    def ask(
        self, origin: NodeId, places: Iterable[StagePlace], now_s: float, stands: Sequence[Stands] = ()
    ) -> StageAdmission:
        """`stands`: the first says who counts by itself here, the next ones that of the others."""
        has_earned, *of_others = stands
        taken = list(places)
        of_newcomers = [place for place in taken if not has_earned(place.origin)]
        ids = {place.request_id for place in of_newcomers}
        by_party = [replace(each, origin=NEWCOMERS) if each.request_id in ids else each for each in taken]
        if has_earned(origin):
            return self._parties.ask(origin, by_party, now_s)
        for_all = self._parties.ask(NEWCOMERS, by_party, now_s)
        takes_from_others = for_all.is_granted and for_all.instead_of not in {None, *ids}
        # Without a place more they can only take one from another newcomer.
        n_places = len(of_newcomers) + takes_from_others
        if for_all.is_granted and for_all.instead_of is None:
            n_places = self.capacity - (len(taken) - len(of_newcomers))
        self._newcomers.limit(n_places)
        if not n_places or self._parties.owes(NEWCOMERS, by_party):
            return StageAdmission(is_granted=False)
        own = self._newcomers.ask(origin, of_newcomers, now_s, of_others)
        if own.is_granted and own.instead_of is None:
            return for_all
        return own


def may_be_given_up(place: StagePlace, now_s: float, *, is_for_share: bool) -> bool:
    """`is_for_share`: its origin has more than its share, and who asks has less."""
    held_s = now_s - place.assigned_s
    if place.has_begun:
        return is_for_share and held_s >= TURN_S
    return is_for_share or held_s >= FIRST_JOB_S
