"""Counts what has happened lately: pure."""

from __future__ import annotations

import math


class DecayingCount:
    """Each event counts for less as it gets older: for 1/e after `lasts_s`. So what happens n times in that
    time, evenly, is counted as about n. `now` is any clock that does not run backwards, in seconds."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._n = 0.0
        self._at_s = -math.inf

    def __repr__(self) -> str:
        return f"<DecayingCount {self._n:.1f} in {self._lasts_s:g} s>"

    def at(self, now: float) -> float:
        return self._n * math.exp(-max(0.0, now - self._at_s) / self._lasts_s)

    def add(self, now: float) -> float:
        """One more has happened; how many there are with it."""
        self._n = 1.0 + self.at(now)
        self._at_s = max(now, self._at_s)
        return self._n
