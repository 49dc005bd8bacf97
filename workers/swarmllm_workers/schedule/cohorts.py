"""Splits the decode steps at the first stage of a pipeline into cohorts: a pure core, without a clock.

A stage that runs whatever has arrived keeps every clump of rows that chance has made. Seven of eight streams
that reach it together leave it together, and the other stages have nothing to do meanwhile. A pipeline is
full when its stages run different rows at the same time. So the first stage gives a batch no more rows than
one cohort has. It never waits for rows, and rows that do not fit go with the next batch: nobody holds up
anybody else's rows.

A row's next token comes after its way around the pipeline, but not before the first stage has run all other
cohorts. Large cohorts make the way long, small ones make many batches, each of which has its fixed cost. The
size is chosen for which the longer of the two times is the shortest. Times of steps are measured for each
number of rows. A layer of another stage is expected to take as long as one does here, and what the shortest
ways take beside is delay: of the network, and of slower nodes.

While too many clumps are on their way each waits for others somewhere, and that looks like delay. So now and
then delay counts as none for some batches, in which clumps join, and is then measured again.

Later stages run what has arrived. Behind a slow node cohorts join, and that is right: a batch of all that
wait costs it less than one batch each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

SAMPLES: Final = 32
"""Returns of rows that an estimate goes back to."""
LOW: Final = 0.25
"""The part of returns that are taken to have been sooner than the next one will be."""
NEWEST: Final = 0.2
"""Weight of the newest step in the average of its row count."""
ROW_COUNTS_MAX: Final = 64
"""Row counts whose steps are remembered."""
JOIN_BATCHES: Final = 32
"""For so many batches delay counts as none."""
MEASURE_BATCHES: Final = 128
"""For so many it counts as it was measured, and for twice as many each time, before it is measured again."""
MEASURE_BATCHES_MAX: Final = 2048
WORTH: Final = 0.97
"""Of the time that larger cohorts take, what smaller ones may take to be chosen."""
MEMBER_AWAY: Final = 4.0
"""A request does not count any more once its row has been away for so many times the usual time."""
MEMBER_AWAY_MIN_S: Final = 1.0
"""It counts for so long in any case."""

Layers = tuple[int, int]
"""Of the stage: [start, end)."""


@dataclass(slots=True)
class _Member:
    n_rows: int
    seen_at: float
    left_at: float | None = None
    """None: its row is here, or was never run."""
    step_s: float = 0.0
    """Of the batch in which it left; 0: it says nothing, because pieces of prompts were in it."""


class _Steps:
    """Seconds of batches by their number of rows."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._counts: list[int] = []

    def add(self, n_rows: int, seconds: float) -> None:
        before_s = self._known.pop(n_rows, seconds)
        self._known[n_rows] = before_s + NEWEST * (seconds - before_s)
        if len(self._known) > ROW_COUNTS_MAX:
            del self._known[next(iter(self._known))]
        self._counts = sorted(self._known)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def seconds(self, n_rows: float) -> float:
        """Measured, or on the line between the two nearest that were; beyond the last one, half of its time
        is for its rows."""
        i = bisect_left(self._counts, n_rows)
        if 0 < i < len(self._counts):
            low, high = self._counts[i - 1], self._counts[i]
            part = (n_rows - low) / (high - low)
            return self._known[low] + part * (self._known[high] - self._known[low])
        nearest = self._counts[0] if not i else self._counts[-1]
        return self._known[nearest] * (0.5 + 0.5 * n_rows / nearest)


