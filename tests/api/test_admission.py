"""Turns: never more at a time than allowed, in order, none lost."""

from __future__ import annotations

import itertools
import random

import pytest
import trio
import trio.testing

from swarmllm.errors import Overloaded
from swarmllm.node import Admission


@pytest.mark.parametrize("max_running", [1, 2])
async def test_no_more_than_the_cap_run_and_the_rest_in_order(
    autojump_clock: object, max_running: int
) -> None:
    admission = Admission(max_running, 10, 100.0)
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
    admission = Admission(1, 1, 100.0)
    async with trio.open_nursery() as nursery, admission.turn():
        nursery.start_soon(hold, admission)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="1 requests wait"):
            async with admission.turn():
                pass
        nursery.cancel_scope.cancel()


async def test_a_wait_that_takes_too_long_is_refused(autojump_clock: object) -> None:
    admission = Admission(1, 1, 3.0)
    async with admission.turn():
        with pytest.raises(Overloaded, match="3 s"):
            async with admission.turn():
                pass
    assert trio.current_time() == pytest.approx(3)
    async with admission.turn() as waited_s:
        assert waited_s == 0


async def test_no_turn_is_lost_to_random_cancellations(autojump_clock: object) -> None:
    admission = Admission(3, 1000, 5.0)
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


async def hold(admission: Admission) -> None:
    async with admission.turn():
        await trio.sleep_forever()
