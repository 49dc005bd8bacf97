"""Exact requests go over nodes of one kernel class, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import NodeRefused, NoPipeline
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.route.inputs import OwnLoad
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.scheduling.kernel_groups import CLASSES_MAX, KernelGroup, alike
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, open_swarm
from .test_survival import N_TOKENS, PROMPT, SETTINGS, dies_at, pools_of

EXACT = Sampling(max_tokens=N_TOKENS, temperature=0.0, exact=True)
PLAIN = msgspec.structs.replace(EXACT, exact=False)
WIDE, NARROW = "0.3.36-avx512-f16-00000000", "0.3.36-avx2-f16-11111111"


async def asked(swarm: Swarm, sampling: Sampling = EXACT) -> tuple[str, list[NodeId]]:
    """The text, and the nodes of the route."""
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, sampling) as generation:
            text = "".join([piece.text async for piece in generation])
            assert generation.is_apart == sampling.exact
            return text, [stage.node_id for stage in generation.route]


def of_classes(classes: Mapping[NodeId, str], **held: str) -> dict[NodeId, FakePool]:
    pools = pools_of(**held)
    for node_id, pool in pools.items():
        pool.kernels = classes[node_id]
    return pools


async def test_unlike_nodes_make_no_route_of_an_exact_request() -> None:
    pools = of_classes({A: WIDE, B: NARROW}, a="0:6", b="6:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with pytest.raises(NoPipeline, match="kernels give equal bits") as refused:
            await asked(swarm)
        assert WIDE in refused.value.message
        assert NARROW in refused.value.message
        assert await asked(swarm, PLAIN) == (await uncut(PROMPT, N_TOKENS), [A, B])


async def test_of_the_holders_those_are_taken_that_are_alike() -> None:
    pools = of_classes({A: WIDE, B: NARROW, C: WIDE, D: NARROW}, a="", b="0:6", c="6:12", d="6:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        assert await asked(swarm) == (await uncut(PROMPT, N_TOKENS), [B, D])


async def test_a_node_that_announces_no_class_runs_the_whole_model_only() -> None:
    pools = of_classes({A: WIDE, B: "", C: ""}, a="", b="0:6", c="6:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with pytest.raises(NoPipeline, match=f"unknown at {B}"):
            await asked(swarm)
    async with open_swarm(of_classes({A: WIDE, B: ""}, a="", b="0:12"), settings=SETTINGS) as swarm:
        assert await asked(swarm) == (await uncut(PROMPT, N_TOKENS), [B])


@pytest.mark.parametrize("other", [WIDE, NARROW])
async def test_an_answer_goes_on_within_its_class_only(other: str) -> None:
    pools = of_classes({A: WIDE, B: WIDE, C: other}, a="0:6", b="6:12", c="")
    pools[B].before_forward = dies_at({len(PROMPT) + 4})
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        pools[C].ranges = (LayerRange(6, 12),)
        await swarm[C].announce(swarm.entry, pools[C].ranges)
        text, nodes = await asked(swarm)
        # Who has failed once is asked again rather than one whose rows have other bits.
        assert (text, nodes) == (await uncut(PROMPT, N_TOKENS), [A, C if other == WIDE else B])


async def test_a_stage_is_left_whose_class_is_another_by_now() -> None:
    pools = of_classes({A: WIDE, B: WIDE}, a="0:6", b="6:12")
    async with open_swarm(pools, settings=replace(SETTINGS, failover_timeout_s=0)) as swarm:
        pools[B].kernels = NARROW
        with pytest.raises(NodeRefused, match=r"are not 0\.3\.36-avx512-f16-00000000 any more"):
            await asked(swarm)
        assert (await asked(swarm, PLAIN))[1] == [A, B]


async def test_rows_of_a_prompt_go_over_nodes_that_are_alike() -> None:
    tokens = np.arange(1, 100, dtype=np.int32)
    scored = Prompt(text=PROMPT, top_logprobs=1, is_answered=False)
    pools = of_classes({A: WIDE, B: NARROW}, a="0:6", b="6:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with pytest.raises(NoPipeline, match="kernels give equal bits"):
            await swarm[A].pipelines.rows(tokens, swarm.entry, is_exact=True)
        with pytest.raises(NoPipeline, match="kernels give equal bits"):
            async with swarm[A].pipelines.generate(scored, swarm.entry, EXACT):
                pass
    pools = of_classes({A: WIDE, B: WIDE}, a="0:6", b="6:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        pools[B].kernels = NARROW
        # It is gone round, and there is no other.
        with pytest.raises(NoPipeline, match="no reachable node holds layers 6:12"):
            await swarm[A].pipelines.rows(tokens, swarm.entry, is_exact=True)
        assert not [call for call in pools[B].calls if call[0] == "forward"]
        await swarm.quiet()


async def test_a_refusal_says_in_which_class_the_answer_was_begun() -> None:
    pools = of_classes({A: WIDE, B: NARROW}, a="0:6", b="0:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        planner, load = swarm[A].pipelines._routes.planner, OwnLoad()
        begun = KernelGroup(WIDE)
        with pytest.raises(NoPipeline, match=f"begun by nodes whose kernels are {WIDE}"):
            await planner.choose(swarm.entry, RequestSize(), load, (), is_exact=True, within=begun)
        found = await planner.choose(swarm.entry, RequestSize(), load, (), is_exact=True)
        assert found.kernel_group == KernelGroup(NARROW)


def test_the_origins_class_comes_first_and_there_is_an_end() -> None:
    whole = (LayerRange(0, 12),)
    holders = {f"n{index}": whole for index in range(3 * CLASSES_MAX)}
    classes = {node_id: f"c{int(node_id[1:]) // 2:02}" for node_id in holders}
    found = alike(holders, classes, 12, "n23")
    assert len(found) == CLASSES_MAX
    assert next(iter(found)) == KernelGroup("c11")
    assert alike(holders, {}, 12, "n5")[KernelGroup("", "n5")] == {"n5": whole}


def test_a_class_without_all_layers_is_none() -> None:
    holders = {"a": (LayerRange(0, 6),), "b": (LayerRange(6, 12),), "c": (LayerRange(6, 12),)}
    found = alike(holders, {"a": WIDE, "b": NARROW, "c": WIDE}, 12, "a")
    assert list(found) == [KernelGroup(WIDE)]
    assert set(found[KernelGroup(WIDE)]) == {"a", "c"}
