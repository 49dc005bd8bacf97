"""Tokens/s of many streams over a cut, simulated: how first stages split decode steps, and what it is worth.

    python -m bench.cohorts

What is real: the planner of batches and the cohorts of a worker (`swarmllm_workers.schedule`). What is made
up: how long a step takes (`emulated_steps.py`, times `--scale`), how far nodes are from each other, and 3 %
of noise. Each stream has a prompt and an answer of random lengths, and another one takes its place when it
ends. Three ways to run the same streams:

- as it comes: a batch takes all that is here, and each row leaves when it is ready;
- together: the rows of a batch leave together;
- cohorts: the same, and a first stage splits what is here.

"Bound" is what stages that never wait would do: streams / stages rows in each batch of the slowest stage.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np

from bench.common.emulated_steps import step_s
from bench.common.figures import Figure, publish, ratios
from swarmllm_workers.schedule.cohorts import Cohorts
from swarmllm_workers.schedule.planner import Demand, Planner

ROW_LEAVES_S = 0.0002
"""Accepting one row's result: sampling, encoding, sending."""
N_LAYERS = 24
CHUNK = 128
NOISE = 0.03
STREAMS = (1, 8, 16, 32)
SPREAD_S, WARM_UP_S, LASTS_S = 0.5, 5.0, 35.0
"""Streams begin in the first, figures do not count the second; times `--scale`."""
WAYS = ("as it comes", "together", "cohorts")
UNITS = ("tokens/s", "p95 ms between tokens")

Bounds = tuple[int, int]
"""Shortest and longest, in rows or tokens; lengths are log-uniform between them."""
Load = tuple[Bounds, Bounds]
"""Prompts and answers."""
LOADS: dict[str, Load] = {
    "decode only": ((8, 8), (10**6, 10**6)),
    "short answers": ((8, 32), (16, 256)),
    "mixed prompts": ((16, 1024), (32, 512)),
}


@dataclass(frozen=True)
class Shape:
    """A pipeline: layers and speed of each node, the seconds from each to the next, and the length of
    steps."""

    layers: tuple[int, ...]
    speeds: tuple[float, ...]
    delay_s: float
    scale: float

    def step_s(self, stage: int, n_rows: float) -> float:
        return step_s(n_rows) * self.scale * self.layers[stage] / N_LAYERS / self.speeds[stage]

    def range(self, stage: int) -> tuple[int, int]:
        start = sum(self.layers[:stage])
        return start, start + self.layers[stage]

    def bound(self, n_streams: int) -> float:
        """Tokens/s of stages that never wait; of one stream, of stages that take turns."""
        n_stages = len(self.layers)
        if n_streams < n_stages:
            return n_streams / sum(self.step_s(stage, 1) for stage in range(n_stages))
        n_rows = n_streams / n_stages
        return n_rows / max(self.step_s(stage, n_rows) for stage in range(n_stages))


@dataclass
class Stream:
    name: str
    n_prompt: int
    """Rows of it that the last stage has not had."""
    n_answer: int
    n_unsent: int = field(init=False)
    told_s: list[float] = field(default_factory=list)
    """When its tokens came."""

    def __post_init__(self) -> None:
        self.n_unsent = self.n_prompt


@dataclass
class Work:
    stream: Stream
    n_rows: int
    is_prompt: bool
    n_done: int = 0


