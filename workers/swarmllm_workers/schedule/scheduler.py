"""Schedules the works: which rows run next, in which batch, and where the results go.

A round (`step`) is: resume what was parked, choose batches, run each, accept its results, drop what is over.
There is one way to run a batch. The planner (`planner.py`) says which batches there are; a decode step that
nobody shares needs no plan. A step that came by a link and has the worker to itself does not come here
(`lone_steps.py`).

Of the works of one request only the oldest runs: its Forwards are in order. Whatever goes wrong with one
work is that work's error; a batch that fails as a whole is run again one work at a time, so that only the
guilty pay. A work whose layers have to be cut first waits for that, and the others go on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.libllama import WATCHED_ROWS_MIN
from swarmllm_workers.engine.operation import Operation
from swarmllm_workers.engine.ranges import Range, Route
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.errors import CallError, Interrupted
from swarmllm_workers.schedule.cohorts import Cohorts
from swarmllm_workers.schedule.owner_shares import work_of
from swarmllm_workers.schedule.planner import Batch, Demand, Planner
from swarmllm_workers.schedule.read_ahead import ReadAhead
from swarmllm_workers.schedule.work import Work

OnError = Callable[[Work, Exception], None]
ROOM_TIMEOUT_S: Final = 10.0
"""How long a work waits for cells that other requests hold, of which none is sure to end."""


class Outlet(Protocol):
    """Sends the results of works."""

    def cork(self) -> None:
        """Hold the results from now on."""

    def uncork(self) -> None:
        """Send the held results, in one piece per receiver."""


@dataclass(frozen=True)
class _Ready:
    """A work whose turn may come in this round."""

    work: Work
    route: Route
    demand: Demand


@dataclass(slots=True)
class _Batch:
    """What runs: works, and of each the rows that there is room for."""

    route: Route
    works: list[Work]
    spans: list[Span]
    is_next_row: bool = False
    """It is one row, with which nothing has to be checked or forgotten."""


class Scheduler:
    def __init__(
        self,
        engine: Engine,
        planner: Planner,
        on_error: OnError,
        read_ahead: ReadAhead | None = None,
        cohorts: Cohorts | None = None,
        outlet: Outlet | None = None,
    ) -> None:
        self._engine = engine
        self._cohorts = cohorts
        self._outlet = outlet
        self._read_ahead = read_ahead
        self._planner = planner
        self._on_error = on_error
        self.works: dict[int, Work] = {}
        """In progress, the oldest first. Others read it as an attribute, because each function that is called
        between two decode steps costs microseconds (see `lone_steps`)."""
        self._n_works = 0
        self._starved_since: dict[int, float] = {}
        """Works that have found no room."""
        self.is_starved = False
        """There are works, and for none was there room in the last round."""
        self._being_cut: set[Range] = set()
        """Layers for which segments are being made."""
        self._uncut: set[int] = set()
        """Works that wait for that, as of the last round."""

    @property
    def is_parked(self) -> bool:
        """Whether there is work, and all of it waits for the grammar process or for its layers to be cut."""
        return bool(self.works) and all(
            work.is_parked or key in self._uncut for key, work in self.works.items()
        )

    def add(self, work: Work, *, is_idle: bool = False) -> None:
        """`is_idle`: nothing ran here when it came."""
        if self._cohorts is not None and work.goes_around:
            self._cohorts.arrived(
                work.layers, work.request_id, work.n_waiting, work.arrived_at, is_idle=is_idle
            )
        self._n_works += 1
        self.works[self._n_works] = work

    def of_request(self, request_id: str) -> list[Work]:
        """The works of a request, the oldest first."""
        return [work for work in self.works.values() if work.request_id == request_id]

    def step(self) -> None:
        """One round: every work that can has its turn, in as few batches as possible."""
        self.is_starved = bool(self._starved_since)
        if self._uncut:
            self._uncut.clear()
        for work in self.works.values():
            if work.is_parked:
                self._resume(work)
        for batch in self._choose():
            self._run(batch)
        self.sweep()

    def sweep(self) -> None:
        """Remove the works that are over."""
        over = [key for key, work in self.works.items() if work.is_finished]
        for key in over:
            del self.works[key]
            self._starved_since.pop(key, None)
            self._planner.forget(key)

    def _resume(self, work: Work) -> None:
        try:
            work.go_on()
        except Exception as error:
            self._fail(work, error)

    def _choose(self) -> Iterable[_Batch]:
        """The batches of this round, each when the one before has run."""
        if len(self.works) == 1 and not self.is_starved:
            (work,) = self.works.values()
            lone = self._lone_step(work)
            if lone is not None:
                return (lone,)
        return self._planned()

    def _planned(self) -> Iterator[_Batch]:
        ready = self._ready()
        limits = self._limits(ready.values())
        for planned in self._planner.schedule([each.demand for each in ready.values()], limits):
            batch = self._make_room(planned, ready)
            if batch is not None:
                yield batch

    def _limits(self, ready: Iterable[_Ready]) -> dict[Hashable, int]:
        """Rows that a batch of a lane takes at most, where decode steps are to run as cohorts."""
        limits: dict[Hashable, int] = {}
        if self._cohorts is None:
            return limits
        now = time.perf_counter()
        for each in ready:
            if each.work.goes_around and each.demand.lane not in limits:
                n_rows_max = self._cohorts.n_rows_max(each.work.layers, now)
                if n_rows_max is not None:
                    limits[each.demand.lane] = n_rows_max
        return limits

    def _lone_step(self, work: Work) -> _Batch | None:
        """The decode step of the only work, for which there is room; None: a plan is needed."""
        if work.is_finished or work.is_parked:
            return None
        try:
            route = self._engine.known_route(work.request_id, *work.layers)
            if route is None or not self._has_slot(work):
                return None
            work.begin()
            span = work.decode_step(route)
            if span is None:
                return None
            is_next_row = len(span.data) == 1 and self._engine.can_step(route, span.slot, span.position)
            if not is_next_row:
                if len(span.data) > self._engine.prefixes.n_free(route.segments):
                    return None
                self._engine.rewind(route, span)
        except Exception as error:
            self._fail(work, error)
            return None
        return _Batch(route, [work], [span], is_next_row)

    def _ready(self) -> dict[int, _Ready]:
        ready: dict[int, _Ready] = {}
        requests: set[str] = set()
        for key, work in self.works.items():
            if work.request_id in requests or work.is_finished:
                continue
            requests.add(work.request_id)
            if work.is_parked:
                continue
            try:
                route = self._route_of(work)
                if route is None:
                    self._uncut.add(key)
                    continue
                if not self._has_slot(work):
                    continue
                work.begin()
                # Others' rows fill a batch with certainties: guesses are for who is alone.
                is_alone = len(self.works) == 1
                work.look_ahead(self._engine.prefixes.n_free(route.segments) if is_alone else 1)
            except Exception as error:
                self._fail(work, error)
                continue
            ready[key] = _Ready(work, route, self._demand(key, work, route))
        # Cutting for one may have closed segments in which another has no rows yet: it gets others next time.
        return {key: each for key, each in ready.items() if not each.route.is_closed}

    def _route_of(self, work: Work) -> Route | None:
        """None: its layers are being cut. Raises CallError."""
        layers = work.layers
        route = self._engine.known_route(work.request_id, *layers)
        if route is None and layers not in self._being_cut:
            self._being_cut.add(layers)
            self._engine.begin(self._cutting(layers))
            route = self._engine.known_route(work.request_id, *layers)
        return route

    def _cutting(self, layers: Range) -> Operation[None]:
        try:
            yield from self._engine.layers.cutting(*layers)
            yield from self._engine.layers.filling()
        except Exception as error:
            for work in [each for each in self.works.values() if each.layers == layers]:
                if not work.is_finished and self._is_without_segments(work):
                    self._fail(work, error)
        finally:
            self._being_cut.discard(layers)

    def _is_without_segments(self, work: Work) -> bool:
        try:
            return self._engine.known_route(work.request_id, *work.layers) is None
        except CallError:  # they are not even held any more, and the work's next turn says so
            return False

    def _has_slot(self, work: Work) -> bool:
        """False where a work that can wait has to: all slots are taken, one of them by a Generate, which
        ends by itself. Raises CallError no_slot."""
        slots = self._engine.slots
        if slots.get(work.request_id) is not None:
            return True
        self._engine.make_slot(work.request_id)
        if work.can_restart and slots.is_full and slots.get(work.request_id) is None:
            holders = (other for other in self.works.values() if other.can_restart)
            if any(slots.get(other.request_id) is not None for other in holders):
                return False
        slots.take(work.request_id)
        return True

    def _demand(self, key: int, work: Work, route: Route) -> Demand:
        slot = self._engine.slots.take(work.request_id)
        return Demand(
            key,
            _lane(key, work, route),
            work.n_waiting,
            work.is_decode,
            n_cells=_n_cells(route, slot),
            can_restart=work.can_restart,
            rows_of_piece=work.rows_of_piece,
            can_wait=self._can_wait(key),
            owner=work.owner,
        )

    def _can_wait(self, key: int) -> bool:
        since_s = self._starved_since.get(key)
        return since_s is None or time.monotonic() - since_s < ROOM_TIMEOUT_S

    def _make_room(self, batch: Batch, ready: dict[int, _Ready]) -> _Batch | None:
        """What of a planned batch runs now; None where nothing does."""
        spans: dict[int, Span] = {}
        for share in batch.shares:
            work, route = ready[share.key].work, ready[share.key].route
            if work.is_finished:
                continue
            try:
                span = work.next_span(share.n_rows)
                self._engine.rewind(route, span)
            except Exception as error:
                self._fail(work, error)
            else:
                spans[share.key] = span
        self._planner.postprocess(batch)
        batch = Batch(batch.lane, tuple(share for share in batch.shares if share.key in spans))
        if not batch.shares:
            return None
        route = ready[batch.shares[0].key].route
        keys = {share.key for share in batch.shares}
        n_rows = sum(ready[key].work.n_waiting for key in keys if ready[key].demand.n_cells == 0)
        n_free = self._engine.make_room(route, max(batch.n_rows, n_rows))
        if batch.n_rows > n_free or any(each.demand.n_cells == 0 for each in ready.values()):
            batch = self._fit(batch, ready, n_free)
        chosen = [share.key for share in batch.shares]
        for key in keys.difference(chosen):
            self._starved_since.setdefault(key, time.monotonic())
        if not chosen:
            return None
        return _Batch(route, [ready[key].work for key in chosen], [spans[key] for key in chosen])

    def _fit(self, batch: Batch, ready: dict[int, _Ready], n_free: int) -> Batch:
        demands = [
            self._demand(key, each.work, each.route)
            for key, each in ready.items()
            if not each.work.is_finished and not each.route.is_closed
        ]
        fit = self._planner.preempt(batch, demands, n_free)
        for key in fit.restarted:
            self._engine.empty(ready[key].work.request_id)
            ready[key].work.restart()
        for key in fit.refused:
            self._fail(ready[key].work, self._engine.full(ready[key].route, ready[key].work.n_waiting))
        return fit.batch

    def _run(self, batch: _Batch) -> None:
        self.is_starved = False
        works = batch.works
        n_decodes = 1 if batch.is_next_row else sum(work.is_decode for work in works)
        started = time.perf_counter()
        try:
            results = self._compute(batch)
        except Interrupted:
            self._leave(batch)
            return
        except Exception as error:
            if len(works) == 1:
                self._fail(works[0], error)
                return
            for work, span in zip(works, batch.spans, strict=True):
                self._run(_Batch(batch.route, [work], [span]))
            return
        compute_s = time.perf_counter() - started
        self._planner.ran(n_decodes, len(works) - n_decodes, compute_s)
        if len(self.works) > 1:
            self._charge(batch)
        if self._starved_since:
            self._starved_since = {
                key: since_s
                for key, since_s in self._starved_since.items()
                if self.works.get(key) not in works
            }
        self._accept(works, results, compute_s)
        self._note_left(works, started)

    def _charge(self, batch: _Batch) -> None:
        used: defaultdict[str, float] = defaultdict(float)
        for work, span in zip(batch.works, batch.spans, strict=True):
            n_layers = work.layers[1] - work.layers[0]
            used[work.owner] += work_of(len(span.data), n_layers, is_step=work.is_decode)
        self._planner.charge(used)

    def _accept(self, works: list[Work], results: list[np.ndarray], compute_s: float) -> None:
        outlet = self._outlet if len(works) > 1 else None
        if outlet is not None:
            # The next stage would begin with the first of these alone.
            outlet.cork()
        try:
            for work, result in zip(works, results, strict=True):
                try:
                    work.accept(result, compute_s)
                except Exception as error:
                    self._fail(work, error)
        finally:
            if outlet is not None:
                outlet.uncork()

    def _note_left(self, works: list[Work], started: float) -> None:
        if self._cohorts is None:
            return
        steps = [work for work in works if work.goes_around]
        if steps:
            now = time.perf_counter()
            self._cohorts.left(
                steps[0].layers,
                [work.request_id for work in steps],
                now - started,
                now,
                is_pure=len(steps) == len(works),
            )

    def _compute(self, batch: _Batch) -> list[np.ndarray]:
        route, spans = batch.route, batch.spans
        if batch.is_next_row:
            span = spans[0]
            return [self._engine.step(route, span.slot, span.position, span.data, span.want)]
        if self._read_ahead is None or sum(len(span.data) for span in spans) < WATCHED_ROWS_MIN:
            return self._engine.run(route, spans)
        self._read_ahead.begin(work.request_id for work in batch.works)
        try:
            return self._engine.run(route, spans)
        finally:
            self._read_ahead.end()

    def _leave(self, batch: _Batch) -> None:
        """All of these are about to be cancelled. A state that cannot be rolled back is of no use to
        them."""
        if not any(segment.is_recurrent for segment in batch.route.segments):
            return
        for work in batch.works:
            self._engine.empty(work.request_id)
            if work.can_restart:
                work.restart()

    def _fail(self, work: Work, error: Exception) -> None:
        work.is_finished = True
        if work.can_restart:
            self._engine.release(work.request_id)
        else:
            self._engine.release_if_empty(work.request_id)
        self._on_error(work, error)


def _n_cells(route: Route, slot: int) -> int:
    """Cells that become free when the slot is emptied; at least 1 where it has rows at all."""
    if not min(segment.lengths[slot] for segment in route.segments):
        return 0
    return max(1, min(segment.n_alone(slot) for segment in route.segments))


def _lane(key: int, work: Work, route: Route) -> Hashable:
    """Who may share a batch: works in the same segments that feed them the same kind of rows.

    Left out are works that want to be alone, and models with recurrent state: libllama splits such a batch by
    sequence, and the tap reads one piece only.
    """
    if work.wants_alone or any(segment.is_recurrent for segment in route.segments):
        return key
    return tuple(id(segment) for segment in route.segments), work.has_tokens
