"""Whole models on other nodes: their tokens are sampled again, by the origin or by another holder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from bench.common.arithmetic import FakePool
from swarmllm.pipeline import Prompt
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN, TrustEvent
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, open_swarm
from .test_check_tallies import DrawingPool, EndingPool, GreedyPool
from .test_checks import ALWAYS, LIAR, A, LyingHead, M, N, asked_and_checked, count, drawn, prefer

__all__ = ["drawn"]  # The fixture has every request checked.

WHOLE = "0:12"


def holders(liar: FakePool, honest: type[FakePool] = FakePool) -> dict[str, FakePool]:
    return {A: honest(), LIAR: liar, M: honest(WHOLE), N: honest(WHOLE)}


async def out_after(swarm: Swarm, n_requests: int) -> int | None:
    """Requests until the liar gets no more work."""
    for number in range(n_requests):
        await prefer(swarm, LIAR, M, N)
        await asked_and_checked(swarm)
        if swarm[A].trust.score(LIAR) < WORK_MIN:
            return number + 1
    return None


@pytest.mark.parametrize("pool", [FakePool, DrawingPool])
async def test_an_honest_whole_model_is_right_with_equal_bits(
    pool: type[FakePool], patient_clock: MockClock
) -> None:
    async with open_swarm(holders(pool(WHOLE), pool), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        for _ in range(10):
            await asked_and_checked(swarm)
        explained = swarm[A].trust.explain(LIAR)
        assert explained.counts == {"served": 10, "checked": 10}
        assert {entry.detail for entry in explained.recent if entry.trust_event is TrustEvent.CHECKED} == {
            "equal bits"
        }
        assert all(swarm[A].trust.explain(node_id).counts == {} for node_id in (M, N))
        await swarm.quiet()


@pytest.mark.parametrize("liar", [GreedyPool, EndingPool])
async def test_a_whole_model_that_does_not_draw_or_ends_early_is_out_of_all_routes(
    liar: type[FakePool], patient_clock: MockClock
) -> None:
    async with open_swarm(holders(liar(WHOLE), DrawingPool), settings=ALWAYS) as swarm:
        assert await out_after(swarm, 60) is not None
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, N))
        await swarm.quiet()


async def test_a_whole_model_that_gives_other_tokens_is_out_of_all_routes(patient_clock: MockClock) -> None:
    """A token with the next id lies beside the one that the seed gives, as rounding has it now and then: so
    it takes more answers than tokens that lie far away."""
    async with open_swarm(holders(LyingHead(WHOLE)), settings=ALWAYS) as swarm:
        assert await out_after(swarm, 20) is not None
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, N))
        await swarm.quiet()


async def test_an_origin_that_has_the_model_itself_asks_nobody(patient_clock: MockClock) -> None:
    pools = {A: FakePool(WHOLE), LIAR: LyingHead(WHOLE)}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        swarm[A].pipelines._observations.observe(swarm.entry.model_id, "decode", 100.0, 1, 1)
        await prefer(swarm, LIAR)
        for _ in range(8):
            await asked_and_checked(swarm)
            if swarm[A].trust.score(LIAR) < WORK_MIN:
                break
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        await swarm.quiet()


async def test_no_holder_that_is_distrusted_is_told_the_prompt(patient_clock: MockClock) -> None:
    async with open_swarm(holders(FakePool(WHOLE)), settings=ALWAYS) as swarm:
        for node_id in (M, N):
            swarm[A].trust.note(node_id, TrustEvent.FAILED)
        await prefer(swarm, LIAR, M, N)
        assert await asked_and_checked(swarm)
        assert swarm[A].pipelines.statistics().checks_dropped == 1
        assert not any(swarm[node_id].pool.calls for node_id in (M, N))
        await swarm.quiet()


async def test_where_tokens_are_kept_private_no_other_holder_is_told_them(patient_clock: MockClock) -> None:
    settings = replace(ALWAYS, local_embedding_privacy=True)
    pools = holders(FakePool(WHOLE)) | {A: FakePool("0:1")}
    async with open_swarm(pools, settings=settings) as swarm:
        await prefer(swarm, LIAR, M, N)
        with trio.fail_after(600):
            async with swarm[A].pipelines.generate(
                Prompt(text="a secret"), swarm.entry, Sampling(max_tokens=4)
            ) as generation:
                assert [piece async for piece in generation]
        await swarm.quiet()
        assert not any(swarm[node_id].pool.calls for node_id in (M, N))
