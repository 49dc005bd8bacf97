"""Does guessing pay? Measured per request while it runs: a pure core, seconds come in as arguments.

A step that checks k guesses gives one token more than were right, and takes what making and checking them
takes. Both are running means, per kind of guess; from them follows how many guesses, if any, give the most
tokens per second. What has not been tried is estimated from its neighbours. How often guesses are right is a
matter of the text, and learned anew by each request; what steps take is not, and handed on to the next.

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
class _Family:
    """Kinds of guesses that cost the same: what their names begin with, up to a dash."""

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
    _families: dict[str, _Family] = field(default_factory=dict)
    _rates: dict[str, float] = field(default_factory=dict)
    """The part of the guesses of a kind that are right, given that those before them were."""

    def successor(self) -> Pay:
        """For the next request."""
        return type(self)(plain_s=self.plain_s, _families=self._families)

    def _family(self, kind: str) -> _Family:
        return self._families.setdefault(kind.partition("-")[0], _Family())

    def n_worth(self, kind: str, n_max: int) -> int:
        """How many guesses of a kind to make and check in the next step, at most `n_max`."""
        if not self.plain_s or n_max < 1:
            return 0  # a step without guesses comes first: it is what the others are compared with
        family, rate = self._family(kind), self._rates.get(kind, HOPE)
        best, n_best = GAIN_MIN / self.plain_s, 0
        for n in range(1, n_max + 1):
            speed = sum(rate**i for i in range(n + 1)) / self._cost_s(family, n)
            if speed > best:
                best, n_best = speed, n
        if n_best:
            family.pause = family.next_pause = PAUSE_MIN
            return n_best
        if family.pause > 0:
            family.pause -= 1
            return 0
        family.pause, family.next_pause = family.next_pause, min(2 * family.next_pause, PAUSE_MAX)
        return min(n_max, N_TRIED)

    def judged(self, kind: str, n_guessed: int, n_right: int, seconds: float) -> None:
        """A step with so many guesses took so long, and the first `n_right` of them were right."""
        if not n_guessed:
            self.plain_s = _mean(self.plain_s or seconds, seconds)
            return
        family = self._family(kind)
        self.n_guessed += n_guessed
        self.n_right += n_right
        family.costs_s[n_guessed] = _mean(family.costs_s.get(n_guessed, seconds), seconds)
        rate = self._rates.get(kind, HOPE)
        for i in range(min(n_right + 1, n_guessed)):
            rate = _mean(rate, 1.0 if i < n_right else 0.0)
        self._rates[kind] = rate
        if n_right == n_guessed:
            family.pause = 0  # the text may have changed: look again at once

    def _cost_s(self, family: _Family, n: int) -> float:
        known = {0: self.plain_s, **family.costs_s}
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
