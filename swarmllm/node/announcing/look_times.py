"""Decides when the announcer looks at this node: pure, `now` passed in.

A quick look compares what routes should know at once: load and speed. A whole look also compares what is held
here and where this node is among the others. While work is under way there is a quick look every SPEAK_S and
a whole one every WHOLE_S. A node with nothing to do takes whole looks only, ever more rarely while they find
nothing: each costs it time, and nothing changes by itself but free room and round trips.
"""

from __future__ import annotations

import math
from typing import Final

from swarmllm.shared_ticks import next_tick_s

SPEAK_S: Final = 1.0
"""How often load and speed are compared with what the swarm was told last. In bench.simulation, origins that
know load from five seconds ago all run to the same nodes, and requests take three times as long as they
could; from one second ago, half as long again."""
WHOLE_S: Final = 5.0
RARELY_S: Final = 60.0
"""Between whole looks, at most."""
WORKING_S: Final = 10.0
"""For so long after the last sign of work there may be more."""


class LookTimes:
    def __init__(self) -> None:
        self._working_until_s = -math.inf
        self._wait_s = WHOLE_S
        self._whole_at_s = -math.inf
        self._quick_at_s = -math.inf

    def __repr__(self) -> str:
        return f"<LookTimes {self._wait_s:g} s>"

    def at_once(self) -> None:
        """Something may have changed: the next look is a whole one, and now."""
        self._whole_at_s = -math.inf

    def work_began(self, now: float) -> bool:
        """Whether the next look is sooner for it."""
        was_idle = now >= self._working_until_s
        self._working_until_s = now + WORKING_S
        if was_idle:
            self._wait_s = WHOLE_S
            self._quick_at_s = now + SPEAK_S
            self._whole_at_s = min(self._whole_at_s, now + WHOLE_S)
        return was_idle

    def next_s(self, now: float) -> float:
        """When to look."""
        return min(self._whole_at_s, self._quick_at_s) if now < self._working_until_s else self._whole_at_s

    def is_whole_due(self, now: float) -> bool:
        return now >= self._whole_at_s

    def looked(self, now: float, *, is_whole: bool, has_changed: bool, is_working: bool) -> None:
        """`has_changed`: the swarm was told of work or holdings. `is_working`: requests run or wait here."""
        if has_changed or is_working:
            self._working_until_s = now + WORKING_S
        self._quick_at_s = now + SPEAK_S
        if now < self._working_until_s:
            self._wait_s = WHOLE_S
        if is_whole:
            self._whole_at_s = next_tick_s(now, self._wait_s)
            self._wait_s = min(RARELY_S, 2 * self._wait_s)
