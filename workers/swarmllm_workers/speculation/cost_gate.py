"""Measures whether speculation pays while requests run: pure, seconds come in as arguments.

A step that checks k guesses gives one token more than were right, and takes what making and checking them
takes. What steps take is a matter of the machine: running means per number of guesses, handed on from request
to request, the first of them measured before the first guess counts. How often guesses are right is a matter
of the text: counted per kind of guess with the latest weighing most, and half forgotten between two requests.
From both follows how many guesses, if any, give the most tokens per second.

What is known well enough to pay is done. Whatever else is tried comes out of an account: a small part of the
time of all steps, and what guesses have saved. So a text without anything to guess is slower by that part at
most, whatever the text, the model and the machine.

A guess on a long line costs next to nothing, so the account alone would allow many that are all wrong. After
VAIN_MAX steps in a row whose guesses were in vain this way of guessing pauses, and then makes a single guess.
If that is right, the next may follow at once; if not, there is another pause, twice as long where no guess
of the request was ever right. Where it is seen for nothing whether guesses would be right (`unsent_guesses`),
the pause lasts until one is, and nothing is tried in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

STEP_TIME_ALPHA: Final = 0.2
"""Weight of the newest step's duration."""
OUTLIER: Final = 3.0
"""A step that took so many times what was expected was held up by something else, and counts as this."""
RATE_DECAY: Final = 0.94
"""Of what a guess weighs in how often guesses are right, what is left after the next one."""
PRIOR_RATE: Final = 0.6
"""Of guesses of a kind that has not been tried, the part that is right; it weighs as much as PRIOR_WEIGHT
guesses."""
PRIOR_RATES: Final = {"ngram-2": 0.3, "ngram-3": 0.45, "ngram-again": 0.95, "model": 0.7}
PRIOR_WEIGHT: Final = 2.0
KNOWN_FROM: Final = 4.5
"""Guesses of a kind, hope among them, after which what is known of them is more than that."""
GUESS_COST: Final = 0.3
"""Of a further guess, in steps without guesses, before one was measured."""
GAIN_MIN: Final = 1.05
"""Below that a difference is noise."""
EXPLORATION_SHARE: Final = 0.005
"""Of all steps, for trying what may not pay."""
START_STEPS: Final = 2.0
"""What may be lost on trying before that, in steps."""
SAVED_STEPS_MAX: Final = 4.0
"""Of what guesses have saved, what may be spent on trying, in steps."""
N_TRIED: Final = 1
"""Guesses where none are expected to pay."""
VAIN_MAX: Final = 8
"""Steps in a row whose guesses were all wrong, or are too seldom right to pay, before a pause."""
PAUSE_MIN: Final = 8
PAUSE_MAX: Final = 32
"""Tokens without guesses before the next one is tried, where none was ever right."""
PAUSE_AFTER_RIGHT: Final = 4
"""The same where one was."""
N_MAX: Final = 16
"""Guesses per step that are thought about."""
N_ASKED: Final = 64
"""Questions that are answered from one estimate: it takes as long as a tenth of a small model's step."""
RATE_MAX: Final = 0.995
"""What is seen of a kind is never enough to take more than that for right."""


@dataclass
class _Record:
    """Of one kind of guess."""

    n_right: float
    n_tried: float = PRIOR_WEIGHT
    gains: list[float] = field(default_factory=list)
    """Tokens/s with 1, 2 ... guesses, in those without; an estimate that is made anew now and then."""
    n_asked: int = 0
    """Of that estimate."""

    @property
    def rate(self) -> float:
        """The acceptance rate: the share of guesses that are right, given that those before them were."""
        return self.n_right / self.n_tried

    def saw(self, is_right: bool) -> None:
        self.n_right = self.n_right * RATE_DECAY + is_right
        self.n_tried = self.n_tried * RATE_DECAY + 1.0

    def halved(self) -> _Record:
        part = max(0.5, PRIOR_WEIGHT / self.n_tried)
        return _Record(self.n_right * part, self.n_tried * part)


