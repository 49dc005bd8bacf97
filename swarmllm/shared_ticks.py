"""Lets timers that may be late by seconds end together.

A wake-up of an idle process costs more than what a look then does: its code has left the caches meanwhile. So
loops that look at something every few seconds all wake up at the same moments, the multiples of TICK_S of
trio's clock. That clock begins at another number in each process, so nodes do not wake up at the same moment.

Waits of REST_TICK_S or more end at every other tick. A node with nothing to do has no shorter ones.
"""

from __future__ import annotations

import math
from typing import Final

import trio

TICK_S: Final = 5.0
REST_TICK_S: Final = 2 * TICK_S
_EARLY: Final = 0.2
"""A wait may be shorter by this share: a look that has taken its time is followed by one at the next tick,
and not by one at the tick after it."""


def next_tick_s(now: float, wait_s: float) -> float:
    """When to wake up that is to wait for `wait_s` seconds, about: at a tick, between 0.8 `wait_s` and
    0.8 `wait_s` + TICK_S from `now`, or REST_TICK_S where `wait_s` is not less than that. Waits shorter than
    TICK_S end when they are to."""
    if wait_s < TICK_S:
        return now + wait_s
    tick_s = TICK_S if wait_s < REST_TICK_S else REST_TICK_S
    return math.ceil((now + (1 - _EARLY) * wait_s) / tick_s) * tick_s


def next_rest_tick_s(now: float) -> float:
    """The next of the moments at which a node with nothing to do wakes up: at most REST_TICK_S from `now`."""
    return (math.floor(now / REST_TICK_S) + 1) * REST_TICK_S


async def sleep_until_tick(wait_s: float) -> None:
    """For `wait_s` seconds, about (see `next_tick_s`)."""
    await trio.sleep_until(next_tick_s(trio.current_time(), wait_s))
