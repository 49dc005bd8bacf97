"""Standbys that start beside a slow pipeline: when, how much work that may be, and what becomes of the text
and of the nodes that were slow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from node_ids import LIAR, A, B, H, M, node_id_named
from trio.testing import MockClock

from bench.common.arithmetic import FakePool, uncut
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.sampling import SINGLE_ROW
from swarmllm.pipeline.repair.hedge import (
    AHEAD,
    FAR,
    LONGEST_PAUSE_S,
    LOOK_AGAIN_S,
    SOON_S,
    AwaitedToken,
    Hedge,
    HedgeBudget,
)
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.codec import decode_job
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import StreamingToken

from .fakes import Swarm, computes, open_swarm
from .twenty import twenty_requests

PROMPT = "who is the first?"
N_TOKENS = 8
SECONDS = st.floats(0, 1e4, allow_nan=False)
WORKS = st.floats(1, 1e5, allow_nan=False)


@given(st.builds(AwaitedToken, SECONDS, SECONDS, SECONDS), SECONDS)
def test_a_standby_begins_only_where_it_is_expected_to_be_earlier(
    awaited: AwaitedToken, standby_s: float
) -> None:
    begins = Hedge(HedgeBudget(0.05)).begins(awaited, standby_s, 1.0, 0.0)
    is_far = max(awaited.silent_s, awaited.usual_s) >= max(SOON_S, FAR * awaited.planned_s)
    assert begins == (is_far and awaited.expected_s > standby_s)
    assert awaited.expected_s >= 0


@given(
    st.floats(0.001, 1),
    st.lists(st.tuples(st.booleans(), WORKS, st.integers(0, 3)), max_size=200),
)
def test_no_more_is_done_again_than_the_budget_has(
    part: float, requests: list[tuple[bool, float, int]]
) -> None:
    budget, spent, served = HedgeBudget(part), 0.0, 0.0
    largest = max((work for _, work, _ in requests), default=0.0)
    for is_slow, work, n_standbys in requests:
        for _ in range(n_standbys * is_slow):
            spent += work / 2 * budget.spend(work / 2)
        budget.served(work)
        served += work
        assert spent <= part * served + AHEAD * largest + 1e-6


def test_without_a_part_nothing_is_done_again() -> None:
    budget = HedgeBudget(0.0)
    assert not budget.spend(1.0)
    assert not Hedge(budget).is_on


@given(st.lists(st.sampled_from(["nothing", "lost"]), max_size=30))
def test_the_next_look_is_later_each_time_but_comes(outcomes: list[str]) -> None:
    hedge, now_s, pause_s = Hedge(HedgeBudget(0.05)), 0.0, LOOK_AGAIN_S
    for outcome in outcomes:
        (hedge.lost if outcome == "lost" else hedge.nothing_found)(now_s)
        at_s = hedge.look_at_s(AwaitedToken(0.0, 1e3), now_s)
        assert at_s == now_s + min(pause_s, LONGEST_PAUSE_S)
        now_s, pause_s = at_s, 2 * pause_s


def test_after_a_race_that_was_lost_a_standby_has_to_be_twice_as_early() -> None:
    hedge, awaited = Hedge(HedgeBudget(1.0)), AwaitedToken(0.1, 3.0)
    assert hedge.begins(awaited, 2.0, 1.0, 0.0)
    hedge.lost(0.0)
    assert not hedge.begins(awaited, 2.0, 1.0, 0.0)
    assert hedge.begins(awaited, 1.4, 1.0, 0.0)
    hedge.won()
    assert hedge.look_at_s(awaited, 7.0) == 7.0


async def ask(swarm: Swarm, node_id: str = A, n_tokens: int = N_TOKENS) -> float:
    """How long it took, by the mock clock."""
    began_s, indices = trio.current_time(), []
    async with swarm[node_id].pipelines.generate(
        Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=n_tokens)
    ) as generation:
        text = ""
        async for piece in generation:
            text += piece.text
            indices.append(piece.index)
    assert text == await uncut(PROMPT, n_tokens)
    assert indices == list(range(n_tokens))
    return trio.current_time() - began_s


async def settle(swarm: Swarm) -> None:
    """Until nothing is left of what was overtaken."""
    await trio.sleep(30)
    await swarm.quiet()


def be_slow(swarm: Swarm, node_id: str, pause_s: Callable[[int], float]) -> None:
    """So long it takes for the token with each index."""
    router, send = swarm[node_id].router, swarm[node_id].router.send

    async def slowly(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        message = decode_job(header, payload)
        if isinstance(message, StreamingToken):
            await trio.sleep(pause_s(message.index))
        with suppress(trio.ClosedResourceError):
            await send(receiver, header, payload)

    router.send = slowly  # type: ignore[method-assign]


async def prefer(swarm: Swarm, node_id: str, rival: str) -> None:
    model_id = swarm.entry.model_id
    await swarm.tell(A, {node_id: computes(model_id, 1e-6), rival: computes(model_id, 1e-3)})


def two_ways() -> dict[str, FakePool]:
    return {A: FakePool("0:4"), B: FakePool("4:12"), M: FakePool("4:12")}


@pytest.mark.parametrize("first_slow", [0, 1, 4])
async def test_a_standby_gives_the_answer_well_before_the_deadline(
    first_slow: int, patient_clock: MockClock
) -> None:
    async with open_swarm(two_ways()) as swarm:
        be_slow(swarm, B, lambda index: 4.9 if index >= first_slow else 0.0)
        await prefer(swarm, B, M)
        assert await ask(swarm) < 3
        # The next request does not find out by itself.
        assert await ask(swarm) < 1
        counts = swarm[A].pipelines.statistics()
        assert (counts.hedges, counts.hedges_won, counts.recoveries) == (1, 1, 0)
        # What was overtaken is asked no more, holds nothing, and was accused of nothing.
        await settle(swarm)
        assert await ask(swarm) < 1
        assert swarm[A].trust.score(B) >= NEUTRAL
        assert swarm[A].trust.score(M) >= NEUTRAL
        assert all(not node.pool.slots and not node.pool.held for node in swarm.nodes.values())
        await twenty_requests(swarm, B, (B, M))


async def test_the_stages_of_a_standby_sign_for_their_rows_like_others(patient_clock: MockClock) -> None:
    """Else a node would only have to be quicker than the first pipeline to be held to nothing."""
    async with open_swarm(two_ways(), committing=None) as swarm:
        be_slow(swarm, B, lambda index: 4.9 if index >= 1 else 0.0)
        await prefer(swarm, B, M)
        await ask(swarm)
        assert swarm[A].pipelines.statistics().hedges_won == 1
        signed = [attempt for _, attempt in swarm[A].pipelines._requests._lingering]
        assert any(M in attempt.assembly.node_ids for attempt in signed)
        await settle(swarm)


async def test_a_slow_pipeline_that_is_first_all_the_same_keeps_the_request(patient_clock: MockClock) -> None:
    async with open_swarm(two_ways()) as swarm:
        be_slow(swarm, B, lambda index: 2.0 if index == 3 else 0.0)
        be_slow(swarm, M, lambda index: 20.0)
        await prefer(swarm, B, M)
        assert 2 <= await ask(swarm) < 3
        counts = swarm[A].pipelines.statistics()
        assert (counts.hedges, counts.hedges_won) == (1, 0)
        await settle(swarm)
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (B, M))


async def test_a_standby_that_refuses_leaves_the_request_where_it_is(patient_clock: MockClock) -> None:
    full = PipelineSettings(max_requests_per_model=0)
    plain = PipelineSettings()
    async with open_swarm(two_ways(), settings={A: plain, B: plain, M: full}) as swarm:
        be_slow(swarm, B, lambda index: 3.0 if index == 3 else 0.0)
        await prefer(swarm, B, M)
        assert 3 <= await ask(swarm) < 4
        counts = swarm[A].pipelines.statistics()
        assert counts.hedges >= 1
        assert counts.hedges_won == 0


async def test_a_request_goes_on_at_its_standby_when_the_slow_one_breaks_meanwhile(
    patient_clock: MockClock,
) -> None:
    async with open_swarm(two_ways()) as swarm, trio.open_nursery() as nursery:
        be_slow(swarm, B, lambda index: 100.0 if index == 3 else 0.0)
        be_slow(swarm, M, lambda index: 1.0 if index == 3 else 0.0)
        await prefer(swarm, B, M)

        async def kill() -> None:
            await trio.sleep(1.5)
            swarm.kill(B)

        nursery.start_soon(kill)
        assert await ask(swarm) < 4
        counts = swarm[A].pipelines.statistics()
        assert (counts.hedges_won, counts.recoveries) == (1, 0)
        await settle(swarm)


async def test_a_client_that_leaves_during_the_race_leaves_nothing_behind(patient_clock: MockClock) -> None:
    async with open_swarm(two_ways()) as swarm:
        be_slow(swarm, B, lambda index: 50.0)
        be_slow(swarm, M, lambda index: 50.0)
        await prefer(swarm, B, M)
        with trio.move_on_after(3):
            await ask(swarm)
        assert swarm[A].pipelines.statistics().hedges == 1
        await settle(swarm)
        assert all(not node.pool.slots and not node.pool.held for node in swarm.nodes.values())


async def test_a_silent_stage_that_was_overtaken_is_asked_all_the_same(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8"), M: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm:

        async def nothing(sender: str, header: bytes, payload: memoryview) -> None:
            pass

        swarm[LIAR].router.serve(swarm[LIAR].pipelines.on_request, nothing)
        await prefer(swarm, LIAR, M)
        assert await ask(swarm) < 3
        assert swarm[A].trust.score(LIAR) == NEUTRAL
        await trio.sleep(30)
        assert swarm[A].trust.score(LIAR) < NEUTRAL
        await twenty_requests(swarm, LIAR, (M, H))


async def test_nodes_that_are_all_slow_cost_no_more_than_the_budget(patient_clock: MockClock) -> None:
    part, n_requests = 0.05, 40
    pools = {A: FakePool("0:4")} | {node_id_named(f"n{i}"): FakePool("4:12") for i in range(6)}
    async with open_swarm(pools, settings=PipelineSettings(hedge=part)) as swarm:
        turn = 0

        def pause_s(index: int) -> float:
            nonlocal turn
            turn += 1
            return 3.0 if turn % 4 == 0 else 0.0

        for node_id in pools.keys() - {A}:
            be_slow(swarm, node_id, pause_s)
        for _ in range(n_requests):
            await ask(swarm)
        await settle(swarm)
        counts = swarm[A].pipelines.statistics()
        whole, again = len(PROMPT) + SINGLE_ROW * N_TOKENS, len(PROMPT) + SINGLE_ROW
        assert 0 < counts.hedges * again <= (part * n_requests + AHEAD) * whole


@pytest.mark.parametrize("row_s", [0.05, 0.3])
async def test_a_healthy_swarm_under_load_stays_within_the_budget(
    row_s: float, patient_clock: MockClock
) -> None:
    """With 0.3 s for each request that a node has, all tokens are far later than planned."""
    n_requests, n_tokens = 16, 20
    async with open_swarm(two_ways()) as swarm:
        for node_id in (B, M):

            async def compute(
                position: int, layers: LayerRange, pool: FakePool = swarm[node_id].pool
            ) -> None:
                await trio.sleep(row_s * len(pool.slots))

            swarm[node_id].pool.before_forward = compute
        async with trio.open_nursery() as nursery:
            for _ in range(n_requests):
                nursery.start_soon(ask, swarm, A, n_tokens)
        await settle(swarm)
        n_hedges = swarm[A].pipelines.statistics().hedges
        whole, again = len(PROMPT) + SINGLE_ROW * n_tokens, len(PROMPT) + SINGLE_ROW
        assert n_hedges * again <= (0.05 * n_requests + AHEAD) * whole
        assert n_hedges == 0 if row_s < 0.1 else n_hedges > 0
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (B, M))
