"""Waits that may be late by seconds end at the same moments."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from swarmllm.shared_ticks import REST_TICK_S, TICK_S, next_rest_tick_s, next_tick_s, sleep_until_tick


@pytest.mark.parametrize(
    ("now", "wait_s", "then"),
    [
        (100.0, 5.0, 105.0),
        (100.9, 5.0, 105.0),  # the look took 0.9 s
        (101.1, 5.0, 110.0),
        (103.0, 9.0, 115.0),
        (100.0, 10.0, 110.0),
        (101.0, 10.0, 110.0),
        (103.0, 10.0, 120.0),
        (103.0, 15.0, 120.0),
        (100.0, 1.0, 101.0),
        (103.3, 1.0, 104.3),
    ],
)
def test_a_wait_ends_at_a_tick_if_it_is_not_shorter_than_one(now: float, wait_s: float, then: float) -> None:
    assert next_tick_s(now, wait_s) == pytest.approx(then)


def test_the_next_tick_of_a_node_at_rest_is_never_now() -> None:
    assert [next_rest_tick_s(now) for now in (100.0, 100.1, 109.9, 110.0)] == [110.0, 110.0, 110.0, 120.0]


async def test_loops_that_began_at_any_time_wake_up_together(autojump_clock: trio.testing.MockClock) -> None:
    woken_at_s = set[float]()

    async def loop(begins_s: float, wait_s: float) -> None:
        await trio.sleep(begins_s)
        while True:
            await sleep_until_tick(wait_s)
            woken_at_s.add(trio.current_time())

    with trio.move_on_after(60.5):
        async with trio.open_nursery() as nursery:
            for n, wait_s in enumerate((5.0, 5.0, 10.0, 15.0, 30.0)):
                nursery.start_soon(loop, 0.7 * n, wait_s)
    assert woken_at_s <= {n * TICK_S for n in range(13)}


async def test_loops_of_a_node_with_nothing_to_do_leave_every_other_tick_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    woken_at_s = set[float]()

    async def loop(begins_s: float, wait_s: float) -> None:
        await trio.sleep(begins_s)
        while True:
            await sleep_until_tick(wait_s)
            woken_at_s.add(trio.current_time())

    with trio.move_on_after(60.5):
        async with trio.open_nursery() as nursery:
            for n, wait_s in enumerate((REST_TICK_S, REST_TICK_S, 15.0, 30.0)):
                nursery.start_soon(loop, 0.7 * n, wait_s)
    assert woken_at_s == {n * REST_TICK_S for n in range(1, 7)}
