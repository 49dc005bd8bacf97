"""What happened lately counts, and for less as it gets older."""

from __future__ import annotations

import math

import pytest

from swarmllm.swarm.decaying_count import DecayingCount


@pytest.mark.parametrize("lasts_s", [0.5, 10.0])
def test_it_is_about_what_happens_in_its_time_and_nothing_long_after(lasts_s: float) -> None:
    lately = DecayingCount(lasts_s)
    assert lately.at(0.0) == 0.0
    assert lately.add(0.0) == 1.0
    for each in range(1, 1000):
        n = lately.add(each * lasts_s / 20)
    assert n == pytest.approx(20, rel=0.05)
    now = 999 * lasts_s / 20
    assert lately.at(now) == n
    assert lately.at(now + lasts_s) == pytest.approx(n / math.e)
    assert lately.at(now + 100 * lasts_s) < 1e-9


def test_an_event_of_a_moment_ago_turns_no_time_back() -> None:
    lately = DecayingCount(1.0)
    lately.add(10.0)
    assert lately.add(9.0) == 2.0
    assert lately.at(10.0) == 2.0
