"""Whom to dial and when."""

from __future__ import annotations

import random

import trio
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    DIALS_FIRST,
    DIALS_MAX,
    DOUBT_FIRST_S,
    HOLD_BACK_S,
    PEERS_MAX,
    QUICK_S,
    SLOW_S,
    Dialler,
)
from swarmllm.swarm.peers.connection_limits import Standings

HERE = [Address("192.0.2.1", 8810)]
THERE = [Address("192.0.2.2", 8810)]


def dialler() -> Dialler:
    return Dialler("me", random.Random(0))


def names(due: tuple[list[tuple[str, list[Address]]], float]) -> list[str]:
    return [node_id for node_id, _ in due[0]]


def test_the_smaller_id_dials_at_once_and_the_larger_holds_back() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    d.suggest("ann", HERE, now=0.0)
    ready, next_s = d.due(0.0, set())
    assert ready == [("zoe", HERE)]
    assert next_s == HOLD_BACK_S
    assert names(d.due(HOLD_BACK_S, set())) == ["ann"]


def test_oneself_and_the_connected_are_never_dialled() -> None:
    d = dialler()
    d.suggest("me", HERE, now=0.0)
    d.suggest("zoe", HERE, now=0.0)
    assert names(d.due(0.0, {"zoe"})) == []
    assert names(d.due(0.0, set())) == ["zoe"]


def test_a_failing_node_is_tried_ever_more_rarely_but_for_ever() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    now, waits = 0.0, []
    for _ in range(12):
        assert names(d.due(now, set())) == ["zoe"]
        assert names(d.due(now, set())) == []
        d.dialled("zoe", now, succeeded=False)
        _, next_s = d.due(now, set())
        waits.append(next_s - now)
        now = next_s
    assert waits[0] <= 2 * BACKOFF_FIRST_S
    assert all(BACKOFF_MAX_S / 2 <= wait <= BACKOFF_MAX_S for wait in waits[-4:])


def test_hearsay_is_given_up_after_some_failures_and_better_words_keep_it() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0, patience=2)
    d.suggest("zed", HERE, now=0.0, patience=2)
    d.suggest("zed", HERE, now=0.0, patience=3)
    for now in (0.0, 100.0):
        assert names(d.due(now, set())) == ["zoe", "zed"]
        d.dialled("zoe", now, succeeded=False)
        d.dialled("zed", now, succeeded=False)
    assert names(d.due(200.0, set())) == ["zed"]
    d.suggest("zoe", HERE, now=200.0, patience=2)
    assert names(d.due(200.0, set())) == ["zoe"]


def test_news_of_an_address_starts_the_back_off_afresh() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    for _ in range(8):
        d.due(1000.0, set())
        d.dialled("zoe", 1000.0, succeeded=False)
    d.suggest("zoe", HERE, now=1000.0)
    assert d.due(1000.0, set())[1] > 1000.0 + HOLD_BACK_S
    d.suggest("zoe", THERE, now=1000.0)
    assert d.due(1000.0 + HOLD_BACK_S, set())[0] == [("zoe", [*THERE, *HERE])]


def test_a_lost_node_is_sought_at_once_and_one_that_said_goodbye_later() -> None:
    for on_purpose in (False, True):
        d = dialler()
        d.suggest("zoe", HERE, now=0.0)
        d.due(0.0, set())
        d.dialled("zoe", 0.0, succeeded=True)
        d.lost("zoe", 100.0, on_purpose=on_purpose)
        _, next_s = d.due(100.0, set())
        assert (next_s - 100.0 > 1.0) is on_purpose


def test_a_lost_node_is_not_spoken_of_until_it_is_heard_of_or_connected() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    assert not d.is_lost("zoe", 0.0)
    d.lost("zoe", 100.0, on_purpose=False)
    assert d.is_lost("zoe", 99.0)
    assert d.is_lost("zoe", 100.0 + DOUBT_FIRST_S), "that may have been under way"
    assert not d.is_lost("zoe", 103.0)
    d.answered("zoe")
    assert not d.is_lost("zoe", 99.0)


