"""The queue of turns: whatever comes and goes, no cap is exceeded and no wake-up is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.keys import Tier
from swarmllm.scheduling.tiers import (
    OTHERS_S,
    TIERS,
    Caller,
    QueueChanges,
    QueueFull,
    RateLimits,
    Ticket,
    TurnQueue,
    tier_caps,
)

CAPS = {"bronze": 1, "silver": 2, "gold": 4, "platinum": 8}


@pytest.mark.parametrize(
    ("max_requests", "n_slots", "caps"),
    [(10, 99, (2, 5, 10, 20)), (10, 8, (2, 5, 8, 8)), (1, 99, (1, 1, 1, 2)), (4, 99, (1, 2, 4, 8))],
)
def test_shares_of_the_tiers(max_requests: int, n_slots: int, caps: tuple[int, ...]) -> None:
    assert tuple(tier_caps(max_requests, n_slots).values()) == caps


Step = tuple[str, Tier, int]
steps = st.lists(
    st.tuples(st.sampled_from(["submit", "submit", "leave"]), st.sampled_from(TIERS), st.integers(0, 30)),
    max_size=120,
)


@given(steps, st.integers(0, 6), st.integers(1, 12))
def test_no_cap_is_exceeded_and_no_wake_up_lost(
    script: list[Step], max_waiting: int, max_requests: int
) -> None:
    """`leave` stands for the end of a run, a failure, a cancellation and a deadline: all are the same."""
    queue = TurnQueue(tier_caps(max_requests, 99), max_waiting)
    queue.leave(queue.submit(Ticket(Caller("another"))).started[0])
    waiting: list[Ticket] = []
    running: list[Ticket] = []

    def apply(moves: QueueChanges) -> None:
        for ticket in moves.started:
            # Exactly once, and only who waits.
            waiting.remove(ticket)
            running.append(ticket)
        if moves.evicted is not None:
            waiting.remove(moves.evicted)

    def check() -> None:
        assert {ticket: queue.is_running(ticket) for ticket in waiting + running} == dict.fromkeys(
            waiting, False
        ) | dict.fromkeys(running, True)
        assert (queue.n_waiting(), queue.n_running()) == (len(waiting), len(running))
        assert len(waiting) <= max_waiting
        for n, tier in enumerate(TIERS):
            below = [ticket for ticket in running if ticket.caller.tier in TIERS[: n + 1]]
            assert len(below) <= queue.caps[tier]
            # A lost wake-up: somebody waits although there is room.
            assert not any(queue.has_room(ticket.caller) for ticket in waiting if ticket.caller.tier == tier)
            # A key that has a turn leaves the last one of each tier.
            keys = {ticket.caller.key_id for ticket in below}
            assert len(below) < queue.caps[tier] or queue.caps[tier] == 1 or len(keys) > 1

    for act, tier, number in script:
        if act == "submit":
            ticket = Ticket(Caller(f"{tier}-{number % 4}", tier))
            waiting.append(ticket)
            try:
                apply(queue.submit(ticket))
            except QueueFull:
                waiting.remove(ticket)
        elif waiting or running:
            everybody = waiting + running
            ticket = everybody[number % len(everybody)]
            (waiting if ticket in waiting else running).remove(ticket)
            apply(queue.leave(ticket))
            assert queue.leave(ticket) == QueueChanges()
        check()
    while running:
        apply(queue.leave(running.pop(0)))
        check()
    assert not waiting


def test_who_waits_most_makes_room_in_a_full_queue() -> None:
    queue = TurnQueue(dict.fromkeys(TIERS, 1), 2)
    greedy, other = [Ticket(Caller("greedy")) for _ in range(3)], Ticket(Caller("other"))
    for ticket in greedy:
        queue.submit(ticket)
    assert queue.submit(other) == QueueChanges((), greedy[2])
    assert queue.n_waiting() == 2
    with pytest.raises(QueueFull):
        queue.submit(Ticket(Caller("greedy")))
    assert queue.n_waiting() == 2


def test_nobody_of_a_higher_tier_makes_room() -> None:
    low, high = TIERS[0], TIERS[-1]
    queue = TurnQueue(dict.fromkeys(TIERS, 1), 3)
    running, *greedy = [Ticket(Caller("greedy", high)) for _ in range(4)]
    for ticket in (running, *greedy):
        queue.submit(ticket)
    with pytest.raises(QueueFull):
        queue.submit(Ticket(Caller("other", low)))
    assert queue.submit(Ticket(Caller("third", high))).evicted == greedy[-1]


def test_a_caller_without_a_rate_never_waits() -> None:
    limits = RateLimits()
    assert [limits.wait_s(Caller("user"), 0.0) for _ in range(3)] == [0.0] * 3


def test_a_key_leaves_a_turn_only_to_keys_in_use() -> None:
    queue = TurnQueue(dict.fromkeys(TIERS, 4), 99)
    single, other = [Ticket(Caller("single")) for _ in range(5)], Ticket(Caller("other"))
    for ticket in single:
        queue.submit(ticket, 0.0)
    assert [queue.is_running(ticket) for ticket in single] == [True, True, True, True, False]
    # Another key asks: the first one that ends makes room for it, and the next for nobody else.
    queue.submit(other, 1.0)
    assert queue.leave(single[0]).started == (other,)
    assert queue.leave(other).started == ()
    assert queue.n_waiting() == 1
    assert queue.leave(single[1]).started == (single[4],)
    # After a while without another key all turns are the first one's again.
    late = [Ticket(Caller("single")) for _ in range(2)]
    assert queue.submit(late[0], 1.0 + OTHERS_S).started == ()
    assert queue.submit(late[1], 2.0 + OTHERS_S).started == (late[0],)
    assert list(queue._asked_s) == ["single"]


@pytest.mark.parametrize("other", ["other", ""])
def test_users_without_a_key_are_others_too(other: str) -> None:
    queue = TurnQueue(dict.fromkeys(TIERS, 2), 99)
    queue.leave(queue.submit(Ticket(Caller(other))).started[0])
    for _ in range(2):
        queue.submit(Ticket(Caller("key")))
    assert (queue.n_running(), queue.n_waiting()) == (1, 1)


def test_users_without_a_key_leave_no_turn_to_others() -> None:
    """They are many, and not one that has all turns."""
    queue = TurnQueue(dict.fromkeys(TIERS, 2), 99)
    queue.leave(queue.submit(Ticket(Caller("key"))).started[0])
    for _ in range(2):
        queue.submit(Ticket(Caller("")))
    assert (queue.n_running(), queue.n_waiting()) == (2, 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_keys_of_a_tier_are_served_in_turn(keys: list[int]) -> None:
    """Between two turns of a key, no other key that waited all the time has more than one."""
    queue = TurnQueue({"bronze": 1, "silver": 1, "gold": 1, "platinum": 1}, 99)
    tickets = [Ticket(Caller(str(key))) for key in keys]
    for ticket in tickets:
        queue.submit(ticket)
    served = [tickets[0]]
    while moved := queue.leave(served[-1]).started:
        served += moved
    assert len(served) == len(tickets)
    order = [ticket.caller.key_id for ticket in served[1:]]
    left = {key: order.count(key) for key in order}
    while order:
        round_, order = order[: len(left)], order[len(left) :]
        assert sorted(round_) == sorted(left)
        left = {key: n - 1 for key, n in left.items() if n > 1}


@given(st.integers(1, 100), st.lists(st.floats(0, 10), max_size=80))
def test_no_more_requests_pass_than_the_rate_allows(rate_limit: int, gaps_s: list[float]) -> None:
    limits, caller = RateLimits(), Caller("key", rate_limit=rate_limit)
    now_s, passed = 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = limits.wait_s(caller, now_s)
        assert wait_s <= 60 / rate_limit + 1e-6
        if not wait_s:
            passed.append(now_s)
    for n, then_s in enumerate(passed):
        assert n < rate_limit + rate_limit * then_s / 60 + 1e-6


def test_of_users_that_wait_as_much_none_gives_way_and_never_one_of_a_higher_tier() -> None:
    queue = TurnQueue(dict.fromkeys(TIERS, 1), 2)
    queue.submit(Ticket(Caller("first", "gold")))
    for _ in range(2):
        queue.submit(Ticket(Caller("high", "gold")))
    with pytest.raises(QueueFull):
        queue.submit(Ticket(Caller("low", "bronze")))
    assert (queue.n_waiting("gold"), queue.n_waiting("bronze"), queue.n_waiting()) == (2, 0, 2)
    level = TurnQueue(dict.fromkeys(TIERS, 1), 1)
    for _ in range(2):
        level.submit(Ticket(Caller("one")))
    with pytest.raises(QueueFull):
        level.submit(Ticket(Caller("other")))


def test_one_that_waits_and_leaves_starts_nobody_and_takes_no_place() -> None:
    queue = TurnQueue(dict.fromkeys(TIERS, 1), 9)
    running, leaving, next_one = (Ticket(Caller(name)) for name in ("a", "b", "c"))
    for ticket in (running, leaving, next_one):
        queue.submit(ticket)
    tier = running.caller.tier
    assert (queue.n_running(tier), queue.n_waiting(tier)) == (1, 2)
    assert queue.leave(leaving) == QueueChanges()
    assert queue.leave(leaving) == QueueChanges()
    assert queue.leave(running).started == (next_one,)
    assert queue.leave(running) == QueueChanges()
    assert (queue.n_running(), queue.n_waiting()) == (1, 0)


def test_the_rate_says_when_the_next_request_may_come_and_keys_have_buckets_of_their_own() -> None:
    limits, caller = RateLimits(), Caller("key", rate_limit=2)
    assert [limits.wait_s(caller, 100.0) for _ in range(2)] == [0.0, 0.0]
    assert limits.wait_s(caller, 100.0) == 30.0
    assert limits.wait_s(caller, 115.0) == pytest.approx(15.0)
    assert limits.wait_s(Caller("other", rate_limit=2), 115.0) == 0.0
    assert limits.wait_s(caller, 130.0) == 0.0
    # After a long time it is full, and not more than that.
    assert [limits.wait_s(caller, 9999.0) for _ in range(3)] == [0.0, 0.0, 30.0]
