"""A node that gives up layers hands what it has computed of running requests to the nodes that take over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D

from bench.common.arithmetic import N_LAYERS, uncut
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.generation import Generation
from swarmllm.pipeline.prefix.choice import PrefixFetchSettings
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.codec import encode_record
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, open_swarm
from .giving_pool import GivingPool

FETCHES = PrefixFetchSettings(
    is_on=True, asker_timeout_s=DEADLINE_S, network_timeout_s=DEADLINE_S, serving_timeout_s=DEADLINE_S
)
SETTINGS = PipelineSettings(prefill_chunk_tokens=20, prefix_fetch=FETCHES)
PROMPT = "where do the layers live, and who knows it? " * 4
"""176 tokens: two blocks and a rest."""
N_TOKENS = 60
MOVED_AFTER = 30
"""Tokens: enough for a third block."""
PREFILL_S = 10.0
"""Of a row, in all layers, as each node believes: so fetching pays on a busy machine, too."""


async def give_up(swarm: Swarm, node_id: str) -> None:
    """It announces no layers any more, and still runs."""
    record = swarm[node_id].registry.node(node_id)
    assert record is not None
    newer = msgspec.structs.replace(record, sequence=record.sequence + 1, models=())
    await swarm[node_id].router.publish(encode_record(newer))


async def take_over(swarm: Swarm, node_id: str, *ranges: str) -> GivingPool:
    pool = GivingPool(*ranges)
    await swarm.start(node_id, pool)
    for node in swarm.nodes.values():
        node.observations.observe(swarm.entry.model_id, "prefill", PREFILL_S, N_LAYERS, 1)
    with trio.fail_after(DEADLINE_S):
        while node_id not in swarm[A].registry.nodes():
            await trio.lowlevel.checkpoint()
    return pool


async def stream(
    swarm: Swarm,
    then: Callable[[int], Awaitable[None]],
    *,
    origin: str = A,
    prompt: str = PROMPT,
    **sampling: Any,
) -> tuple[str, Generation]:
    """`then` is called with each token's index."""
    text = ""
    async with swarm[origin].pipelines.generate(
        Prompt(text=prompt), swarm.entry, Sampling(max_tokens=N_TOKENS, **sampling)
    ) as generation:
        async for piece in generation:
            text += piece.text
            await then(piece.index)
    return text, generation


def goes_no_further(pool: GivingPool, n_tokens: int) -> None:
    """So the request cannot end there. It would go on as soon as it is cancelled."""

    async def wait(position: int, layers: LayerRange) -> None:
        if position > len(PROMPT) + n_tokens:
            await trio.sleep_forever()

    pool.before_forward = wait


async def moved_away(swarm: Swarm, node_id: str) -> None:
    """It has nothing of a request any more."""
    with trio.fail_after(DEADLINE_S):
        while swarm[node_id].pipelines.are_layers_in_use():
            await trio.lowlevel.checkpoint()


def given_bytes(swarm: Swarm, node_id: str) -> int:
    return swarm[node_id].pipelines.statistics().prefix_given_bytes


@pytest.mark.parametrize("later", [{D: "4:8"}, {D: "2:9"}])
async def test_a_stream_goes_on_with_the_kv_of_the_node_that_gives_up_its_layers(
    later: dict[str, str],
) -> None:
    pools = {A: GivingPool("0:4"), B: GivingPool("4:8"), C: GivingPool("8:12")}
    goes_no_further(pools[B], MOVED_AFTER + 2)
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        new: list[GivingPool] = []

        async def then(index: int) -> None:
            if index == MOVED_AFTER:
                new.append(await take_over(swarm, D, later[D]))
                await give_up(swarm, B)

        score = swarm[A].trust.score(B)
        text, generation = await stream(swarm, then)
        await swarm.quiet()
        assert text == await uncut(PROMPT, N_TOKENS)
        assert (generation.n_recoveries, generation.n_rebuilt) == (1, 1)
        assert [stage.node_id for stage in generation.route] == [A, D, C]
        first = min(call[2] for call in new[0].calls if call[0] == "forward")
        assert first == (len(PROMPT) + MOVED_AFTER) // BLOCK_TOKENS * BLOCK_TOKENS
        assert swarm[D].pipelines.statistics().prefix_hits == 1
        assert given_bytes(swarm, B) > 0
        # It has done nothing wrong, and nor have the others.
        assert swarm[A].trust.score(B) >= score
        assert not swarm[A].pipelines._suspects.ordered(trio.current_time(), swarm[A].trust.score)