def test_what_the_settings_name_is_never_given_up() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0, lasting=True)
    d.suggest("zac", HERE, now=0.0)
    d.forget("zoe")
    d.forget("zac")
    assert names(d.due(0.0, set())) == ["zoe"]


def test_dials_and_peers_are_bounded() -> None:
    d = dialler()
    for number in range(50):
        d.suggest(f"z{number}", HERE, now=0.0)
    first = names(d.due(0.0, set()))
    assert len(first) == DIALS_FIRST
    assert names(d.due(0.0, set())) == []
    full = {f"peer {number}" for number in range(PEERS_MAX)}
    d.dialled(first[0], 0.0, succeeded=True)
    assert names(d.due(100.0, full)) == []
    assert len(names(d.due(100.0, set()))) == 2


def dial_all_due(
    d: Dialler, now: float, took_s: float, *, succeeded: bool = True, unanswered: bool = False
) -> int:
    """How many dials were due at once; each is over after `took_s`."""
    due = names(d.due(now, set()))
    for node_id in due:
        d.dialled(node_id, now + took_s, succeeded=succeeded, unanswered=unanswered)
    return len(due)


def test_quick_dials_make_room_for_more_and_slow_ones_for_fewer() -> None:
    d = dialler()
    for number in range(200):
        d.suggest(f"z{number}", HERE, now=0.0)
    assert [dial_all_due(d, 0.0, QUICK_S) for _ in range(4)] == [
        DIALS_FIRST,
        2 * DIALS_FIRST,
        DIALS_MAX,
        DIALS_MAX,
    ]
    assert [dial_all_due(d, 0.0, SLOW_S) for _ in range(3)] == [DIALS_MAX, 1, 1]
    assert [dial_all_due(d, 0.0, QUICK_S) for _ in range(2)] == [1, 2]
    dial_all_due(d, 0.0, SLOW_S, succeeded=False)
    assert dial_all_due(d, 0.0, SLOW_S, succeeded=False, unanswered=True) == 4
    assert dial_all_due(d, 0.0, QUICK_S) == 1


async def test_running_it_dials_until_everybody_is_connected(autojump_clock: MockClock) -> None:
    d = Dialler("me", random.Random(0), peers_max=20)
    connected: set[str] = set()
    attempts: dict[str, int] = {}

    async def dial(node_id: str, addresses: list[Address]) -> None:
        attempts[node_id] = attempts.get(node_id, 0) + 1
        await trio.sleep(0.1)
        if attempts[node_id] < 4:
            raise NodeUnreachable("not yet")
        connected.add(node_id)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(d.run, dial, lambda: connected)
        await trio.sleep(1)
        for number in range(20):
            d.suggest(f"z{number}", HERE, trio.current_time())
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert connected == {f"z{number}" for number in range(20)}
    assert set(attempts.values()) == {4}


def test_strangers_on_every_place_do_not_keep_it_from_dialling_whom_it_knows() -> None:
    known = {"friend", "zed", "zoe"}

    standings = Standings(remembered=known)
    d = Dialler("me", random.Random(0), 2, standings)
    for node_id in ("zoe", "stranger", "zed"):
        d.suggest(node_id, HERE, now=0.0)
    assert names(d.due(HOLD_BACK_S, {"a", "b", "c"})) == ["zoe", "zed"]
    d = Dialler("me", random.Random(0), 2, standings)
    d.suggest("zoe", HERE, now=0.0)
    assert names(d.due(HOLD_BACK_S, {"a", "friend"})) == ["zoe"]
    d = Dialler("me", random.Random(0), 2, standings)
    d.suggest("zoe", HERE, now=0.0)
    assert names(d.due(HOLD_BACK_S, {"zed", "friend"})) == []
