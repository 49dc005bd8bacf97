"""When a peer is taken for dead, and when it is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.swarm.data.keepalive import (
    CHECK_S,
    LAST_LOOK_S,
    MEASURE_S,
    PING_S,
    SILENCE_S,
    YIELD_S,
    Keepalive,
)

OUT_OF_ROUTES_S = 5.0


def silent_at_s(heard_s: list[float], *, until_s: float, lag_s: float = 0.0) -> float | None:
    """When a peer heard at these times is given up by a process that wakes `lag_s` late each time, and reads
    then what has come by then."""
    keepalive, now = Keepalive(), 0.0
    keepalive.heard(now)
    heard_s = sorted(heard_s)
    while now < until_s:
        now = keepalive.next_look_s(now) + lag_s
        while heard_s and heard_s[0] <= now:
            keepalive.heard(heard_s.pop(0))
        if keepalive.look(now, is_reading=True) == "silent":
            return now
    return None


@given(st.floats(0.0, PING_S), st.floats(0.0, 20.0))
def test_a_frozen_peer_is_given_up_in_time_and_not_before(first_s: float, frozen_s: float) -> None:
    heard_s = [first_s + n * PING_S for n in range(20) if first_s + n * PING_S <= frozen_s]
    given_up_s = silent_at_s(heard_s, until_s=frozen_s + 10.0)
    assert given_up_s is not None
    assert given_up_s - frozen_s <= OUT_OF_ROUTES_S - 0.3
    assert given_up_s - max([0.0, *heard_s]) >= SILENCE_S


@given(st.lists(st.floats(0.0, SILENCE_S - PING_S - 0.01), min_size=5, max_size=20))
def test_pings_may_be_late(delays_s: list[float]) -> None:
    heard_s = [n * PING_S + delay_s for n, delay_s in enumerate(delays_s)]
    assert silent_at_s(heard_s, until_s=max(heard_s)) is None


def test_a_process_short_of_time_reads_what_has_come_before_it_judges() -> None:
    lag_s = 0.9 * CHECK_S
    assert silent_at_s([n * PING_S for n in range(50)], until_s=50 * PING_S, lag_s=lag_s) is None
    given_up_s = silent_at_s([], until_s=20.0, lag_s=lag_s)
    assert given_up_s is not None
    assert given_up_s <= SILENCE_S + LAST_LOOK_S + 2 * lag_s + 1e-9


def test_who_was_stopped_itself_begins_to_count_anew() -> None:
    keepalive = Keepalive()
    keepalive.heard(0.0)
    look_at_s = keepalive.next_look_s(0.0)
    assert keepalive.look(look_at_s + 100.0, is_reading=True) == "unknown"
    assert keepalive.look(keepalive.next_look_s(look_at_s + 100.0), is_reading=True) == "alive"


def test_who_is_not_reading_judges_nobody() -> None:
    keepalive = Keepalive()
    keepalive.heard(0.0)
    now = 0.0
    for _ in range(100):
        now = keepalive.next_look_s(now)
        assert keepalive.look(now, is_reading=False) == "alive"


def test_pings_are_due_at_once_and_then_now_and_again() -> None:
    keepalive = Keepalive()
    assert [keepalive.ping_is_due(now) for now in (0.0, 0.5, PING_S - 0.1, PING_S)] == [
        True,
        False,
        False,
        True,
    ]


def test_what_is_written_takes_the_place_of_a_ping_until_the_round_trip_is_to_be_measured() -> None:
    keepalive = Keepalive()
    assert keepalive.ping_is_due(0.0)
    due_s = []
    for n in range(1, 2 * round(MEASURE_S)):
        keepalive.wrote(float(n))
        if keepalive.ping_is_due(float(n)):
            due_s.append(n)
    assert due_s == [MEASURE_S]


def test_a_round_trip_that_is_hardly_known_is_measured_however_much_is_written() -> None:
    keepalive = Keepalive()
    assert keepalive.ping_is_due(0.0)
    keepalive.wrote(PING_S)
    assert not keepalive.ping_is_due(PING_S)
    assert keepalive.ping_is_due(PING_S, is_measured=False)


def test_the_side_that_dialled_pings_first() -> None:
    dialler, other = Keepalive(dialled=True), Keepalive(dialled=False)
    for each in (dialler, other):
        assert each.ping_is_due(0.0)
        each.wrote(0.0)
    assert dialler.ping_is_due(PING_S)
    assert not other.ping_is_due(PING_S)
    assert other.ping_is_due(PING_S + YIELD_S)
