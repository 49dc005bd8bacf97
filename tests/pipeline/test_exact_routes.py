"""Exact requests run on one node that has the whole model, and are refused where there is none."""

from __future__ import annotations

import pytest
import trio
from deadlines import PATIENCE_S
from node_ids import A, B, C

from bench.arithmetic import uncut
from swarmllm.errors import InvalidRequest, NoPipeline
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, open_swarm
from .test_survival import N_TOKENS, PROMPT, SETTINGS, dies_at, pools_of

EXACT = Sampling(max_tokens=N_TOKENS, temperature=0.0, exact=True)


async def asked(swarm: Swarm, sampling: Sampling = EXACT) -> tuple[str, list[str], bool]:
    """The text, the nodes of the route, and whether the answer says that it is exact."""
    with trio.fail_after(PATIENCE_S):
        async with swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, sampling) as generation:
            text = "".join([piece.text async for piece in generation])
            return text, [stage.node_id for stage in generation.route], generation.is_apart


async def test_it_goes_to_the_node_that_has_everything() -> None:
    pools = pools_of(a="0:6", b="6:12", c="0:12")
    # One hop to B and back is as cheap as one to C; an exact request has no choice.
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        text, nodes, is_exact = await asked(swarm)
        assert (nodes, is_exact) == ([C], True)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert not pools[A].calls
        assert not pools[B].calls
        await swarm.quiet()


async def test_at_home_it_stays() -> None:
    async with open_swarm(pools_of(a="0:12", b="0:12"), settings=SETTINGS) as swarm:
        assert (await asked(swarm))[1:] == ([A], True)
        assert (await asked(swarm, Sampling(max_tokens=3)))[2] is False


async def test_where_nobody_has_everything_it_is_refused_and_others_are_not() -> None:
    async with open_swarm(pools_of(a="0:6", b="6:12"), settings=SETTINGS) as swarm:
        with pytest.raises(NoPipeline, match="exact requests need a node that has all 12 layers"):
            await asked(swarm, Sampling(max_tokens=3, exact=True))
        assert (await asked(swarm, Sampling(max_tokens=3)))[1] == [A, B]


async def test_with_local_embedding_privacy_only_this_node_may_have_it() -> None:
    settings = PipelineSettings(local_embedding_privacy=True, failover_timeout_s=0)
    async with open_swarm(pools_of(a="", b="0:12"), settings=settings) as swarm:
        with pytest.raises(NoPipeline, match="which gets the prompt's tokens"):
            await asked(swarm)
    async with open_swarm(pools_of(a="0:12", b="0:12"), settings=settings) as swarm:
        assert (await asked(swarm))[1:] == ([A], True)


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


async def test_scores_of_a_prompt_are_not_called_exact() -> None:
    async with open_swarm(pools_of(a="0:12"), settings=SETTINGS) as swarm:
        prompt = Prompt(text=PROMPT, top_logprobs=1)
        with pytest.raises(InvalidRequest, match="not exact") as caught:
            async with swarm[A].pipelines.generate(prompt, swarm.entry, EXACT):
                pass
        assert caught.value.field == "exact"
