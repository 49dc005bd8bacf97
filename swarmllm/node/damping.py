"""Limits how often a node announces values that drift by themselves, like round trips on a busy machine:
pure, `now` passed in.

Every record goes to every node, several times. The first change after a quiet time is told at once. Each one
that follows waits twice as long as the one before, up to a limit, and each look that finds nothing halves
the wait.
"""

from __future__ import annotations

import math
from typing import Final

FIRST_S: Final = 5.0
LONGEST_S: Final = 60.0


class Damping:
    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._wait_s = first_s
        self._due_s = -math.inf

    def __repr__(self) -> str:
        return f"<Damping {self._wait_s:g} s>"

    def admits(self, now: float, *, has_changed: bool) -> bool:
        """Whether to tell it now; to be asked at each look."""
        if now < self._due_s:
            return False
        if has_changed:
            self._due_s = now + self._wait_s
            self._wait_s = min(self._longest_s, 2 * self._wait_s)
        else:
            self._wait_s = max(self._first_s, self._wait_s / 2)
        return has_changed
