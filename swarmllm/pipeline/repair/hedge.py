"""Decides when a slow request is started a second time, at a standby, while the first pipeline goes on.

Pure: the clock comes in as `now_s`.

A pipeline may be far slower than planned because a node got other work, or lies about its speed; nobody can
know which, and how long it goes on. So nothing is broken off: where the next token is expected later than a
standby could give it, the standby begins beside the slow one, and whichever gives the next token first keeps
the request. What a standby costs is the prompt and all tokens so far, computed once more.

`HedgeBudget` bounds that work to a part of what this node's own requests cost. Nodes that are slow on purpose
make an origin do no more than that, and an origin that is slow to read makes no others do more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FAR: Final = 4.0
"""So many times as long as planned."""
SOON_S: Final = 1.0
"""A token within this time is never late."""
LOOK_AGAIN_S: Final = 1.0
LONGEST_PAUSE_S: Final = 16.0
AHEAD: Final = 2.0
"""Requests' worth of work that may be spent before it is earned: a node's first request may be slow."""
MEAN_OF: Final = 20
"""Requests."""
USUAL_TOKENS: Final = 3
"""A mean over fewer says little."""


@dataclass(frozen=True, slots=True)
class AwaitedToken:
    """The next token of a request."""

    planned_s: float
    """From the one before it, or from the beginning."""
    silent_s: float
    """Since when nothing has come."""
    usual_s: float = 0.0
    """From one token to the next until now, where it is known."""

    @property
    def late_after_s(self) -> float:
        return max(SOON_S, FAR * self.planned_s)

    @property
    def is_late(self) -> bool:
        """Far later than planned, or one of those that all are."""
        return max(self.silent_s, self.usual_s) >= self.late_after_s

    @property
    def expected_s(self) -> float:
        """Until it comes, at the present pace. What is overdue takes as long again as it has taken."""
        due_s = max(self.planned_s, self.usual_s)
        return due_s - self.silent_s if self.silent_s < due_s else self.silent_s


class HedgeBudget:
    """The budget of one origin, in rows of prompts."""

    def __init__(self, part: float) -> None:
        """`part` of what its requests cost may be done again; 0: nothing."""
        self._part = part
        self._mean = 0.0
        """Work of a request."""
        self._credit = 0.0
        self._has_begun = False

    @property
    def is_on(self) -> bool:
        return self._part > 0

    def served(self, work: float) -> None:
        """A request is over."""
        self._begin(work)
        self._mean += (work - self._mean) / MEAN_OF
        self._credit = min(AHEAD * self._mean, self._credit + self._part * work)

    def spend(self, work: float) -> bool:
        """Whether so much may be done again now; then it counts as done."""
        self._begin(work)
        if not self.is_on or work > self._credit:
            return False
        self._credit -= work
        return True

    def _begin(self, work: float) -> None:
        if not self._has_begun:
            self._has_begun, self._mean, self._credit = True, work, AHEAD * work


class Hedge:
    """The hedge of one request."""

    def __init__(self, budget: HedgeBudget) -> None:
        self._budget = budget
        self._not_before_s = float("-inf")
        self._pause_s = LOOK_AGAIN_S
        self._n_lost = 0

    @property
    def is_on(self) -> bool:
        return self._budget.is_on

    def look_at_s(self, awaited: AwaitedToken, now_s: float) -> float:
        """When a standby is to be looked for, unless the token has come by then."""
        late_s = 0.0 if awaited.is_late else awaited.late_after_s - awaited.silent_s
        return max(now_s + late_s, self._not_before_s)

    def begins(self, awaited: AwaitedToken, standby_s: float, work: float, now_s: float) -> bool:
        """Whether the standby, which would give the token after `standby_s`, begins now; then its `work`
        counts as done. It has to be the better by far where others before it came too late."""
        is_better = awaited.is_late and awaited.expected_s > standby_s * 2.0**self._n_lost
        if is_better and self._budget.spend(work):
            self._pause_s = LOOK_AGAIN_S
            return True
        self.nothing_found(now_s)
        return False

    def nothing_found(self, now_s: float) -> None:
        """There is no standby, or none that is worth it; the next look is later each time."""
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def lost(self, now_s: float) -> None:
        """The slow pipeline gave the token first, or the standby failed."""
        self._n_lost += 1
        self.nothing_found(now_s)

    def won(self) -> None:
        """The standby is the request's pipeline from now on."""
        self._n_lost, self._not_before_s = 0, float("-inf")
