"""What happens to nodes to which something happens, with the simulated network of `bench.disturbances`."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock

from bench.common.record_swarm import RecordNetwork
from bench.disturbances import RecordSwarm, crowd, half_dies, halves, started, wrong_clocks


@asynccontextmanager
async def a_swarm(n_nodes: int, n_places: int) -> AsyncIterator[RecordSwarm]:
    """`n_places`: connections that each node looks for."""
    async with trio.open_nursery() as nursery:
        swarm = RecordSwarm(RecordNetwork(nursery, 1), random.Random(1), peers_max=n_places)
        await started(swarm, n_nodes)
        yield swarm
        nursery.cancel_scope.cancel()


async def test_two_halves_that_were_separated_meet_again(autojump_clock: MockClock) -> None:
    """Each half has nodes enough for all places, so nobody looks for more."""
    async with a_swarm(24, 6) as swarm:
        await halves(swarm)
        assert swarm.knows()


async def test_all_reach_all_after_a_crowd_the_death_of_half_and_wrong_clocks(
    autojump_clock: MockClock,
) -> None:
    async with a_swarm(16, 4) as swarm:
        await crowd(swarm, 8)
        await half_dies(swarm)
        await wrong_clocks(swarm)
        assert swarm.knows()
        assert swarm.n_dead() == 0
