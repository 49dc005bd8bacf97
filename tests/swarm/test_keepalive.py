"""When a peer is taken for dead, and when it is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.shared_ticks import REST_TICK_S
from swarmllm.swarm.data.keepalive import (
    CHECK_S,
    LAST_LOOK_S,
    MEASURE_S,
    PING_S,
    REST_AFTER_S,
    REST_MEASURE_S,
    REST_PING_S,
    REST_SILENCE_S,
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


class Side:
    """One end of a connection without messages; what it writes arrives DELAY_S later."""

    def __init__(self, *, dialled: bool, rests: bool = True, clock_s: float = 0.0) -> None:
        self.keepalive = Keepalive(dialled=dialled)
        self.clock_s = clock_s
        """Its clock is ahead by so much: ticks come at other moments at each end."""
        self.keepalive.heard(clock_s)
        if rests:
            self.keepalive.may_rest(clock_s)
        self.pinged_s: list[float] = []
        self.looked_s: list[float] = []
        self.gave_up_s: float | None = None
        self.is_frozen = False


DELAY_S = 0.01


def run(a: Side, b: Side, from_s: float, until_s: float) -> None:
    arrivals: list[tuple[float, Side, bool]] = []
    """When, where, and whether it is a ping."""
    while True:
        looks = [(side.keepalive.look_at_s - side.clock_s, side) for side in (a, b) if not side.is_frozen]
        due = [(at_s, 1, side, False) for at_s, side in looks]
        due += [(at_s, 0, side, is_ping) for at_s, side, is_ping in arrivals if not side.is_frozen]
        now, is_look, side, is_ping = min(due, key=lambda each: each[:2])
        now = max(now, from_s)
        if now >= until_s or side.gave_up_s is not None:
            return
        local_s, keepalive, other = now + side.clock_s, side.keepalive, b if side is a else a
        if not is_look:
            arrivals.remove(next(each for each in arrivals if each[1] is side and each[2] == is_ping))
            keepalive.heard(local_s)
            if is_ping:
                keepalive.wrote(local_s)
                arrivals.append((now + DELAY_S, other, False))
            continue
        # Between two clocks a moment is rounded, and a look just before its time would come again and again.
        local_s = max(local_s, keepalive.look_at_s)
        side.looked_s.append(now)
        if keepalive.look(local_s, is_reading=True) == "silent":
            side.gave_up_s = now
        elif keepalive.ping_is_due(local_s):
            keepalive.wrote(local_s)
            side.pinged_s.append(now)
            arrivals.append((now + DELAY_S, other, True))
        keepalive.next_look_s(local_s)


clocks = st.floats(0.0, 1000.0)


@given(clocks, clocks)
def test_a_connection_without_messages_beats_rarely_and_nobody_is_given_up(a_s: float, b_s: float) -> None:
    dialler, other = Side(dialled=True, clock_s=a_s), Side(dialled=False, clock_s=b_s)
    run(dialler, other, 0.0, 400.0)
    assert (dialler.gave_up_s, other.gave_up_s) == (None, None)
    for side in (dialler, other):
        assert sum(each > 100.0 for each in side.looked_s) <= 300 / REST_TICK_S + 1
    at_rest = [each for side in (dialler, other) for each in side.pinged_s if each > 100.0]
    assert 300 / (REST_PING_S + 1) - 1 <= len(at_rest) <= 300 / REST_PING_S + 300 / REST_MEASURE_S + 2
    # Of many that dialled one node, it pings all at one moment.
    assert sum(each > 100.0 for each in other.pinged_s) >= 0.75 * len(at_rest)
    before = [each for each in dialler.pinged_s if each < REST_AFTER_S]
    assert len(before) >= REST_AFTER_S / (PING_S + CHECK_S)


@given(clocks, clocks, st.floats(100.0, 130.0), st.booleans())
def test_who_freezes_at_rest_is_given_up_later_and_at_once_when_it_is_used(
    a_s: float, b_s: float, frozen_s: float, is_used: bool
) -> None:
    for freezes in (0, 1):
        sides = Side(dialled=True, clock_s=a_s), Side(dialled=False, clock_s=b_s)
        run(*sides, 0.0, frozen_s)
        sides[freezes].is_frozen = True
        judge = sides[1 - freezes]
        if is_used:
            assert judge.keepalive.used(frozen_s + judge.clock_s)
        run(*sides, frozen_s, frozen_s + 30.0)
        assert judge.gave_up_s is not None
        took_s = judge.gave_up_s - frozen_s
        if is_used:
            assert SILENCE_S <= took_s <= OUT_OF_ROUTES_S
        else:
            assert took_s <= REST_SILENCE_S + REST_TICK_S + LAST_LOOK_S + 1e-6


def test_with_a_peer_that_does_not_rest_nobody_does() -> None:
    dialler, other = Side(dialled=True, rests=False), Side(dialled=False, rests=False)
    run(dialler, other, 0.0, 200.0)
    assert len(dialler.pinged_s) >= 200 / (PING_S + CHECK_S)
    other.is_frozen = True
    run(dialler, other, 200.0, 230.0)
    assert dialler.gave_up_s is not None
    assert dialler.gave_up_s - 200.0 <= OUT_OF_ROUTES_S


def test_one_side_that_works_is_answered_by_one_at_rest() -> None:
    works, rests = Side(dialled=False), Side(dialled=True, clock_s=3.0)
    run(works, rests, 0.0, 100.0)
    for second in range(100, 200):
        works.keepalive.used(float(second))
        run(works, rests, float(second), second + 1.0)
    assert works.gave_up_s is None
    assert sum(each > 100 for each in works.pinged_s) >= 100 / (PING_S + YIELD_S + CHECK_S)
    assert sum(each > 100 for each in rests.pinged_s) <= 100 / REST_PING_S + 1
