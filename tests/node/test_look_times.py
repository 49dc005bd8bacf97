"""When a node looks at itself for changes to tell."""

from __future__ import annotations

from itertools import pairwise

from swarmllm.node.announcing.look_times import RARELY_S, SPEAK_S, WHOLE_S, WORKING_S, LookTimes


def look_until(times: LookTimes, now: float, until_s: float, *, is_working: bool = False) -> list[float]:
    """As the announcer does; when it looked."""
    looked_s: list[float] = []
    while (now := max(now, times.next_s(now))) < until_s:
        times.looked(now, is_whole=times.is_whole_due(now), has_changed=False, is_working=is_working)
        looked_s.append(now)
    return looked_s


def idle(now: float = 1000.0) -> LookTimes:
    """So since long before `now`, when its latest look was."""
    times = LookTimes()
    look_until(times, 0.0, now + 0.1)
    return times


def test_a_node_with_nothing_to_do_looks_ever_more_rarely() -> None:
    looked_s = look_until(LookTimes(), 100.0, 500.0)
    waits_s = [after - before for before, after in pairwise(looked_s)]
    assert waits_s[0] == WHOLE_S
    assert waits_s == sorted(waits_s)
    (rarely_s,) = set(waits_s[5:])
    assert 0.8 * RARELY_S <= rarely_s <= RARELY_S


def test_work_is_looked_at_soon_and_every_second_until_it_is_over() -> None:
    times = idle()
    assert times.next_s(1000.5) > 1000.5 + WHOLE_S
    assert times.work_began(1000.5)
    assert times.next_s(1000.5) == 1000.5 + SPEAK_S
    assert not times.work_began(1000.6), "the look is due already"
    looked_s = look_until(times, 1000.6, 1030.0, is_working=True)
    assert max(b - a for a, b in pairwise(looked_s)) <= SPEAK_S
    after_s = look_until(times, 1030.0, 1100.0)
    assert sum(each < 1030.0 + WORKING_S for each in after_s) >= WORKING_S / SPEAK_S - 1
    assert sum(each >= 1030.0 + WORKING_S for each in after_s) <= 6


def test_holdings_are_compared_soon_after_work_has_begun() -> None:
    times = idle()
    times.work_began(1000.5)
    assert times.is_whole_due(1000.5 + WHOLE_S)


def test_a_change_that_was_told_is_followed_by_looks() -> None:
    times = idle()
    times.looked(1000.0, is_whole=True, has_changed=True, is_working=False)
    assert times.next_s(1000.0) == 1000.0 + SPEAK_S


def test_what_may_have_changed_is_looked_at_at_once() -> None:
    times = idle()
    times.at_once()
    assert times.is_whole_due(1000.1)
    assert times.next_s(1000.1) < 1000.1