async def test_a_stream_stays_while_nobody_else_has_the_layers() -> None:
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12")}
    goes_no_further(pools[B], MOVED_AFTER + 2)
    async with open_swarm(pools, settings=SETTINGS) as swarm:

        async def then(index: int) -> None:
            if index == 5:
                await give_up(swarm, B)
            if index == MOVED_AFTER:
                assert swarm[B].pipelines.are_layers_in_use()
                assert swarm[B].pipelines.are_layers_in_use(swarm.entry.model_id, LayerRange(8, 9))
                assert not swarm[B].pipelines.are_layers_in_use(swarm.entry.model_id, LayerRange(0, 4))
                await take_over(swarm, C, "4:12")

        text, generation = await stream(swarm, then)
        await moved_away(swarm, B)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert [stage.node_id for stage in generation.route] == [A, C]
        assert generation.n_recoveries == 1


async def test_several_streams_move_one_after_the_other() -> None:
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12")}
    goes_no_further(pools[B], MOVED_AFTER + 2)
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        begun: list[int] = []
        all_begun = trio.Event()
        texts: list[str] = []

        async def one() -> None:
            async def then(index: int) -> None:
                if index == MOVED_AFTER:
                    begun.append(index)
                    if len(begun) == 3:
                        await take_over(swarm, C, "4:12")
                        await give_up(swarm, B)
                        all_begun.set()
                    await all_begun.wait()

            text, generation = await stream(swarm, then)
            assert generation.n_recoveries == 1
            texts.append(text)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
        assert set(texts) == {await uncut(PROMPT, N_TOKENS)}
        await moved_away(swarm, B)


@pytest.mark.parametrize("why", ["nothing is given", "off", "exact", "mirostat"])
async def test_where_no_kv_can_be_had_the_text_is_the_same(why: str) -> None:
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12")}
    settings = replace(SETTINGS, prefix_fetch=replace(FETCHES, is_on=why != "off"))
    async with open_swarm(pools, settings=settings) as swarm:
        sampling: dict[str, Any] = {"exact": True} if why == "exact" else {}
        sampling = {"mirostat": 2} if why == "mirostat" else sampling

        async def then(index: int) -> None:
            if index == 5:
                await take_over(swarm, C, "4:12")
                if why == "nothing is given":
                    pools[B].from_peer = Everything()
                    goes_no_further(pools[B], 20)
                await give_up(swarm, B)

        text, generation = await stream(swarm, then, **sampling)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == (1 if why == "nothing is given" else 0)
        assert swarm[C].pipelines.statistics().prefix_hits == 0


class Everything(set[bytes]):
    def __contains__(self, name: object) -> bool:
        return True


async def test_a_request_that_ends_meanwhile_is_left_alone() -> None:
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12")}
    async with open_swarm(pools, settings=SETTINGS) as swarm:

        async def then(index: int) -> None:
            if index == N_TOKENS - 2:
                await take_over(swarm, C, "4:12")
                await give_up(swarm, B)

        text, _ = await stream(swarm, then)
        assert text == await uncut(PROMPT, N_TOKENS)
        await swarm.quiet()


async def test_kv_of_requests_that_are_over_is_fetched_before_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "PREFILL_S", 0.05)
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12")}
    async with open_swarm(pools, settings=SETTINGS) as swarm:

        async def then(index: int) -> None:
            await trio.lowlevel.checkpoint()

        text, _ = await stream(swarm, then)
        await swarm.quiet()
        # Longer than a request would wait for it, a twentieth of what its prompt takes.
        pools[B].gives_after_s = 1.0
        pool = await take_over(swarm, C, "4:12")
        pool.calls.clear()
        await give_up(swarm, B)
        statistics = swarm[C].pipelines.statistics
        with trio.fail_after(DEADLINE_S):
            while statistics().prefix_hits == 0:
                await trio.lowlevel.checkpoint()
        await swarm.quiet()
        swarm.kill(B)
        assert not [call for call in pool.calls if call[0] == "forward"]
        assert not swarm[C].pipelines.served(), "it takes no place"
        again, generation = await stream(swarm, then)
        assert again == text
        assert generation.n_cached_tokens == 2 * BLOCK_TOKENS
        assert statistics().prefix_hits == 1


async def test_where_a_node_fetches_for_another_origin_it_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fetches ahead for one at a time, and refuses the other's prompt meanwhile."""
    monkeypatch.setitem(globals(), "PREFILL_S", 0.05)
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12"), D: GivingPool()}
    async with open_swarm(pools, settings=SETTINGS) as swarm:

        async def then(index: int) -> None:
            await trio.lowlevel.checkpoint()

        for origin in (A, D):
            await stream(swarm, then, origin=origin, prompt=f"{origin} {PROMPT}")
        await swarm.quiet()
        pools[B].gives_after_s = 1.0
        await take_over(swarm, C, "4:12")
        await give_up(swarm, B)
        with trio.fail_after(DEADLINE_S):
            while swarm[C].pipelines.statistics().prefix_hits < 2:
                await trio.lowlevel.checkpoint()
        await swarm.quiet()
