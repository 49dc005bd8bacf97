"""Handshakes a few at a time."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from swarmllm.swarm.libp2p.handshake_turns import (
    STALE_S,
    TURN_S,
    TURNS,
    Handshake,
    HandshakeTurns,
)


class FakeStream(trio.abc.AsyncResource):
    def __init__(self, network: str) -> None:
        self.network = network
        self.spoken = trio.Event()
        self.is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True
        self.spoken.set()
        await trio.lowlevel.checkpoint()


class Stand:
    def __init__(self, nursery: trio.Nursery, half_open_max: int = 64) -> None:
        self._nursery = nursery
        speaks: Callable[[Any], Awaitable[None]] = self._speaks
        self.turns = HandshakeTurns(
            speaks, random.Random(0), network=self._network, half_open_max=half_open_max
        )
        self.begun: dict[int, Handshake] = {}
        self.streams: list[FakeStream] = []

    def _network(self, stream: Any) -> str:
        return str(stream.network)

    async def _speaks(self, stream: FakeStream) -> None:
        await stream.spoken.wait()
        if stream.is_closed:
            raise trio.ClosedResourceError

    async def come(self, n: int, network: str = "a", *, speaks: bool = True) -> None:
        for _ in range(n):
            stream = FakeStream(network)
            self.streams.append(stream)
            self._nursery.start_soon(self._begin, len(self.streams) - 1)
            if speaks:
                stream.spoken.set()
            await wait_all_tasks_blocked()

    async def _begin(self, number: int) -> None:
        stream: Any = self.streams[number]
        if (handshake := await self.turns.begin(stream)) is not None:
            self.begun[number] = handshake

    @property
    def closed(self) -> list[int]:
        return [number for number, stream in enumerate(self.streams) if stream.is_closed]


async def test_a_few_have_a_turn_and_the_others_come_after_them_in_order(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        stand = Stand(nursery)
        await stand.come(TURNS + 3)
        assert list(stand.begun) == list(range(TURNS))
        stand.begun[3].end()
        await wait_all_tasks_blocked()
        assert list(stand.begun) == list(range(TURNS + 1))
        await trio.sleep(TURN_S + 0.1)
        assert list(stand.begun) == list(range(TURNS + 3)), "a turn is over although its handshake is not"
        assert not stand.closed


async def test_who_has_waited_too_long_is_closed_before_anything_is_done_for_it(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        n_served = TURNS * (1 + int(STALE_S / TURN_S))
        stand = Stand(nursery, half_open_max=n_served + 5)
        await stand.come(n_served + 5)
        await trio.sleep(STALE_S + 0.1)
        assert sorted(stand.begun) == list(range(n_served))
        assert stand.closed == list(range(n_served, n_served + 5))


async def test_a_silent_peer_has_no_turn_and_makes_room(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        stand = Stand(nursery, half_open_max=TURNS)
        await stand.come(TURNS, speaks=False)
        await stand.come(2)
        assert list(stand.begun) == [TURNS, TURNS + 1]
        assert stand.closed == [0, 1]
        nursery.cancel_scope.cancel()


async def test_a_crowd_of_speakers_does_not_push_out_who_has_a_turn(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        stand = Stand(nursery, half_open_max=2 * TURNS)
        await stand.come(6 * TURNS)
        assert list(stand.begun) == list(range(TURNS))
        assert len(stand.closed) == 4 * TURNS
        assert min(stand.closed) >= TURNS
        assert stand.closed[-TURNS:] != list(range(5 * TURNS, 6 * TURNS)), "the latest are not always refused"
        nursery.cancel_scope.cancel()


async def test_the_next_turn_is_for_the_network_with_fewest(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        stand = Stand(nursery)
        await stand.come(4 * TURNS, "crowd")
        await stand.come(1, "home")
        await stand.come(1, "other home")
        await trio.sleep(TURN_S + 0.1)
        assert {4 * TURNS, 4 * TURNS + 1} <= set(stand.begun)
        assert len(stand.begun) == 2 * TURNS
        nursery.cancel_scope.cancel()


async def test_the_network_that_has_most_makes_room(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        stand = Stand(nursery, half_open_max=3 * TURNS)
        await stand.come(3 * TURNS, "crowd")
        homes = {len(stand.streams) + n for n in range(3)}
        for number in homes:
            await stand.come(1, f"home {number}")
        await stand.come(6 * TURNS, "crowd")
        assert len(stand.closed) == 6 * TURNS + 3
        assert not homes & set(stand.closed)
        nursery.cancel_scope.cancel()
