"""Tokens/s of one stream over a cut model, simulated: one window of guesses at a time, and several.

    python -m bench.windows

What is real: the guesser of the last stage, its cost gate, the jobs under way and their order in a stage
(`swarmllm_workers.speculation`, `ring/job_order.py`). What is made up: what stages take for a step
(`--step-ms` of all stages together, and a `--row-cost` part of it for each further row of a batch), the way
from each node to the next, and which guesses are right: each one with the same odds, or all of a passage and
none of the next ("passages" of 40 tokens). Nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np

from bench.common.figures import Figure, publish, ratios
from swarmllm_proto.limits import JOBS_UNDER_WAY_MAX, WINDOW_ROWS_MAX
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.ring.job_order import JobOrder
from swarmllm_workers.speculation.chain_guesser import ChainGuesser, JobLimits
from swarmllm_workers.speculation.cost_gate import CostGate
from swarmllm_workers.speculation.drafting import Draft, Worth
from swarmllm_workers.speculation.jobs_in_flight import LaunchedJob

PASSAGE = 40
WAYS = {"one at a time": 1, "several": JOBS_UNDER_WAY_MAX}
"""Jobs under way."""


@dataclass(frozen=True)
class Line:
    n_nodes: int
    one_way_s: float
    step_s: float
    """Of one stage, for one row."""
    row_cost: float
    """Of a further row in the same batch, in steps."""

    def takes_s(self, n_rows: int) -> float:
        batches = [min(ROWS_MAX, n_rows - start) for start in range(0, n_rows, ROWS_MAX)]
        return sum(self.step_s * (1 + self.row_cost * (n - 1)) for n in batches)


class Guesses:
    """What follows, with mistakes."""

    is_free = True

    def __init__(self, text: Sequence[int], odds: float | None, seed: int) -> None:
        """`odds` of a guess to be right; None: in every other passage."""
        rng = Random(seed)
        self._tokens = [
            token if (i // PASSAGE % 2 if odds is None else rng.random() < odds) else token + 1
            for i, token in enumerate(text)
        ]

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        n_guesses = worth("simulated", 0.0)
        tokens = self._tokens[len(history) : len(history) + n_guesses]
        return Draft(tuple(tokens), "simulated") if tokens else None

    def close(self) -> None:
        pass


@dataclass
class Stage:
    order: JobOrder[LaunchedJob] = field(default_factory=JobOrder)
    waiting: deque[LaunchedJob] = field(default_factory=deque)
    is_computing: bool = False


class Chain:
    """A pipeline whose last stage guesses."""

    def __init__(self, line: Line, text: Sequence[int], guesses: Guesses | None, n_jobs: int) -> None:
        self._line, self._text, self._n_jobs = line, text, n_jobs
        self._guesser = ChainGuesser(CostGate(), lambda prompt: [guesses] if guesses else [])
        self._said = [text[0]]
        self._stages = [Stage() for _ in range(line.n_nodes)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.now = 0.0

    def run(self) -> float:
        """Seconds until the whole text is there."""
        self._launch()
        while len(self._said) < len(self._text):
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        return self.now

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._count), happens))

    def _launch(self) -> None:
        n_left = len(self._text) - len(self._said)
        room = JobLimits(n_left, WINDOW_ROWS_MAX, self._n_jobs, ROWS_MAX)
        for job in self._guesser.next_jobs(self._said, len(self._said) - 1, room, self.now):
            self._after(self._line.one_way_s, partial(self._arrives, 0, job))

    def _arrives(self, index: int, job: LaunchedJob) -> None:
        stage = self._stages[index]
        if not job.number:
            stage.order.came_alone()
            stage.waiting.append(job)
        elif index + 1 < len(self._stages) or self._is_known(job):
            ready, _ = stage.order.take(job.number, job.fresh, job)
            stage.waiting.extend(ready)
            self._drop(stage)
        self._start(index)

    def _is_known(self, job: LaunchedJob) -> bool:
        return self._guesser.jobs_in_flight.find(job.position, len(job.tokens), job.number) is not None

    def _drop(self, stage: Stage) -> None:
        stage.waiting = deque(each for each in stage.waiting if not 0 < each.number < stage.order.fresh)

    def _start(self, index: int) -> None:
        stage = self._stages[index]
        if stage.waiting and not stage.is_computing:
            stage.is_computing = True
            job = stage.waiting.popleft()
            self._after(self._line.takes_s(len(job.tokens)), partial(self._computed, index, job))

    def _computed(self, index: int, job: LaunchedJob) -> None:
        stage = self._stages[index]
        stage.is_computing = False
        if index + 1 < len(self._stages):
            self._after(self._line.one_way_s, partial(self._arrives, index + 1, job))
        else:
            self._sample(stage, job)
        self._start(index)

    def _sample(self, stage: Stage, job: LaunchedJob) -> None:
        jobs_in_flight = self._guesser.jobs_in_flight
        if jobs_in_flight.land(job.position, len(job.tokens), job.number) is None:
            return
        for i, guess in enumerate((*job.tokens[1:], jobs_in_flight.next_token)):
            self._said.append(self._text[job.position + i + 1])
            if len(self._said) == len(self._text):
                return
            if guess != self._said[-1]:
                break
        self._launch()
        stage.order.refuse(jobs_in_flight.fresh)
        self._drop(stage)


def speed(line: Line, odds: float | None, n_jobs: int, n_tokens: int, seed: int) -> float:
    """Tokens/s. `n_jobs` under way at most; 0: without guesses."""
    rng = Random(seed)
    text = [2 * rng.randrange(10_000) for _ in range(n_tokens)]
    guesses = Guesses(text, odds, seed) if n_jobs else None
    return len(text) / Chain(line, text, guesses, max(n_jobs, 1)).run()


def compare(arguments: argparse.Namespace) -> list[tuple[Figure, Figure | None]]:
    """Times of the same chain without guesses."""
    rows: list[tuple[Figure, Figure | None]] = []
    texts = [(f"{odds:.0%} right", odds) for odds in arguments.odds] + [("passages", None)]
    for n_nodes, rtt_ms, (text, odds) in itertools.product(arguments.nodes, arguments.rtt_ms, texts):
        line = Line(n_nodes, rtt_ms / 2e3, arguments.step_ms / 1e3 / n_nodes, arguments.row_cost)
        gains: dict[str, Figure] = {}
        for way, n_jobs in WAYS.items():
            gain = gains[way] = Figure(f"{n_nodes} nodes, {rtt_ms:g} ms, {text}: {way}", "x without guesses")
            for seed in range(arguments.seeds):
                plain = speed(line, odds, 0, arguments.tokens, seed)
                gain.values.append(speed(line, odds, n_jobs, arguments.tokens, seed) / plain)
        one, several = gains.values()
        ratio = ratios(several, one)
        rows += [(one, None), (several, ratio)]
        print(f"{several.name} {several.median:.2f} (one {one.median:.2f}, {ratio.median:.2f}x)")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0.1, 20.0, 80.0])
    parser.add_argument("--odds", type=float, nargs="+", default=[1.0, 0.95, 0.8, 0.5, 0.0])
    parser.add_argument("--step-ms", type=float, default=24.0)
    parser.add_argument("--row-cost", type=float, default=0.15)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    publish("windows", " ".join(("python -m bench.windows", *sys.argv[1:])), compare(arguments))


if __name__ == "__main__":
    main()