@dataclass
class _Tries:
    """Of one way of guessing, in one request."""

    n_vain: int = 0
    """The latest steps with guesses, all in vain: as VAIN_MAX."""
    pause_end: int = 0
    """The number of tokens from which on there may be guesses again."""
    was_right: bool = False
    """A guess was, at any time."""

    @property
    def is_given_up(self) -> bool:
        return self.n_vain >= VAIN_MAX

    def saw_unsent(self, n_tokens: int, *, is_right: bool, pays: bool) -> None:
        """Of a guess that was not sent."""
        if is_right and pays:
            self.was_right, self.n_vain, self.pause_end = True, 0, 0
        elif self.is_given_up:
            self.pause_end = max(self.pause_end, n_tokens + PAUSE_AFTER_RIGHT)

    def saw(self, n_right: int, n_tokens: int, *, pays: bool) -> None:
        """The result of a step with guesses; `n_tokens` in all since the request began."""
        if n_right:
            self.was_right = True
            self.n_vain = 0 if pays else self.n_vain + 1
            return
        self.n_vain += 1
        if self.is_given_up:
            pause = min(PAUSE_MIN << min(self.n_vain - VAIN_MAX, PAUSE_MAX), PAUSE_MAX)
            self.pause_end = n_tokens + (PAUSE_AFTER_RIGHT if self.was_right else pause)


