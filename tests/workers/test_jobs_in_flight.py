"""Several decode jobs of a request under way: whatever links do, the text is the one without guesses."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm_proto.limits import GUESSES_MAX, JOBS_UNDER_WAY_MAX, WINDOW_ROWS_MAX
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.ring.job_order import JobOrder
from swarmllm_workers.speculation.chain_guesser import AHEAD_MAX, ChainGuesser, JobLimits
from swarmllm_workers.speculation.cost_gate import CostGate
from swarmllm_workers.speculation.drafting import Draft, Worth
from swarmllm_workers.speculation.jobs_in_flight import JobsInFlight, LaunchedJob

N_TOKENS = 100


class Oracle:
    """Guesses what follows in `text`, each token wrongly at some `odds`."""

    is_free = False

    def __init__(self, text: Sequence[int], odds: float, seed: int = 0) -> None:
        self._text = text
        rng = random.Random(seed)
        self._guesses = [token if rng.random() >= odds else token + 1 for token in text]

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        n = worth("oracle", 0.0)
        guesses = self._guesses[len(history) : len(history) + n]
        return Draft(tuple(guesses), "oracle") if guesses else None

    def close(self) -> None:
        pass


Way: TypeAlias = deque[tuple[LaunchedJob, bool]]


@dataclass
class Stage:
    """Tokens stand for the rows that they become."""

    order: JobOrder[LaunchedJob] = field(default_factory=JobOrder)
    kv: list[int] = field(default_factory=list)
    waiting: deque[LaunchedJob] = field(default_factory=deque)
    ways: tuple[Way, Way] = field(default_factory=lambda: (deque(), deque()))
    """By which jobs come here: the link and the daemons, each in order. Of each job whether it is resent."""
    expected: int = 0
    """As of a seat."""
    way: int = 0
    unsure: deque[LaunchedJob] = field(default_factory=lambda: deque(maxlen=2 * JOBS_UNDER_WAY_MAX))
    """What came by the present way."""
    has_prompt: bool = True


class Chain:
    """A pipeline in which the next thing that happens is drawn."""

    def __init__(
        self,
        text: Sequence[int],
        odds: float,
        rng: random.Random,
        n_stages: int = 3,
        n_prompt: int = 0,
    ) -> None:
        """`n_prompt`: so much of `text` is a prompt that is still to be computed, of which the last stage
        knows how it went on before; with 0 the first token is there."""
        self.text, self._odds, self._rng, self._n_prompt = text, odds, rng, n_prompt
        self.said = list(text[: n_prompt or 1])
        self.stages = [Stage(has_prompt=not n_prompt) for _ in range(n_stages)]
        self._prompt_at = 0 if n_prompt else n_stages
        """The stage that computes it next."""
        self.n_early = 0
        self.gate = CostGate(plain_s=0.1 if n_prompt else 0.0)
        self.now = 0.0
        self.n_computed = self.n_jobs = 0
        self.begin()

    def begin(self) -> None:
        oracle = Oracle(self.text, self._odds, self._rng.randrange(100))
        remembered = oracle._guesses[self._n_prompt :]
        self.guesser = ChainGuesser(self.gate, lambda prompt: [oracle], recall=lambda prompt: remembered)
        if self._n_prompt:
            self.guesser.know(np.array(self.text[: self._n_prompt], np.int32))
        else:
            self._launch()

    def _room(self) -> JobLimits:
        return JobLimits(len(self.text) - len(self.said), WINDOW_ROWS_MAX, JOBS_UNDER_WAY_MAX, ROWS_MAX)

    def _launch_early(self, *_: None) -> None:
        launched = self.guesser.early_jobs(self._n_prompt, self._room())
        self.n_early += len(launched)
        assert not launched or launched[-1].end < len(self.text)
        for job in launched:
            self._send(0, job)

    def _compute_prompt(self, *_: None) -> None:
        stage = self.stages[self._prompt_at]
        assert not stage.kv
        stage.kv, stage.has_prompt = list(self.text[: self._n_prompt]), True
        stage.waiting.extend(stage.order.go_on())
        self._prompt_at += 1
        if stage is self.stages[-1]:
            self.said.append(self.text[self._n_prompt])
            self._launch()
            stage.order.refuse(self.guesser.jobs_in_flight.fresh)
            self._drop(stage)

    def _launch(self) -> None:
        tokens = self.said[self._n_prompt :]
        launched = self.guesser.next_jobs(tokens, len(self.said) - 1, self._room(), self.now)
        assert self.guesser.jobs_in_flight.n_under_way <= JOBS_UNDER_WAY_MAX + 1
        self.n_jobs += len(launched)
        for job in launched:
            self._send(0, job)

    def _send(self, index: int, job: LaunchedJob) -> None:
        stage = self.stages[index]
        if not job.number:
            stage.unsure.clear()
        if not stage.way:
            stage.unsure.append(job)
        stage.ways[stage.way].append((job, False))

    def switch(self, index: int) -> None:
        """The link to a stage is lost with some of what is in it, and all that may be is sent again by the
        daemons; or there is a new link, while jobs are still on their way by the daemons."""
        stage = self.stages[index]
        if stage.way:
            stage.way = 0
            return
        for _ in range(self._rng.randint(0, len(stage.ways[0]))):
            stage.ways[0].pop()
        stage.way = 1
        stage.ways[1].extend((job, True) for job in stage.unsure)
        stage.unsure.clear()

    def step(self) -> None:
        """Something happens. Fails where nothing can."""
        possible = [(self._arrive, i, way) for i, each in enumerate(self.stages) for way in each.ways if way]
        possible += [(self._run, i, None) for i, each in enumerate(self.stages) if each.waiting]  # type: ignore[misc]
        if self._prompt_at < len(self.stages):
            possible += [(self._compute_prompt, 0, None), (self._launch_early, 0, None)]  # type: ignore[list-item]
        assert possible, f"all wait for {self.guesser.jobs_in_flight}"
        happens, index, way = self._rng.choice(possible)
        self.now += self._rng.random() / 50
        happens(index, way)

    def _arrive(self, index: int, way: Way) -> None:
        stage, (job, is_resent) = self.stages[index], way.popleft()
        if is_resent:
            # The worker closes the link that it came by before; a new one would be lost with that.
            stage.ways[0].clear()
            if not stage.way:
                self.switch(index)
        if not job.number and is_resent and job.position < stage.expected:
            return
        if not job.number or job.number == job.fresh:
            stage.expected = job.position + 1
        if not job.number:
            stage.order.came_alone()
            stage.waiting.append(job)
            return
        if index == len(self.stages) - 1:
            known = self.guesser.jobs_in_flight.find(job.position, len(job.tokens), job.number)
            if known is None:
                return
        ready, _ = stage.order.take(job.number, job.fresh, job, waits=not stage.has_prompt)
        stage.waiting.extend(ready)
        self._drop(stage)

    def _drop(self, stage: Stage) -> None:
        stage.waiting = deque(each for each in stage.waiting if not 0 < each.number < stage.order.fresh)

    def _run(self, index: int, _way: None) -> None:
        stage = self.stages[index]
        job = stage.waiting.popleft()
        assert job.position <= len(stage.kv), "rows before it are missing"
        stage.kv[job.position :] = job.tokens
        self.n_computed += len(job.tokens)
        if index < len(self.stages) - 1:
            self._send(index + 1, job)
            return
        jobs_in_flight = self.guesser.jobs_in_flight
        assert jobs_in_flight.land(job.position, len(job.tokens), job.number) is not None
        expected = (*job.tokens[1:], jobs_in_flight.next_token)
        for at, guess in enumerate(expected):
            row = job.position + at
            assert stage.kv[: row + 1] == list(self.text[: row + 1]), "a row follows a guess that was wrong"
            self.said.append(self.text[row + 1])
            if len(self.said) == len(self.text):
                return
            if guess != self.said[-1]:
                break
        del stage.kv[job.position + at + 1 :]
        self._launch()
        stage.order.refuse(jobs_in_flight.fresh)
        self._drop(stage)

    @property
    def is_over(self) -> bool:
        return len(self.said) == len(self.text)

    def lose(self, index: int) -> None:
        """A stage dies, with all that is under way; another one takes its place, and computes again what the
        origin has heard of."""
        n_rows = len(self.said) - 1
        for stage in self.stages:
            assert index == self.stages.index(stage) or stage.kv[:n_rows] == list(self.text[:n_rows])
        self.stages = [Stage(kv=list(self.text[:n_rows])) for _ in self.stages]
        self.begin()


SEEDS = st.integers(0, 2**32 - 1)
ODDS = st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0])


MANY = settings(max_examples=30)


def a_text(rng: random.Random) -> list[int]:
    return [2 * rng.randrange(1000) for _ in range(N_TOKENS)]


@MANY
@given(SEEDS, ODDS, st.integers(1, 4))
def test_the_text_is_right_however_jobs_are_held_up(seed: int, odds: float, n_stages: int) -> None:
    rng = random.Random(seed)
    chain = Chain(a_text(rng), odds, rng, n_stages)
    while not chain.is_over:
        chain.step()
    assert chain.said == list(chain.text)


@MANY
@given(SEEDS, ODDS)
def test_the_text_is_right_though_links_break_and_jobs_come_twice_or_overtake_each_other(
    seed: int, odds: float
) -> None:
    rng = random.Random(seed)
    chain = Chain(a_text(rng), odds, rng)
    while not chain.is_over:
        chain.step()
        if rng.random() < 0.03:
            chain.switch(rng.randrange(3))
    assert chain.said == list(chain.text)


@MANY
@given(SEEDS, ODDS, st.integers(1, 4), st.booleans())
def test_the_text_is_right_though_jobs_come_before_the_prompt(
    seed: int, odds: float, n_stages: int, are_lost: bool
) -> None:
    rng = random.Random(seed)
    chain = Chain(a_text(rng), odds, rng, n_stages, n_prompt=rng.randint(1, 5))
    while not chain.is_over:
        chain.step()
        if are_lost and rng.random() < 0.05:
            chain.switch(rng.randrange(n_stages))
    assert chain.said == list(chain.text)


def test_jobs_do_come_before_the_prompt() -> None:
    chains = [Chain(a_text(random.Random(i)), 0.0, random.Random(i), n_prompt=3) for i in range(10)]
    for chain in chains:
        while not chain.is_over:
            chain.step()
    assert sum(chain.n_early > 0 for chain in chains) > 5


@MANY
@given(SEEDS, ODDS)
def test_the_text_is_right_though_stages_are_lost(seed: int, odds: float) -> None:
    rng = random.Random(seed)
    chain = Chain(a_text(rng), odds, rng)
    while not chain.is_over:
        chain.step()
        if rng.random() < 0.01:
            chain.lose(rng.randrange(3))
    assert chain.said == list(chain.text)


def test_refused_jobs_that_wait_are_not_computed() -> None:
    rng = random.Random(3)
    chain = Chain(a_text(rng), 0.1, rng)
    while not chain.is_over:
        chain.step()
    assert chain.guesser.n_right > N_TOKENS / 2
    # All stages would compute each row that left.
    n_left = 3 * (chain.guesser.n_guessed + chain.n_jobs)
    assert chain.n_computed < n_left


class Line:
    """A pipeline over a line: a job is back after a while, and some time after the one before it, which is
    longer the more rows it has."""

    def __init__(
        self, text: Sequence[int], oracle: Oracle, trip_s: float = 0.2, row_s: float = 0.004
    ) -> None:
        self._text, self._trip_s, self._row_s = text, trip_s, row_s
        self.guesser = ChainGuesser(CostGate(), lambda prompt: [oracle])
        self.said, self.now = [text[0]], 0.0
        self._back: deque[tuple[float, LaunchedJob]] = deque()
        self.counts: list[int] = []
        """Guesses under way, at each token or window."""

    def run(self, n_tokens: int) -> None:
        """Until so many are there."""
        jobs_in_flight = self.guesser.jobs_in_flight
        while len(self.said) < n_tokens:
            room = JobLimits(len(self._text) - len(self.said), WINDOW_ROWS_MAX, JOBS_UNDER_WAY_MAX, ROWS_MAX)
            for job in self.guesser.next_jobs(self.said, len(self.said) - 1, room, self.now):
                took_s = self._row_s * len(job.tokens)
                before_s = self._back[-1][0] if self._back else 0.0
                self._back.append((max(self.now + self._trip_s, before_s) + took_s, job))
            self.counts.append(max(0, len(jobs_in_flight.ahead) - 1))
            counts = None
            while counts is None:
                self.now, job = self._back.popleft()
                counts = jobs_in_flight.land(job.position, len(job.tokens), job.number)
            for at, guess in enumerate((*job.tokens[1:], jobs_in_flight.next_token)):
                self.said.append(self._text[job.position + at + 1])
                if guess != self.said[-1] or len(self.said) == n_tokens:
                    break


TEXT = list(range(0, 1000, 2))


def test_more_jobs_follow_where_guesses_are_right() -> None:
    line = Line(TEXT, Oracle(TEXT, 0.0))
    line.run(len(TEXT))
    assert max(line.counts) > 5 * GUESSES_MAX
    assert max(line.counts) <= AHEAD_MAX
    # The line's own limit, but for its length and a slow start.
    assert line.now < 500 * 0.004 + 20 * 0.2


def test_hardly_anything_is_guessed_where_guesses_are_wrong() -> None:
    line = Line(TEXT, Oracle(TEXT, 1.0))
    line.run(len(TEXT))
    assert max(line.counts) <= GUESSES_MAX
    assert line.now < len(TEXT) * 0.204 * 1.01 + 1


def test_no_more_than_a_window_is_under_way_eight_tokens_after_guesses_turn_wrong() -> None:
    oracle = Oracle(TEXT, 0.0)
    oracle._guesses[400:] = [token + 1 for token in TEXT[400:]]
    line = Line(TEXT, oracle)
    line.run(401)
    assert line.counts[-1] > 5 * GUESSES_MAX
    line.run(408)
    assert line.counts[-1] <= GUESSES_MAX


@pytest.mark.parametrize("n_jobs", [0, 1])
def test_a_stage_that_takes_one_job_gets_one(n_jobs: int) -> None:
    guesser = ChainGuesser(CostGate(), lambda prompt: [Oracle(range(200), 0.0)])
    for n in range(1, 40):
        room = JobLimits(100, WINDOW_ROWS_MAX, n_jobs, ROWS_MAX)
        jobs = guesser.next_jobs(range(n), n - 1, room, n * 0.1)
        assert len(jobs) == 1
        assert not jobs[0].number
        assert guesser.jobs_in_flight.land(n - 1, len(jobs[0].tokens)) is not None


NUMBERS = st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=60)


@given(NUMBERS, st.permutations(range(12)))
def test_jobs_have_their_turn_once_and_in_order(again: list[tuple[int, bool]], order: list[int]) -> None:
    jobs = JobOrder[int]()
    ran: list[int] = []
    for number in [*(each + 1 for each in order), *(number for number, _ in again)]:
        ready, _ = jobs.take(number, 1, number)
        ran += ready
    assert ran == list(range(1, 13))


def test_a_fresh_job_waits_for_none_of_those_before_it() -> None:
    jobs = JobOrder[str]()
    assert jobs.take(1, 1, "one") == (["one"], [])
    assert jobs.take(3, 1, "three") == ([], [])
    assert jobs.take(5, 4, "five") == ([], ["three"])
    assert jobs.take(2, 1, "two") == ([], ["two"])
    assert jobs.take(4, 4, "four") == (["four", "five"], [])
    assert jobs.came_alone() == []
    assert jobs.take(6, 4, "late") == ([], ["late"])
    assert jobs.take(7, 7, "seven") == (["seven"], [])


def test_what_left_before_a_refusal_counts_for_nothing() -> None:
    jobs_in_flight = JobsInFlight()
    first, second = jobs_in_flight.launch(5, [(1, 2), (3, 4)], are_numbered=True)
    assert (first, second) == (LaunchedJob(5, (1, 2), 1, 1), LaunchedJob(7, (3, 4), 2, 1))
    assert jobs_in_flight.land(5, 2, 1) == first
    assert jobs_in_flight.next_token == 3
    jobs_in_flight.refuse()
    assert jobs_in_flight.next_token is None
    (third,) = jobs_in_flight.launch(7, [(9, 8)], are_numbered=True)
    assert third == LaunchedJob(7, (9, 8), 3, 3)
    assert jobs_in_flight.n_under_way == 2
    assert jobs_in_flight.land(7, 2, 2) is None
    assert jobs_in_flight.land(7, 2, 3) == third
    assert jobs_in_flight.n_under_way == 0


@pytest.mark.parametrize(("n_left", "n_sent"), [(1, 0), (2, 1), (5, 4)])
def test_no_more_leaves_early_than_may_be_asked_for(n_left: int, n_sent: int) -> None:
    """The last token that may come has no row."""
    guesser = ChainGuesser(CostGate(plain_s=0.1), lambda prompt: [], recall=lambda prompt: range(50))
    guesser.gate.measured("ngram-again", 0.1, GUESSES_MAX, 0.1)
    guesser.know(np.array([1, 2, 3], np.int32))
    jobs = guesser.early_jobs(3, JobLimits(n_left, WINDOW_ROWS_MAX, JOBS_UNDER_WAY_MAX, ROWS_MAX))
    assert sum(len(each.tokens) for each in jobs) == n_sent
    assert guesser.early_jobs(3, JobLimits(9, WINDOW_ROWS_MAX, JOBS_UNDER_WAY_MAX)) == () or not jobs
