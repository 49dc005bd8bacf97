"""What wanders is told at once, and then ever more rarely."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.node.announcing.record_changes import FIRST_S, LONGEST_S, Damping

LOOK_S = 5.0


def told(changed: list[bool]) -> list[int]:
    """At which of the looks it is told."""
    damping = Damping()
    return [n for n, has_changed in enumerate(changed) if damping.admits(n * LOOK_S, has_changed=has_changed)]


def test_the_first_change_is_told_at_once_and_the_next_ones_wait_twice_as_long_each_time() -> None:
    assert told([True] * 90) == [0, 1, 3, 7, 15, 31, 55, 79]


def test_after_a_quiet_time_a_change_is_told_at_once_again() -> None:
    assert told([True] * 30 + [False] * 30 + [True] * 4) == [0, 1, 3, 7, 15, 60, 61, 63]


def test_what_changes_once_and_stays_is_told_before_long() -> None:
    damping = Damping()
    for n in range(100):
        damping.admits(n * LOOK_S, has_changed=True)
    began_s = 100 * LOOK_S
    told_s = next(s for s in range(1000) if damping.admits(began_s + s, has_changed=True))
    assert told_s <= LONGEST_S


@given(st.lists(st.booleans(), max_size=200))
def test_it_never_tells_what_is_no_news_nor_more_often_than_it_may(changed: list[bool]) -> None:
    at = told(changed)
    assert all(changed[n] for n in at)
    assert all((later - earlier) * LOOK_S >= FIRST_S for earlier, later in pairwise(at))


def test_each_look_that_finds_nothing_halves_the_wait() -> None:
    damping = Damping(1.0, 64.0)
    at_s = 0.0
    for wait_s in (1.0, 2.0, 4.0, 8.0):
        assert damping.admits(at_s, has_changed=True)
        at_s += wait_s
    for wait_s in (8.0, 4.0, 2.0, 1.0, 1.0):
        assert not damping.admits(at_s, has_changed=False)
        assert repr(damping) == f"<Damping {wait_s:g} s>"
    assert Damping.admits(damping, at_s, has_changed=True)
    assert repr(damping) == "<Damping 2 s>"