@dataclass
class CostGate:
    """Of one request. Kinds of guesses whose names begin alike, up to a dash, cost the same. Costs are in
    steps as one without guesses takes at the time, so that other programs on the machine change little."""

    plain_s: float = 0.0
    """Of a step without guesses; 0: there was none yet."""
    spare_steps: float = START_STEPS
    """May be lost on trying."""
    _costs: dict[str, dict[int, float]] = field(default_factory=dict)
    """Steps that one with so many guesses takes."""
    _records: dict[str, _Record] = field(default_factory=dict)
    _tries: dict[str, _Tries] = field(default_factory=dict)
    """By the names of kinds up to the dash."""
    _n_tokens: int = 0
    """Of the request."""

    def successor(self) -> CostGate:
        """The gate of the next request, which starts with these measurements."""
        records = {kind: record.halved() for kind, record in self._records.items()}
        tries = {way: _Tries(min(each.n_vain, VAIN_MAX) // 2) for way, each in self._tries.items()}
        return type(self)(self.plain_s, self.spare_steps, self._costs, records, tries)

    def measured(self, kind: str, plain_s: float, n_guessed: int, seconds: float) -> None:
        """Set the times of steps without and with guesses that were measured apart from any request."""
        self.plain_s = plain_s
        self._costs_of(kind)[n_guessed] = seconds / plain_s

    def has_measured(self, kind: str) -> bool:
        """Whether the cost of guesses of this kind has been measured."""
        return bool(self._costs_of(kind))

    def n_worth(self, kind: str, n_max: int, n_left: int = 1, start_s: float = 0.0) -> int:
        """How many guesses of a kind to make and check in the next step, at most `n_max`. `n_left`: tokens
        that may still come; `start_s`: what the first guess takes beside, once for all of those."""
        if not self.plain_s or n_max < 1:
            return 0  # a step without guesses comes first: it is what the others are compared with
        record, tries = self._record(kind), self._tries_of(kind)
        if self._n_tokens < tries.pause_end:
            return 0
        if not record.gains or record.n_asked >= N_ASKED:
            record.gains, record.n_asked = self._gains(kind, record.rate), 0
        record.n_asked += 1
        gains = record.gains[:n_max]
        gain = max(gains)
        n_best, start_steps = gains.index(gain) + 1, start_s / self.plain_s
        pays = gain >= GAIN_MIN and not tries.is_given_up
        is_known = record.n_tried >= KNOWN_FROM and self.has_measured(kind)
        if pays and is_known and (1.0 - 1.0 / gain) * n_left >= start_steps:
            return n_best
        if self.spare_steps <= start_steps:
            return 0
        for n in (n_best, N_TRIED) if pays else (N_TRIED,):
            if self._cost(kind, n) - 1.0 + start_steps <= self.spare_steps:
                return n
        return 0

    def n_ahead(self, kind: str, n_piece: int) -> int:
        """How many guesses of a kind may be under way at once, in jobs of `n_piece` rows: so many that the
        last ones are still right with odds that pay for a job. A job that was refused keeps a stage from
        the next one for as long as that stage takes for it, which is half at most of what it adds to a trip.
        0: guesses of the kind are not known to pay."""
        record = self._record(kind)
        if record.n_tried < KNOWN_FROM or not self.plain_s or self._tries_of(kind).is_given_up:
            return 0
        if max(self._gains(kind, record.rate)) < GAIN_MIN:
            return 0
        price = max(self._cost(kind, n_piece) - 1.0, 0.0) / 2 + 0.01
        return int(math.log(price / (1.0 + price)) / math.log(min(record.rate, RATE_MAX)))

    def saw(self, kind: str, n_right: int, *, is_refused: bool) -> None:
        """Guesses that nobody timed were right, and the one behind them was wrong if it `is_refused`."""
        self._n_tokens += n_right
        self._saw(kind, n_right, is_refused=is_refused)

    def saw_unsent(self, kind: str, is_right: bool) -> None:
        """A guess that nobody sent would have been right, or not."""
        record = self._record(kind)
        record.saw(is_right)
        record.gains, record.n_asked = self._gains(kind, record.rate), 0
        pays = max(record.gains) >= GAIN_MIN
        self._tries_of(kind).saw_unsent(self._n_tokens, is_right=is_right, pays=pays)

    def _saw(self, kind: str, n_right: int, *, is_refused: bool) -> None:
        record = self._record(kind)
        for _ in range(n_right):
            record.saw(True)
        if is_refused:
            record.saw(False)
        record.gains, record.n_asked = self._gains(kind, record.rate), 0
        self._tries_of(kind).saw(n_right, self._n_tokens, pays=max(record.gains) >= GAIN_MIN)

    def judged(self, kind: str, n_guessed: int, n_right: int, seconds: float, start_s: float = 0.0) -> None:
        """A step with so many guesses took so long, beside `start_s`, and the first `n_right` were right."""
        self._n_tokens += n_right + 1
        if not n_guessed:
            self.plain_s = _mean(self.plain_s, seconds) if self.plain_s else seconds
            self._spare(EXPLORATION_SHARE)
            return
        costs, expected, cost = self._costs_of(kind), self._cost(kind, n_guessed), seconds / self.plain_s
        costs[n_guessed] = _mean(expected, cost) if costs else cost
        self._saw(kind, n_right, is_refused=n_right < n_guessed)
        self._spare(n_right + 1 + EXPLORATION_SHARE - costs[n_guessed] - start_s / self.plain_s)

    def _spare(self, n_steps: float) -> None:
        self.spare_steps = min(self.spare_steps + n_steps, SAVED_STEPS_MAX)

    def _record(self, kind: str) -> _Record:
        return self._records.setdefault(kind, _Record(PRIOR_RATES.get(kind, PRIOR_RATE) * PRIOR_WEIGHT))

    def _tries_of(self, kind: str) -> _Tries:
        return self._tries.setdefault(kind.partition("-")[0], _Tries())

    def _costs_of(self, kind: str) -> dict[int, float]:
        return self._costs.setdefault(kind.partition("-")[0], {})

    def _gains(self, kind: str, rate: float) -> list[float]:
        gains, n_tokens = [], 1.0
        for n in range(1, N_MAX + 1):
            n_tokens += rate**n
            gains.append(n_tokens / self._cost(kind, n))
        return gains

    def _cost(self, kind: str, n: int) -> float:
        """Measured, or estimated from its neighbours; never more than with more guesses."""
        known = {0: 1.0, **self._costs_of(kind)}
        most = min((cost for i, cost in known.items() if i >= n), default=float("inf"))
        below = max(i for i in known if i <= n)
        above = min((i for i in known if i > n), default=0)
        if above:
            slope = (known[above] - known[below]) / (above - below)
        elif below:
            slope = max(known[below] - 1.0, 0.0) / below
        else:
            slope = GUESS_COST
        return min(known[below] + (n - below) * slope, most)


def _mean(old: float, new: float) -> float:
    return old + STEP_TIME_ALPHA * (min(new, OUTLIER * old) - old)