class Node:
    """A worker: what it has to do, and the code that chooses from it."""

    def __init__(self, shape: Shape, stage: int, *, splits: bool) -> None:
        self.stage = stage
        self.arrived: deque[Work] = deque()
        """While it was busy."""
        self.is_busy = False
        self._range = shape.range(stage)
        self._planner = Planner()
        self._cohorts = Cohorts(N_LAYERS) if splits and not stage else None
        self._works: dict[int, Work] = {}
        self._n_works = 0
        self._round: deque[dict[int, int]] = deque()

    def add(self, work: Work, now: float, *, is_idle: bool) -> None:
        if self._cohorts is not None and not work.is_prompt:
            self._cohorts.arrived(self._range, work.stream.name, work.n_rows, now, is_idle=is_idle)
        self._n_works += 1
        self._works[self._n_works] = work

    def next_batch(self, now: float) -> dict[int, int]:
        """Rows of each work in it, of this round or of another one; none: nothing is here."""
        if not self._round:
            for batch in self._planner.schedule(self._demands(), self._limits(now)):
                self._planner.postprocess(batch)
                self._round.append({share.key: share.n_rows for share in batch.shares})
        return self._round.popleft() if self._round else {}

    def _demands(self) -> list[Demand]:
        demands: list[Demand] = []
        seen: set[str] = set()
        for key, work in self._works.items():
            if work.stream.name not in seen:
                seen.add(work.stream.name)
                n_rows = work.n_rows - work.n_done
                demands.append(Demand(key, self._lane(work), n_rows, is_decode=not work.is_prompt))
        return demands

    def _lane(self, work: Work) -> Hashable:
        """At the first stage prompts come as rows of the embedding, decode steps as tokens."""
        return not self.stage and not work.is_prompt

    def _limits(self, now: float) -> dict[Hashable, int]:
        limit = None if self._cohorts is None else self._cohorts.n_rows_max(self._range, now)
        return {} if limit is None else {True: limit}

    def done(self, batch: dict[int, int], began_at: float, now: float) -> list[Work]:
        """The batch has run: which works are over."""
        steps = [self._works[key].stream.name for key in batch if not self._works[key].is_prompt]
        self._planner.ran(len(steps), len(batch) - len(steps), now - began_at)
        if self._cohorts is not None and steps:
            is_pure = len(steps) == len(batch)
            self._cohorts.left(self._range, steps, now - began_at, now, is_pure=is_pure)
        over: list[Work] = []
        for key, n_rows in batch.items():
            work = self._works[key]
            work.n_done += n_rows
            if work.n_done == work.n_rows:
                over.append(work)
                del self._works[key]
                self._planner.forget(key)
        return over

    def forget(self, stream: Stream) -> None:
        if self._cohorts is not None:
            self._cohorts.forget(stream.name)


class Pipeline:
    def __init__(self, shape: Shape, way: str, seed: int, prompts: Bounds, answers: Bounds) -> None:
        self.shape, self.together = shape, way != "as it comes"
        self.nodes = [Node(shape, stage, splits=way == "cohorts") for stage in range(len(shape.layers))]
        self.now = 0.0
        self.streams: list[Stream] = []
        self._random = Random(seed)
        self._prompts, self._answers = prompts, answers
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = 0

    def run(self, n_streams: int, spread_s: float, until_s: float) -> None:
        """Each stream begins at a random moment of the first `spread_s`."""
        for _ in range(n_streams):
            self._at(self._random.uniform(0, spread_s), self._begin)
        while self._events and self._events[0][0] <= until_s:
            self.now, _, happens = heapq.heappop(self._events)
            happens()

    def _at(self, at: float, happens: Callable[[], None]) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (at, self._n_events, happens))

    def _log_uniform(self, bounds: Bounds) -> int:
        low, high = map(math.log, bounds)
        return round(math.exp(self._random.uniform(low, high)))

    def _begin(self) -> None:
        n_prompt, n_answer = self._log_uniform(self._prompts), self._log_uniform(self._answers)
        stream = Stream(str(len(self.streams)), n_prompt, n_answer)
        self.streams.append(stream)
        for _ in range(len(self.nodes) + 1):
            self._send_chunk(stream)

    def _send_chunk(self, stream: Stream) -> None:
        n_rows = min(CHUNK, stream.n_unsent)
        if n_rows > 0:
            stream.n_unsent -= n_rows
            self._arrive(self.nodes[0], Work(stream, n_rows, is_prompt=True))

    def _arrive(self, node: Node, work: Work) -> None:
        if node.is_busy:
            node.arrived.append(work)
            return
        node.add(work, self.now, is_idle=True)
        # What comes at the same moment is read before a step begins.
        node.is_busy = True
        self._at(self.now, partial(self._go_on, node))

    def _go_on(self, node: Node) -> None:
        while node.arrived:
            node.add(node.arrived.popleft(), self.now, is_idle=False)
        batch = node.next_batch(self.now)
        node.is_busy = bool(batch)
        if batch:
            lasts_s = self.shape.step_s(node.stage, sum(batch.values()))
            lasts_s *= max(0.5, self._random.gauss(1, NOISE))
            self._at(self.now + lasts_s, partial(self._computed, node, batch, self.now))

    def _computed(self, node: Node, batch: dict[int, int], began_at: float) -> None:
        over_at = self.now + ROW_LEAVES_S * len(batch)
        for index, work in enumerate(node.done(batch, began_at, over_at)):
            leaves_at = over_at if self.together else self.now + ROW_LEAVES_S * (index + 1)
            self._at(leaves_at, partial(self._leave, node.stage, work))
        self._at(over_at, partial(self._go_on, node))

    def _leave(self, stage: int, work: Work) -> None:
        stream, there = work.stream, self.now + self.shape.delay_s
        if stage + 1 < len(self.nodes):
            onward = Work(stream, work.n_rows, work.is_prompt)
            self._at(there, partial(self._arrive, self.nodes[stage + 1], onward))
            return
        if work.is_prompt:
            self._at(there, partial(self._send_chunk, stream))
            stream.n_prompt -= work.n_rows
            if stream.n_prompt > 0:
                return
        stream.told_s.append(self.now)
        if len(stream.told_s) < stream.n_answer:
            self._at(there, partial(self._arrive, self.nodes[0], Work(stream, 1, is_prompt=False)))
            return
        self.nodes[0].forget(stream)
        self._at(there, self._begin)


