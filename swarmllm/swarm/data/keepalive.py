"""Whether the peer of a connection lives: pure state, with the time as an argument.

Each side pings on its own, rather than answering: a peer whose handler is busy reads nothing, ours included,
and is alive. Silence counts only while this side is ready to read and had the time to: after it was stopped
or blocked itself, what the peer sent meanwhile is yet to be read.

A frozen peer is to be out of every route within 5 s. Its last ping may have come just before, so silence may
last a little less than that. A ping of a peer that is merely short of processor time may come SILENCE_S less
PING_S too late.
"""

from __future__ import annotations

import math
from typing import Literal

PING_S = 2.0
SILENCE_S = 4.5
CHECK_S = 1.0
"""Between looks, at most; woken that much too late, this process was stopped."""
LAST_LOOK_S = 0.1
"""From the first sight of silence to the verdict: where this process had little time, what has come is read
by then."""


class Keepalive:
    def __init__(self) -> None:
        self._heard_at_s = math.inf
        self._ping_at_s = -math.inf
        self._look_at_s = -math.inf
        self._is_last_look = False

    def heard(self, now: float) -> None:
        """Something of the peer's has been read, or this side has not been ready to read until now."""
        self._heard_at_s = now

    def ping_is_due(self, now: float) -> bool:
        """And counts as sent."""
        if now < self._ping_at_s:
            return False
        self._ping_at_s = now + PING_S
        return True

    def next_look_s(self, now: float) -> float:
        """When to `look` again."""
        silent_at_s = self._heard_at_s + SILENCE_S
        self._look_at_s = now + (LAST_LOOK_S if self._is_last_look else CHECK_S)
        if now < silent_at_s < self._look_at_s:
            self._look_at_s = silent_at_s
        return self._look_at_s

    def look(self, now: float, *, is_reading: bool) -> Literal["alive", "unknown", "silent"]:
        """How the peer does. unknown: this process was stopped, and the peer has all its time again."""
        was_last_look, self._is_last_look = self._is_last_look, False
        if now - self._look_at_s > CHECK_S:
            self._heard_at_s = now
            return "unknown"
        if not is_reading or now < self._heard_at_s + SILENCE_S:
            return "alive"
        if was_last_look:
            return "silent"
        self._is_last_look = True
        return "alive"
