"""Does guessing pay? Measured per request while it runs: a pure core, seconds come in as arguments.

A step that checks k guesses gives one token more than were right, and takes what making and checking them
takes. Both are running means of this request's own steps, per kind of guess; from them follows how many
guesses, if any, give the most tokens per second. What has not been tried is estimated from its neighbours.

Where nothing pays no guess is made, and a few are tried again after a pause that doubles each time it did
not pay: text changes, and so does who else uses the machine. What trying costs is bounded by that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LEARNING: Final = 0.2
"""Weight of the newest observation."""
HOPE: Final = 0.7
"""Of guesses of a kind that has not been tried, the part that is right."""
GUESS_COST: Final = 0.3
"""Of a further guess, in steps without guesses, before one was measured."""
GAIN_MIN: Final = 1.05
"""Below that a difference is noise."""
PAUSE_MIN: Final = 8
PAUSE_MAX: Final = 512
N_TRIED: Final = 2
"""Guesses after a pause."""


@dataclass
class _Kind:
    rate: float = HOPE
    """The part of its guesses that are right, given that those before them were."""
    costs_s: dict[int, float] = field(default_factory=dict)
    """Of a step, by its number of guesses."""
    pause: int = PAUSE_MIN
    """Chances to guess that are still to be let pass."""
    next_pause: int = PAUSE_MIN


@dataclass
class Pay:
    """Of one request."""

    n_guessed: int = 0
    n_right: int = 0
    plain_s: float = 0.0
    """Of a step without guesses; 0: there was none yet."""
    _kinds: dict[str, _Kind] = field(default_factory=dict)

    def n_worth(self, name: str, n_max: int) -> int:
        """How many guesses of a kind to make and check in the next step, at most `n_max`."""
        if not self.plain_s or n_max < 1:
            return 0  # a step without guesses comes first: it is what the others are compared with
        kind = self._kinds.setdefault(name, _Kind())
        best, n_best = GAIN_MIN / self.plain_s, 0
        for n in range(1, n_max + 1):
            speed = sum(kind.rate**i for i in range(n + 1)) / self._cost_s(kind, n)
            if speed > best:
                best, n_best = speed, n
        if n_best:
            return n_best
        if kind.pause > 0:
            kind.pause -= 1
            return 0
        kind.pause, kind.next_pause = kind.next_pause, min(2 * kind.next_pause, PAUSE_MAX)
        return min(n_max, N_TRIED)

    def judged(self, name: str, n_guessed: int, n_right: int, seconds: float) -> None:
        """A step with so many guesses took so long, and the first `n_right` of them were right."""
        if not n_guessed:
            self.plain_s = _mean(self.plain_s or seconds, seconds)
            return
        kind = self._kinds.setdefault(name, _Kind())
        self.n_guessed += n_guessed
        self.n_right += n_right
        kind.costs_s[n_guessed] = _mean(kind.costs_s.get(n_guessed, seconds), seconds)
        for i in range(min(n_right + 1, n_guessed)):
            kind.rate = _mean(kind.rate, 1.0 if i < n_right else 0.0)
        if (n_right + 1) * self.plain_s > GAIN_MIN * seconds:
            kind.pause = kind.next_pause = PAUSE_MIN

    def _cost_s(self, kind: _Kind, n: int) -> float:
        known = {0: self.plain_s, **kind.costs_s}
        if n in known:
            return known[n]
        below = max(i for i in known if i < n)
        above = min((i for i in known if i > n), default=0)
        if above:
            slope = (known[above] - known[below]) / (above - below)
        elif below:
            slope = max(known[below] - self.plain_s, 0.0) / below
        else:
            slope = GUESS_COST * self.plain_s
        return known[below] + (n - below) * slope


def _mean(old: float, new: float) -> float:
    return old + LEARNING * (new - old)
