"""What handling a job takes is learned from requests, and decides routes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from node_ids import A, B, C
from trio.testing import MockClock

from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.route.measuring import idle_network_s
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.scheduling.cost import HOP_HANDLING_S
from swarmllm.swarm.in_memory.link import LinkQuality
from swarmllm_proto.swarm import Stage

from .fakes import open_swarm
from .test_assembly import ask, held, stages
from .test_survival import kills, pools_of, read

RING = stages("a 0:4", "b 4:8", "c 8:12")


def test_a_token_travels_half_of_every_round_trip_of_the_ring() -> None:
    known = replace(ask(held(a="0:4", b="4:8", c="8:12")).inputs, pair_rtt_s={(C, B): 0.05})
    assert idle_network_s(RING, known) == pytest.approx((0.001 + 0.05 + 0.001) / 2)
    assert idle_network_s(stages("a 0:12"), known) == 0.0
    # b and c have not told how far they are from each other.
    assert idle_network_s(RING, replace(known, pair_rtt_s={})) is None
    busy = replace(known, speeds=known.speeds | {B: replace(known.speeds[B], n_active=1)})
    assert idle_network_s(RING, busy) is None


async def test_an_origin_learns_what_its_hops_take_besides_the_way(patient_clock: MockClock) -> None:
    """Every job waits 3 ms at its stage before a millisecond of computing."""
    pools = pools_of(a="0:6", b="6:12")

    async def wait(position: int, layers: LayerRange) -> None:
        await trio.sleep(0.004)

    for pool in pools.values():
        pool.before_forward = wait
    async with open_swarm(pools) as swarm:
        swarm.network.set_link(A, B, LinkQuality(0.01))
        swarm.network.set_link(B, A, LinkQuality(0.01))
        pipelines = swarm[A].pipelines

        async def hop_s() -> float:
            plan = await pipelines.plan(swarm.entry, RequestSize(1, 1))
            return plan.stages[1].network_s

        assert await hop_s() == pytest.approx(0.01 + HOP_HANDLING_S)
        await read(swarm, A, kills(swarm))
        assert await hop_s() == pytest.approx(0.01 + 0.003, rel=0.02)


def test_stages_in_a_row_on_one_node_are_no_hops() -> None:
    known = ask(held(a="0:12", b="4:8")).inputs
    ring = (*stages("a 0:4", "b 4:8"), Stage(node_id=A, start=8, end=12))
    assert idle_network_s(ring, known) == pytest.approx(0.001)
