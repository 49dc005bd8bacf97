"""Splits the decode steps at the first stage of a pipeline into cohorts: a pure core, without a clock.

A stage that runs whatever has arrived keeps every clump of rows that chance has made. Seven of eight
streams that reach it together leave it together, and the other stages have nothing to do meanwhile. A
pipeline is full when its stages run different rows at the same time: as many cohorts as a row's way around
the pipeline takes steps of the first stage, all of about one size. So the first stage gives a batch no more
rows than a cohort has. It never waits for rows, and rows that do not fit go with the next batch: nobody
holds up anybody else's rows.

How many steps the way takes is measured. A layer of another stage is expected to take as long as one does
here, and what is left of the shortest way is the delay of the network and of slower nodes. Rows that come
while a batch runs may have been back for long: they say only how long their way takes at most, which is all
that is known where other nodes are faster.

Later stages run what has arrived. Behind a slow node cohorts join, and that is right: a batch of all that
wait costs it less than one batch each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

SAMPLES: Final = 32
"""Batches and returns of rows that an estimate goes back to."""
DELAY_BATCHES: Final = 32
"""For how many batches a delay counts. Delays are seen only by a stage that is idle at times, so one that
has none of late tries whether it needs fewer cohorts."""
LOW: Final = 0.25
"""The part of the longest possible ways that are taken to be shorter than the true way."""
ROUNDING: Final = 0.5
"""The part of a step for which there is one more cohort. More of them than steps cost each row the fixed
part of a step, fewer leave stages idle."""
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


@dataclass(slots=True)
class _Stage:
    members: dict[str, _Member] = field(default_factory=dict)
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    aways_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    ways: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Of each return, how many steps the way took at most."""
    n_batches: int = 0
    delays: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """(batches until then, seconds) of returns to an idle worker: what the way took beside layers."""


class Cohorts:
    """Of each first stage that one worker has; all times in seconds of one clock that never goes back."""

    def __init__(self, n_layers: int) -> None:
        """`n_layers` of the whole model."""
        self._n_layers = n_layers
        self._stages: dict[Layers, _Stage] = {}

    def arrived(self, layers: Layers, request_id: str, n_rows: int, now: float, *, is_idle: bool) -> None:
        """A decode step has come. `is_idle`: nothing ran here when it came, so it has come just now."""
        stage = self._stages.setdefault(layers, _Stage())
        member = stage.members.get(request_id)
        if member is None:
            stage.members[request_id] = _Member(n_rows, now)
            return
        if member.left_at is not None:
            away_s = now - member.left_at
            stage.aways_s.append(away_s)
            if member.step_s > 0:
                stage.ways.append(1 + away_s / member.step_s)
                if is_idle:
                    elsewhere_s = self._elsewhere(layers) * member.step_s
                    stage.delays.append((stage.n_batches, max(0.0, away_s - elsewhere_s)))
        member.n_rows, member.seen_at, member.left_at = n_rows, now, None

    def left(
        self, layers: Layers, request_ids: Iterable[str], step_s: float, now: float, *, is_pure: bool
    ) -> None:
        """A batch with decode steps of these has run, and their rows are on their way. `is_pure`: nothing
        else was in it."""
        stage = self._stages.get(layers)
        if stage is None:
            return
        stage.n_batches += 1
        if is_pure:
            stage.steps_s.append(step_s)
        for request_id in request_ids:
            member = stage.members.get(request_id)
            if member is not None:
                member.seen_at = member.left_at = now
                member.step_s = step_s if is_pure else 0.0

    def forget(self, request_id: str) -> None:
        """The request is over."""
        for layers, stage in list(self._stages.items()):
            if stage.members.pop(request_id, None) is not None and not stage.members:
                del self._stages[layers]

    def n_rows_max(self, layers: Layers, now: float) -> int | None:
        """Rows of decode steps that one batch takes at most; None: all that are here."""
        stage = self._stages.get(layers)
        if stage is None:
            return None
        self._drop_late(stage, now)
        n_rows = sum(member.n_rows for member in stage.members.values())
        return max(1, math.ceil(n_rows / self._n_cohorts(layers, stage)))

    def _n_cohorts(self, layers: Layers, stage: _Stage) -> int:
        way = 1 + self._elsewhere(layers)
        delays_s = [delay_s for at, delay_s in stage.delays if stage.n_batches - at <= DELAY_BATCHES]
        if delays_s and stage.steps_s:
            way += min(delays_s) / median(stage.steps_s)
        if stage.ways:
            way = min(way, sorted(stage.ways)[int(LOW * len(stage.ways))])
        return max(1, math.floor(way + ROUNDING))

    def _elsewhere(self, layers: Layers) -> float:
        """Layers of the other stages for each one of this."""
        n_here = layers[1] - layers[0]
        return (self._n_layers - n_here) / n_here

    def _drop_late(self, stage: _Stage, now: float) -> None:
        """Rows that a stage holds back are no reason to make batches larger."""
        usual_s = median(stage.aways_s) if stage.aways_s else 0.0
        patience_s = max(MEMBER_AWAY_MIN_S, MEMBER_AWAY * usual_s)
        late = [key for key, member in stage.members.items() if now - member.seen_at > patience_s]
        for key in late:
            del stage.members[key]
