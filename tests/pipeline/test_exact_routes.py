"""Exact requests: every stage is told, on one node or over a cut, and pieces of the prompt stay whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import numpy as np
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C

from bench.common.arithmetic import FakePool, uncut
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.compute import ForwardCall
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, open_swarm
from .test_survival import N_TOKENS, PROMPT, SETTINGS, dies_at, pools_of

EXACT = Sampling(max_tokens=N_TOKENS, temperature=0.0, exact=True)


async def asked(swarm: Swarm, sampling: Sampling = EXACT) -> tuple[str, list[str], bool]:
    """The text, the nodes of the route, and whether the answer says that it is exact."""
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, sampling) as generation:
            text = "".join([piece.text async for piece in generation])
            return text, [stage.node_id for stage in generation.route], generation.is_apart


def record(pool: FakePool) -> list[ForwardCall]:
    """What the pool is asked to compute from now on."""
    calls: list[ForwardCall] = []
    forward = pool.forward

    async def recorded(model: ModelFile, **call: Unpack[ForwardCall]) -> Any:
        calls.append(call)
        return await forward(model, **call)

    pool.forward = recorded  # type: ignore[method-assign]
    return calls


def reported(calls: Iterable[ForwardCall]) -> list[tuple[int, int, int]]:
    """Of every forward: position, rows, and how many rows the request may have in all."""
    return [(call["position"], len(call["tensor"]), call.get("exact_rows", 0)) for call in calls]


async def test_over_a_cut_every_stage_knows_and_pieces_are_whole() -> None:
    pools = pools_of(a="0:6", b="6:12")
    prompt = "exact " * 40
    calls = [record(pool) for pool in pools.values()]
    async with open_swarm(pools, settings=PipelineSettings(prefill_chunk_tokens=150)) as swarm:
        with trio.fail_after(DEADLINE_S):
            async with swarm[A].pipelines.generate(Prompt(text=prompt), swarm.entry, EXACT) as generation:
                text = "".join([piece.text async for piece in generation])
                assert generation.is_apart
        assert text == await uncut(prompt, N_TOKENS)
        n_rows = len(prompt) + N_TOKENS
        for each in map(reported, calls):
            assert each[:2] == [(0, 128, n_rows), (128, 112, n_rows)]
            assert {exact_rows for _, _, exact_rows in each} == {n_rows}
        await swarm.quiet()


async def test_others_are_not_told_so() -> None:
    pools = pools_of(a="0:6", b="6:12")
    calls = record(pools[B])
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        assert (await asked(swarm, Sampling(max_tokens=3)))[1:] == ([A, B], False)
        assert {exact_rows for _, _, exact_rows in reported(calls)} == {0}


async def test_with_local_embedding_privacy_rows_leave_and_no_tokens() -> None:
    settings = PipelineSettings(local_embedding_privacy=True, failover_timeout_s=0)
    pools = pools_of(a="", b="0:12")
    calls = record(pools[B])
    async with open_swarm(pools, settings=settings) as swarm:
        text, nodes, is_exact = await asked(swarm)
        assert (text, nodes, is_exact) == (await uncut(PROMPT, N_TOKENS), [B], True)
        assert calls[0]["tensor"].dtype == np.float32


async def test_a_stage_that_takes_over_is_exact_too() -> None:
    pools = pools_of(a="0:6", b="6:12", c="6:12")
    calls = {node_id: record(pool) for node_id, pool in pools.items()}
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        chosen = (await swarm[A].pipelines.stages_for(swarm.entry))[1].node_id
        pools[chosen].before_forward = dies_at({len(PROMPT) + 4})
        text, nodes, _ = await asked(swarm)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert {*nodes} & {B, C} == {B, C} - {chosen}
        (other,) = {B, C} - {chosen}
        assert {exact_rows for _, _, exact_rows in reported(calls[other])} == {len(PROMPT) + N_TOKENS}
        await swarm.quiet()


async def test_a_setting_makes_all_requests_exact() -> None:
    settings = PipelineSettings(exact=True, failover_timeout_s=0)
    async with open_swarm(pools_of(a="", b="0:12"), settings=settings) as swarm:
        assert (await asked(swarm, Sampling(max_tokens=3)))[2] is True


async def test_it_goes_on_where_another_node_has_everything() -> None:
    pools = pools_of(a="", b="0:12", c="0:12", d="0:6")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        first = (await swarm[A].pipelines.stages_for(swarm.entry))[0].node_id
        pools[first].before_forward = dies_at({len(PROMPT) + 4})
        text, nodes, _ = await asked(swarm)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert nodes
        assert set(nodes) <= {B, C}
        await swarm.quiet()
