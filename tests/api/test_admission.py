"""Turns: never more at a time than allowed, in order, none lost."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import trio
import trio.testing

from swarmllm.errors import NodeStopping, Overloaded
from swarmllm.keys import Tier
from swarmllm.node import Admission
from swarmllm.scheduling.tiers import LOCAL, TIERS, Caller, tier_caps


def admission_of(max_running: int, max_queued: int, timeout_s: float) -> Admission:
    return Admission(tier_caps(max_running, max_running), max_queued, timeout_s)


@pytest.mark.parametrize("max_running", [1, 2])
async def test_no_more_than_the_cap_run_and_the_rest_in_order(
    autojump_clock: object, max_running: int
) -> None:
    admission = admission_of(max_running, 10, 100.0)
    order: list[int] = []

    async def request(number: int) -> None:
        async with admission.turn():
            order.append(number)
            assert admission.n_active <= max_running
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(request, number)
            await trio.testing.wait_all_tasks_blocked()
    # Those that start at the same moment are in no order among themselves.
    starts = [sorted(order[i : i + max_running]) for i in range(0, 8, max_running)]
    assert list(itertools.chain(*starts)) == list(range(8))
    assert (admission.n_active, admission.n_queued) == (0, 0)
    assert trio.current_time() == pytest.approx(8 / max_running)


async def test_a_full_queue_refuses_at_once(autojump_clock: object) -> None:
    admission = admission_of(1, 1, 100.0)
    async with trio.open_nursery() as nursery, admission.turn():
        nursery.start_soon(hold, admission)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="1 requests wait"):
            async with admission.turn():
                pass
        nursery.cancel_scope.cancel()


async def test_a_wait_that_takes_too_long_is_refused(autojump_clock: object) -> None:
    admission = admission_of(1, 1, 3.0)
    async with admission.turn():
        with pytest.raises(Overloaded, match="3 s"):
            async with admission.turn():
                pass
    assert trio.current_time() == pytest.approx(3)
    async with admission.turn() as waited_s:
        assert waited_s == 0


async def test_no_turn_is_lost_to_random_cancellations(autojump_clock: object) -> None:
    admission = admission_of(3, 1000, 5.0)
    dice = random.Random(7)
    n_served = 0

    async def request() -> None:
        nonlocal n_served
        with trio.move_on_after(dice.uniform(0, 4)):
            try:
                async with admission.turn():
                    n_served += 1
                    await trio.sleep(dice.uniform(0, 1))
                    if dice.random() < 0.2:
                        raise RuntimeError
            except (Overloaded, RuntimeError):
                pass

    async with trio.open_nursery() as nursery:
        for _ in range(300):
            nursery.start_soon(request)
            await trio.sleep(dice.uniform(0, 0.2))
    assert n_served > 50
    assert (admission.n_active, admission.n_queued) == (0, 0)


async def hold(admission: Admission, caller: Caller = LOCAL) -> None:
    async with admission.turn(caller):
        await trio.sleep_forever()


async def test_keys_take_turns_however_many_requests_each_has(autojump_clock: object) -> None:
    admission = admission_of(1, 20, 100.0)
    order: list[str] = []

    async def request(caller: Caller) -> None:
        async with admission.turn(caller):
            order.append(caller.key_id)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for key_id in ["many"] * 5 + ["few"] * 2:
            nursery.start_soon(request, Caller(key_id))
            await trio.testing.wait_all_tasks_blocked()
    assert order == ["many", "many", "few", "many", "few", "many", "many"]


async def test_a_full_queue_makes_room_for_a_key_with_fewer_requests(autojump_clock: object) -> None:
    admission = admission_of(1, 2, 100.0)
    refused: list[str] = []

    async def request(caller: Caller) -> None:
        try:
            async with admission.turn(caller):
                await trio.sleep(1)
        except Overloaded:
            refused.append(caller.key_id)

    async with trio.open_nursery() as nursery:
        for key_id in ("many", "many", "many", "few", "few"):
            nursery.start_soon(request, Caller(key_id))
            await trio.testing.wait_all_tasks_blocked()
        # One of "many" had its turn, one waits, the other gave way to "few", whose second found it as full.
        assert refused == ["many", "few"]
    assert admission.refused == {("gold", "full"): 2}


async def test_tiers_have_their_shares_and_the_higher_goes_first(autojump_clock: object) -> None:
    admission = Admission(tier_caps(8, 99), 99, 100.0)
    assert admission.caps == {"bronze": 2, "silver": 4, "gold": 8, "platinum": 16}
    order: list[Tier] = []

    async def request(tier: Tier) -> None:
        async with admission.turn(Caller(tier, tier)):
            order.append(tier)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            for tier in TIERS:
                nursery.start_soon(request, tier)
                await trio.testing.wait_all_tasks_blocked()  # Together they would begin in no certain order.
        active = {tier: admission.n_active_of(tier) for tier in TIERS}
    # Each tier has one key here, and a key that has a turn leaves the last one to others.
    assert active == {"bronze": 1, "silver": 2, "gold": 4, "platinum": 8}
    assert len(order) == 80
    # As long as anybody higher waited, nobody lower began.
    assert order[-2:] == ["bronze", "bronze"]


async def test_a_key_may_send_as_many_requests_per_minute_as_it_says(autojump_clock: object) -> None:
    admission = admission_of(5, 5, 100.0)
    limited = Caller("limited", rate_limit=3)

    async def try_once(caller: Caller) -> float:
        """Seconds to wait, 0 where it was let in."""
        try:
            async with admission.turn(caller):
                return 0.0
        except Overloaded as refusal:
            return refusal.retry_after_s

    assert [await try_once(limited) for _ in range(4)] == [0, 0, 0, pytest.approx(20)]
    assert await try_once(LOCAL) == 0
    await trio.sleep(20.01)
    assert [await try_once(limited) > 0 for _ in range(2)] == [False, True]
    assert admission.refused == {("gold", "rate"): 2}


async def test_who_is_refused_is_told_when_the_others_will_have_had_their_turns(
    autojump_clock: object,
) -> None:
    admission = admission_of(1, 2, 100.0)
    await trio.sleep(30)
    async with admission.turn():
        await trio.sleep(4)
    async with trio.open_nursery() as nursery, admission.turn():
        for _ in range(2):
            nursery.start_soon(hold, admission)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded) as refusal:
            async with admission.turn():
                pass
        assert refusal.value.retry_after_s == pytest.approx(12)
        nursery.cancel_scope.cancel()


async def test_a_key_leaves_the_last_turn_to_others_however_long_its_requests_run(
    autojump_clock: object,
) -> None:
    """Sixteen requests that never end cost another key no 429."""
    admission = admission_of(8, 64, 30.0)
    endless = Caller("endless")
    async with admission.turn(Caller("other")):
        pass
    async with trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(partial(hold, admission, endless))
        await trio.testing.wait_all_tasks_blocked()
        assert (admission.n_active, admission.n_queued) == (7, 9)
        for key_id in ("other", "third"):
            async with admission.turn(Caller(key_id)) as waited_s:
                assert waited_s == 0
                assert admission.n_active == 8
        nursery.cancel_scope.cancel()


async def test_where_nobody_has_a_key_all_turns_are_taken(autojump_clock: object) -> None:
    admission = admission_of(2, 2, 30.0)
    async with admission.turn(), admission.turn():
        assert admission.n_active == 2
    async with admission.turn(Caller("a")), admission.turn(Caller("b")):
        assert admission.n_active == 2
    single = admission_of(1, 2, 30.0)
    async with single.turn(Caller("a")):
        assert single.n_active == 1


async def test_after_closing_those_inside_go_on_until_they_are_ended(autojump_clock: object) -> None:
    admission = admission_of(1, 10, 100.0)
    ends: list[str] = []

    async def request(name: str, seconds: float) -> None:
        try:
            async with admission.turn():
                await trio.sleep(seconds)
                ends.append(f"{name} complete")
        except NodeStopping:
            ends.append(f"{name} stopped")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request, "short", 1)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(request, "long", 50)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(request, "waiting", 1)
        await trio.testing.wait_all_tasks_blocked()
        admission.close()
        with pytest.raises(NodeStopping):
            async with admission.turn():
                ends.append("never")
        with trio.move_on_after(5) as scope:
            await admission.wait_empty()
        assert scope.cancelled_caught
        assert ends == ["short complete"]
        admission.end_all()
        await admission.wait_empty()
    assert ends[0] == "short complete"
    assert sorted(ends[1:]) == ["long stopped", "waiting stopped"]
    assert (admission.n_active, admission.n_queued) == (0, 0)