@dataclass(slots=True)
class _Stage:
    members: dict[str, _Member] = field(default_factory=dict)
    steps: _Steps = field(default_factory=_Steps)
    aways_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    ways: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Of each return, for how many steps it was away at most."""
    delay_s: float | None = None
    """The shortest that was measured; None: not known, or to be measured again."""
    n_batches: int = 0
    """Since it counts as none."""
    measure_batches: int = MEASURE_BATCHES
    n_rows_max: int = 0
    """As chosen for so many rows in all; 0: to be chosen."""
    n_rows: int = 0


class Cohorts:
    """The cohorts at each first stage of one worker. All times are seconds of one clock that never goes
    back."""

    def __init__(self, n_layers: int) -> None:
        """`n_layers` of the whole model."""
        self._n_layers = n_layers
        self._stages: dict[Layers, _Stage] = {}

    def arrived(self, layers: Layers, request_id: str, n_rows: int, now: float, *, is_idle: bool) -> None:
        """Record a decode step that has come. `is_idle`: nothing ran here when it came, so it waited for
        nothing."""
        stage = self._stages.setdefault(layers, _Stage())
        member = stage.members.get(request_id)
        if member is None:
            stage.members[request_id] = _Member(n_rows, now)
            return
        if member.left_at is not None:
            away_s = now - member.left_at
            stage.aways_s.append(away_s)
            if member.step_s > 0:
                stage.ways.append(away_s / member.step_s)
                if is_idle and stage.n_batches > JOIN_BATCHES:
                    delay_s = max(0.0, away_s - self._elsewhere(layers) * member.step_s)
                    stage.delay_s = delay_s if stage.delay_s is None else min(stage.delay_s, delay_s)
        member.n_rows, member.seen_at, member.left_at = n_rows, now, None

    def left(
        self, layers: Layers, request_ids: Iterable[str], step_s: float, now: float, *, is_pure: bool
    ) -> None:
        """Record a batch that has run with decode steps of these requests, whose rows leave now. `is_pure`:
        the batch had nothing else."""
        stage = self._stages.get(layers)
        if stage is None:
            return
        n_rows = 0
        for request_id in request_ids:
            member = stage.members.get(request_id)
            if member is not None:
                n_rows += member.n_rows
                member.seen_at = member.left_at = now
                member.step_s = step_s if is_pure else 0.0
        if is_pure and n_rows:
            stage.steps.add(n_rows, step_s)
        stage.n_rows_max = 0
        stage.n_batches += 1
        if stage.n_batches > JOIN_BATCHES + stage.measure_batches:
            stage.measure_batches = min(2 * stage.measure_batches, MEASURE_BATCHES_MAX)
            stage.n_batches, stage.delay_s = 0, None

    def forget(self, request_id: str) -> None:
        """End the request."""
        for layers, stage in list(self._stages.items()):
            if stage.members.pop(request_id, None) is not None and not stage.members:
                del self._stages[layers]

    def n_rows_max(self, layers: Layers, now: float) -> int | None:
        """Rows of decode steps that one batch takes at most; None: all that are here."""
        stage = self._stages.get(layers)
        if stage is None:
            return None
        self._drop_late(stage, now)
        n_rows = max(1, sum(member.n_rows for member in stage.members.values()))
        if not stage.n_rows_max or stage.n_rows != n_rows:
            stage.n_rows, stage.n_rows_max = n_rows, self._choose(layers, stage, n_rows)
        return stage.n_rows_max

    def _choose(self, layers: Layers, stage: _Stage, n_rows: int) -> int:
        elsewhere = self._elsewhere(layers)
        if not stage.steps:
            return math.ceil(n_rows / math.floor(1.5 + elsewhere))
        steps, delay_s = stage.steps, stage.delay_s or 0.0
        if stage.ways:
            elsewhere = min(elsewhere, sorted(stage.ways)[int(LOW * len(stage.ways))])
        best, best_s, size = n_rows, math.inf, n_rows
        while size > 0:
            n_cohorts = math.ceil(n_rows / size)
            size = math.ceil(n_rows / n_cohorts)
            step_s, all_s = steps.seconds(size), n_cohorts * steps.seconds(n_rows / n_cohorts)
            if all_s >= best_s:
                break
            longest_s = max(step_s + elsewhere * step_s + delay_s, all_s)
            if longest_s < WORTH * best_s:
                best, best_s = size, longest_s
            size -= 1
        return best

    def _elsewhere(self, layers: Layers) -> float:
        """Layers of the other stages for each one of this."""
        n_here = layers[1] - layers[0]
        return (self._n_layers - n_here) / n_here

    def _drop_late(self, stage: _Stage, now: float) -> None:
        """Rows that a stage holds back are no reason to make batches larger."""
        usual_s = median(stage.aways_s) if stage.aways_s else 0.0
        timeout_s = max(MEMBER_AWAY_MIN_S, MEMBER_AWAY * usual_s)
        late = [key for key, member in stage.members.items() if now - member.seen_at > timeout_s]
        for key in late:
            del stage.members[key]
