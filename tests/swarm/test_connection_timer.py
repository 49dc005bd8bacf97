"""One timer that looks at many connections."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from swarmllm.supervision.runner import Supervision
from swarmllm.swarm.data.connection_timer import ConnectionTimer
from swarmllm.swarm.data.keepalive import CHECK_S


class EncodedBy:
    """Notes its looks; `sooner_s` is when it wants the next one, after the first."""

    def __init__(self, *, sooner_s: float | None = None, fails: bool = False) -> None:
        self.sooner_s = sooner_s
        self.fails = fails
        self.looks_s: list[float] = []
        self.ended = ""

    def look(self, now: float, check_at_s: float) -> float:
        self.looks_s.append(now)
        if self.fails:
            raise ValueError("of this connection")
        if self.sooner_s is not None and len(self.looks_s) == 1:
            return now + self.sooner_s
        return check_at_s

    def end(self, how: str) -> None:
        self.ended = how


async def test_connections_that_come_at_different_times_are_looked_at_together(
    autojump_clock: MockClock,
) -> None:
    timer, first, second = ConnectionTimer(), EncodedBy(), EncodedBy()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        began_s = trio.current_time()
        with timer.looking_at(first):
            await trio.sleep(0.3 * CHECK_S)
            with timer.looking_at(second):
                await trio.sleep(4 * CHECK_S)
            n_looks = len(second.looks_s)
            await trio.sleep(4 * CHECK_S)
        nursery.cancel_scope.cancel()
    assert second.looks_s[0] == pytest.approx(began_s + 0.3 * CHECK_S)
    assert set(second.looks_s[1:]) <= set(first.looks_s)
    assert len(second.looks_s) == n_looks, "it was over"
    assert len(first.looks_s) <= 10


async def test_a_connection_that_wants_a_look_sooner_gets_it(autojump_clock: MockClock) -> None:
    timer, each = ConnectionTimer(), EncodedBy(sooner_s=0.1 * CHECK_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        with timer.looking_at(each):
            await trio.sleep(2.5 * CHECK_S)
        nursery.cancel_scope.cancel()
    began_s = each.looks_s[0]
    assert [at_s - began_s for at_s in each.looks_s] == pytest.approx(
        [0.0, 0.1 * CHECK_S, CHECK_S, 2 * CHECK_S]
    )


async def test_an_error_ends_its_connection_and_no_other(autojump_clock: MockClock) -> None:
    timer, broken, sound = ConnectionTimer(), EncodedBy(fails=True), EncodedBy()
    with Supervision().active():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timer.run)
            with timer.looking_at(broken), timer.looking_at(sound):
                await trio.sleep(2 * CHECK_S)
            nursery.cancel_scope.cancel()
    assert "error here" in broken.ended
    assert not sound.ended
    assert len(sound.looks_s) >= 2


async def test_when_one_is_woken_the_others_are_looked_at_soon(autojump_clock: MockClock) -> None:
    """Work has come by it, perhaps, and then none rests."""
    timer, woken, other = ConnectionTimer(), EncodedBy(sooner_s=100.0), EncodedBy(sooner_s=100.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        with timer.looking_at(woken), timer.looking_at(other):
            await trio.sleep(10.0)
            began_s = trio.current_time()
            timer.wake(woken)
            await trio.sleep(1.5 * CHECK_S)
        nursery.cancel_scope.cancel()
    assert woken.looks_s[1] == began_s
    assert other.looks_s[1:] == [began_s + CHECK_S]


async def test_who_is_not_due_is_not_looked_at_when_another_is(autojump_clock: MockClock) -> None:
    """Of a hundred connections at rest, all but one."""

    class AtRest(EncodedBy):
        def look(self, now: float, check_at_s: float) -> float:
            self.looks_s.append(now)
            return now + 100.0

    timer, resting, busy = ConnectionTimer(), AtRest(), EncodedBy()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        with timer.looking_at(resting), timer.looking_at(busy):
            await trio.sleep(50 * CHECK_S)
            assert len(busy.looks_s) >= 50
            assert len(resting.looks_s) == 1
            timer.wake(resting)
            await trio.sleep(CHECK_S / 10)
            assert len(resting.looks_s) == 2
        timer.wake(resting)
        nursery.cancel_scope.cancel()
