"""What stages say of their load when they accept a request, and what its origin makes of that."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B, C, D, H, M

from bench.common.arithmetic import FakePool, uncut
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.generation import Generation
from swarmllm.pipeline.route.reported_loads import REPORTED_S, ReportedLoad, ReportedLoads
from swarmllm.pipeline.route.request_routes import CHANGES_MAX
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.codec import decode_response, encode_response
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import RUNNING_MAX, PipelineAck

from .fakes import Swarm, computes, open_swarm

PROMPT = "who is the first?"
N_TOKENS = 8
LONG = 1000
"""Goes on for as long as a test needs it."""
TWO_TAILS = {A: "0:4", D: "0:4", B: "4:12", C: "4:12"}


def pools(holdings: dict[str, str]) -> dict[str, FakePool]:
    return {node_id: FakePool(layers) for node_id, layers in holdings.items()}


async def ask(swarm: Swarm, origin: str, opened: AsyncExitStack, n_tokens: int = N_TOKENS) -> Generation:
    """Its first token is there."""
    sampling = Sampling(max_tokens=n_tokens)
    generation = swarm[origin].pipelines.generate(Prompt(text=PROMPT), swarm.entry, sampling)
    return await opened.enter_async_context(generation)


async def text_of(generation: Generation) -> str:
    return "".join([each.text async for each in generation])


def tail_of(generation: Generation) -> str:
    return generation.route[-1].node_id


async def tell_speeds(swarm: Swarm, faster: str, *slower: str) -> None:
    said = {faster: computes(swarm.entry.model_id, 0.1)}
    said |= {node_id: computes(swarm.entry.model_id, 0.15) for node_id in slower}
    for listener in (A, D):
        await swarm.tell(listener, said)


def n_changes(swarm: Swarm, origin: str = A) -> int:
    return swarm[origin].pipelines.statistics().reassignments


async def test_a_route_is_left_where_its_stage_has_more_to_do_than_its_record_says() -> None:
    async with open_swarm(pools(TWO_TAILS)) as swarm, AsyncExitStack() as opened:
        await tell_speeds(swarm, B, C)
        assert tail_of(await ask(swarm, D, opened, LONG)) == B
        async with AsyncExitStack() as first:
            generation = await ask(swarm, A, first)
            assert tail_of(generation) == C
            assert n_changes(swarm) == 1
            assert await text_of(generation) == await uncut(PROMPT, N_TOKENS)
        # What B has said counts for the next request of this node too, which need not ask it.
        assert tail_of(await ask(swarm, A, opened)) == C
        assert n_changes(swarm) == 1
        # This node knows of its own request there, so that both are as busy as each other.
        assert tail_of(await ask(swarm, A, opened)) == B
        await opened.aclose()
        await swarm.quiet()
        assert min(swarm[A].trust.score(node_id) for node_id in (B, C)) >= NEUTRAL


async def test_a_route_stays_where_its_stage_is_as_free_as_it_said() -> None:
    async with open_swarm(pools(TWO_TAILS)) as swarm, AsyncExitStack() as opened:
        await tell_speeds(swarm, B, C)
        assert tail_of(await ask(swarm, A, opened)) == B
        assert n_changes(swarm) == 0


async def test_a_busy_stage_is_kept_where_the_other_one_would_take_longer() -> None:
    async with open_swarm(pools(TWO_TAILS)) as swarm, AsyncExitStack() as opened:
        said = {B: computes(swarm.entry.model_id, 0.1), C: computes(swarm.entry.model_id, 0.19)}
        for listener in (A, D):
            await swarm.tell(listener, said)
        assert tail_of(await ask(swarm, D, opened, LONG)) == B
        assert tail_of(await ask(swarm, A, opened)) == B
        assert n_changes(swarm) == 0


def says_it_runs(swarm: Swarm, node_id: str, n_running: int | None) -> None:
    """Whatever is so. None: it says nothing of it, as older nodes do."""
    node = swarm[node_id]
    honest = node.pipelines.on_request

    async def answer(sender: str, body: bytes) -> bytes:
        response: Any = decode_response(await honest(sender, body))
        if isinstance(response, PipelineAck):
            said = msgspec.UNSET if n_running is None else n_running
            response = msgspec.structs.replace(response, n_running=said)
        return encode_response(response)

    node.router.serve(answer, node.pipelines.on_message)


@pytest.mark.parametrize("n_running", [None, RUNNING_MAX])
async def test_whoever_has_the_only_layers_is_taken_whatever_it_says(n_running: int | None) -> None:
    async with open_swarm(pools({A: "0:4", B: "4:12"})) as swarm, AsyncExitStack() as opened:
        says_it_runs(swarm, B, n_running)
        generation = await ask(swarm, A, opened)
        assert await text_of(generation) == await uncut(PROMPT, N_TOKENS)
        assert n_changes(swarm) == 0


async def test_nodes_that_all_say_more_than_is_so_are_asked_a_few_times_and_the_last_is_taken() -> None:
    tails = [B, C, D, H, M]
    async with (
        open_swarm(pools({A: "0:4", **dict.fromkeys(tails, "4:12")})) as swarm,
        AsyncExitStack() as opened,
    ):
        model_id = swarm.entry.model_id
        await swarm.tell(A, {node_id: computes(model_id, 0.1 + 0.01 * n) for n, node_id in enumerate(tails)})
        for n, node_id in enumerate(tails):
            says_it_runs(swarm, node_id, RUNNING_MAX - n)
        generation = await ask(swarm, A, opened)
        assert 0 < n_changes(swarm) <= CHANGES_MAX
        assert await text_of(generation) == await uncut(PROMPT, N_TOKENS)
        await opened.aclose()
        await swarm.quiet()


@given(
    st.lists(
        st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, RUNNING_MAX)) | st.floats(0, REPORTED_S)
    )
)
def test_what_was_told_last_counts_for_a_while(events: list[dict[str, int] | float]) -> None:
    loads, now = ReportedLoads(), 0.0
    expected: dict[str, ReportedLoad] = {}
    for event in events:
        if isinstance(event, dict):
            loads.reported(event, "r", now)
            expected |= {node_id: ReportedLoad(n, now, "r") for node_id, n in event.items()}
        else:
            now += event
        fresh = {
            node_id: reported for node_id, reported in expected.items() if now - reported.at_s < REPORTED_S
        }
        assert loads.at(now) == fresh


def test_who_has_said_it_again_does_not_keep_older_words_of_others_alive() -> None:
    loads = ReportedLoads()
    loads.reported({A: 1}, "first", 0.0)
    loads.reported({B: 2}, "second", 0.1)
    loads.reported({A: 3}, "third", REPORTED_S)
    assert loads.at(REPORTED_S + 0.2) == {A: ReportedLoad(3, REPORTED_S, "third")}


def test_nothing_is_kept_of_a_crowd_that_said_it_long_ago() -> None:
    loads = ReportedLoads()
    for n in range(50):
        loads.reported({f"node{n}": n}, "r", n * REPORTED_S)
    assert repr(loads) == "<ReportedLoads 1 nodes>"
