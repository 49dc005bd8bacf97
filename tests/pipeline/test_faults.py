"""Faults that nobody need mean. A liar that makes them on purpose is left, and no honest node pays for it."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from bench.common.arithmetic import FakePool
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.codec import decode_job, encode_job
from swarmllm_proto.swarm import LayerForward, PipelineError

from .fakes import Swarm, open_swarm
from .test_checks import ask, prefer

A, B, H, LIAR, M, N = (node_id_named(name) for name in ("a", "b", "h", "liar", "m", "n"))


def damage_what_it_sends(swarm: Swarm) -> list[str]:
    """Every job of the liar's has another byte than its digest says. Returns the requests, as they come."""
    router, send = swarm[LIAR].router, swarm[LIAR].router.send
    requests: list[str] = []

    async def damaged(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        message = decode_job(header, payload)
        if isinstance(message, LayerForward) and payload:
            requests.append(message.request_id)
            payload = bytes([payload[0]]) + bytes([payload[1] ^ 1]) + bytes(payload[2:])
        await send(receiver, header, payload)

    router.send = damaged  # type: ignore[method-assign]
    return requests


@pytest.mark.parametrize("has_spare_last", [True, False])
async def test_a_stage_that_damages_what_it_sends_is_left_and_the_one_that_says_so_keeps_its_trust(
    has_spare_last: bool, patient_clock: MockClock
) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8"), M: FakePool("4:8"), H: FakePool("8:12")}
    if has_spare_last:
        pools[N] = FakePool("8:12")
    async with open_swarm(pools) as swarm:
        requests = damage_what_it_sends(swarm)
        await prefer(swarm, LIAR, M)
        for _ in range(20):
            assert await ask(swarm)
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in pools.keys() - {A, LIAR})
        assert len(set(requests)) <= 2
        # Who got the jobs knows who sent them.
        assert min(swarm[node_id].trust.score(LIAR) for node_id in pools.keys() & {H, N}) < NEUTRAL
        swarm.kill(LIAR)
        assert await ask(swarm)
        await swarm.quiet()


async def test_a_stage_that_says_that_whole_jobs_are_damaged_costs_no_other_node_its_trust(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), N: FakePool("4:8"), LIAR: FakePool("8:12")}
    pools[H] = FakePool("8:12")
    async with open_swarm(pools) as swarm:
        node = swarm[LIAR]

        async def complain(sender: str, header: bytes, payload: memoryview) -> None:
            message = decode_job(header, payload)
            if not isinstance(message, LayerForward):
                await node.pipelines.on_message(sender, header, payload)
                return
            report = PipelineError(
                request_id=message.request_id,
                node_id=LIAR,
                kind="damaged",
                damaged=True,
                position=message.position,
            )
            await node.router.send(A, *encode_job(report))

        node.router.serve(node.pipelines.on_request, complain)
        await prefer(swarm, LIAR, H)
        for _ in range(20):
            assert await ask(swarm)
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, N, H))
        swarm.kill(LIAR)
        assert await ask(swarm)
        await swarm.quiet()


async def test_accusations_of_every_other_member_cost_no_trust_and_no_work(patient_clock: MockClock) -> None:
    """Nine members say in every request that the only holder has failed."""
    liars = [node_id_named(f"liar{index}") for index in range(9)]
    pools = {A: FakePool("0:4"), M: FakePool("4:12")} | {liar: FakePool("0:1") for liar in liars}
    async with open_swarm(pools) as swarm:
        for turn in range(20):
            for liar in liars:
                error = PipelineError(
                    request_id=f"r{turn}", node_id=M, kind="worker_died", message="it failed"
                )
                await swarm[liar].router.send(A, *encode_job(error))
            assert await ask(swarm)
        assert swarm[A].trust.score(M) > NEUTRAL
        assert swarm[A].trust.explain(M).counts == {"served": 20}
        await swarm.quiet()