def measure(shape: Shape, way: str, n_streams: int, seed: int, load: Load) -> tuple[float, float]:
    """Tokens/s and the 95th percentile of milliseconds between tokens."""
    scale = shape.scale
    pipeline = Pipeline(shape, way, seed, *load)
    pipeline.run(n_streams, SPREAD_S * scale, LASTS_S * scale)
    after_s = WARM_UP_S * scale
    gaps_s = [
        b - a for stream in pipeline.streams for a, b in itertools.pairwise(stream.told_s) if a > after_s
    ]
    n_tokens = sum(at > after_s for stream in pipeline.streams for at in stream.told_s)
    return n_tokens / (LASTS_S - WARM_UP_S) / scale, float(np.percentile(gaps_s, 95)) * 1000


def even(n_stages: int, delay_s: float, scale: float) -> Shape:
    return Shape((N_LAYERS // n_stages,) * n_stages, (1.0,) * n_stages, delay_s, scale)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=10.0, help="how many times as long steps take")
    parser.add_argument("--delay-ms", type=float, default=0.5, help="from each node to the next")
    parser.add_argument("--rounds", type=int, default=3, help="random seeds")
    arguments = parser.parse_args()
    delay_s, scale = arguments.delay_ms / 1000, arguments.scale
    shapes = {
        "2 nodes": even(2, delay_s, scale),
        "4 nodes": even(4, delay_s, scale),
        "2 nodes, one half as fast, 16 + 8 layers": Shape((16, 8), (1.0, 0.5), delay_s, scale),
        "4 nodes, the third half as fast": Shape((6,) * 4, (1.0, 1.0, 0.5, 1.0), delay_s, scale),
        "4 nodes, the first half as fast": Shape((6,) * 4, (0.5, 1.0, 1.0, 1.0), delay_s, scale),
    }
    rows: list[tuple[Figure, Figure | None]] = []
    for load_name, load in LOADS.items():
        for shape_name, shape in shapes.items():
            for n_streams in STREAMS:
                rows += compare(
                    f"{n_streams} streams, {shape_name}, {load_name}",
                    shape,
                    n_streams,
                    load,
                    arguments.rounds,
                )
    publish(
        f"cohorts-{arguments.delay_ms:g}-ms",
        f"python -m bench.cohorts --scale {scale:g} --delay-ms {arguments.delay_ms:g} "
        f"--rounds {arguments.rounds}",
        rows,
    )


def compare(
    name: str, shape: Shape, n_streams: int, load: Load, n_rounds: int
) -> list[tuple[Figure, Figure | None]]:
    """A row for each way and unit; ratios are to the first way."""
    found = {(way, unit): Figure(f"{name}: {way}", unit) for unit in UNITS for way in WAYS}
    for seed in range(n_rounds):
        for way in WAYS:
            for unit, value in zip(UNITS, measure(shape, way, n_streams, seed, load), strict=True):
                found[way, unit].values.append(value)
    rows: list[tuple[Figure, Figure | None]] = []
    for (way, unit), figure in found.items():
        rows.append((figure, None if way == WAYS[0] else ratios(figure, found[WAYS[0], unit])))
    bound = Figure(f"{name}: cohorts / bound", "x")
    bound.values = [value / shape.bound(n_streams) for value in found[WAYS[-1], UNITS[0]].values]
    return [*rows, (bound, None)]


if __name__ == "__main__":
    main()
