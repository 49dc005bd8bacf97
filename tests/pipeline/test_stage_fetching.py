"""Stages that take over layers begin with the KV that the stages before them keep, where the origin knows of
it."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D, E
from trio.testing import MockClock

from bench.common.arithmetic import N_LAYERS, FakePool, uncut
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.generation import Generation
from swarmllm.pipeline.prefix.choice import PrefixFetchSettings
from swarmllm.pipeline.prefix.names import PrefixNames
from swarmllm.pipeline.prefix.stage_fetching import StageFetcher
from swarmllm.pipeline.prefix.stage_holders import REMEMBERED_MAX, REMEMBERED_S, StageHolders
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.codec import encode_record
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import KeptElsewhere, NodeRecord, PipelineAssignment, Stage

from .fakes import Swarm, open_swarm
from .giving_pool import GivingPool

BLOCK = BLOCK_TOKENS
SETTINGS = PipelineSettings(prefill_chunk_tokens=20, prefix_fetch=PrefixFetchSettings(is_on=True))
PROMPT = "where do the layers live, and who knows it? " * 5
"""220 tokens: three blocks and a rest."""
ENOUGH = 20
"""Requests of which each other stage is drawn at least once."""
N_TOKENS = 12
PREFILL_S = 0.05
"""Of a row, in all layers, as each node believes."""
LATE_S, SOON_S = 5.0, 15.0
MODEL = ModelId("ab" * 32)


async def ask(swarm: Swarm, node_id: str = A, prompt: str = PROMPT) -> tuple[str, Generation]:
    async with swarm[node_id].pipelines.generate(
        Prompt(text=prompt), swarm.entry, Sampling(max_tokens=8)
    ) as generation:
        text = "".join([piece.text async for piece in generation])
    await swarm.quiet()
    return text, generation


async def leave(swarm: Swarm, node_id: str) -> None:
    """It announces no layers any more, as a node that is told to stop; it still runs."""
    record = swarm[node_id].registry.node(node_id)
    assert record is not None
    await say(swarm, msgspec.structs.replace(record, sequence=record.sequence + 1, models=()))


async def say(swarm: Swarm, record: NodeRecord) -> None:
    await swarm[record.node_id].router.publish(encode_record(record))
    with trio.fail_after(DEADLINE_S):
        while swarm[A].registry.nodes()[record.node_id].models != record.models:
            await trio.lowlevel.checkpoint()


def knows_its_speed(swarm: Swarm) -> None:
    for node in swarm.nodes.values():
        node.observations.observe(swarm.entry.model_id, "prefill", PREFILL_S, N_LAYERS, 1)


def hits(swarm: Swarm, node_id: str) -> int:
    return swarm[node_id].pipelines.statistics().prefix_hits


def prefilled(pool: FakePool) -> int:
    """Rows of prompts that it computed, since the last time somebody asked."""
    rows = sum(call[3] for call in pool.calls if call[0] == "forward" and call[3] > 1)
    pool.calls.clear()
    return rows


@pytest.mark.parametrize("later", [{C: "4:12"}, {C: "4:8", D: "8:12"}])
async def test_nodes_that_take_over_layers_compute_only_what_follows(later: dict[str, str]) -> None:
    """Of the same layers, or of a part of them."""
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12")}
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        first, _ = await ask(swarm)
        for node_id, layers in later.items():
            pools[node_id] = GivingPool(layers)
            await swarm.start(node_id, pools[node_id])
        await leave(swarm, B)
        knows_its_speed(swarm)
        for pool in pools.values():
            prefilled(pool)
        again, generation = await ask(swarm)
        assert first == again == await uncut(PROMPT, 8)
        assert generation.n_cached_tokens == 3 * BLOCK
        assert {hits(swarm, node_id) for node_id in later} == {1}
        assert {prefilled(pools[node_id]) for node_id in later} == {len(PROMPT) - 3 * BLOCK}
        # What is here now is not fetched again.
        _, generation = await ask(swarm)
        assert generation.n_cached_tokens == 3 * BLOCK
        assert {hits(swarm, node_id) for node_id in later} == {1}


@pytest.mark.parametrize(
    ("stage", "start", "end", "field"),
    [(1, 0, 8, "kept_elsewhere[0]"), (1, 6, 12, "kept_elsewhere[0]"), (2, 0, 12, "kept_elsewhere[0].stage")],
)
def test_an_assignment_names_no_layers_that_a_stage_does_not_have(
    stage: int, start: int, end: int, field: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"field `{field}`")):
        PipelineAssignment(
            request_id="r",
            model_id=MODEL,
            origin=A,
            n_prompt_tokens=1,
            sampling=Sampling(),
            stages=(Stage(node_id=A, start=0, end=4), Stage(node_id=B, start=4, end=12)),
            kept_elsewhere=(KeptElsewhere(stage=stage, node_id=C, start=start, end=end, n_blocks=1),),
        )


async def test_nobody_is_sent_to_a_stage_that_fetched_its_kv_itself() -> None:
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12")}
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        await ask(swarm)
        for old, new in ((B, C), (C, D)):
            pools[new] = GivingPool("4:12")
            await swarm.start(new, pools[new])
            await leave(swarm, old)
            knows_its_speed(swarm)
            if old == C:
                swarm.kill(B)
            text, generation = await ask(swarm)
        assert (hits(swarm, C), hits(swarm, D)) == (1, 0)
        assert swarm[D].pipelines.statistics().prefix_missed.total() == 0
        assert generation.n_cached_tokens == 0
        assert text == await uncut(PROMPT, 8)


@pytest.mark.parametrize("why", ["dropped", "off", "unmeasured", "gone"])
async def test_where_the_kv_does_not_come_the_prompt_is_computed(why: str) -> None:
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12")}
    off = PipelineSettings(prefill_chunk_tokens=20)
    settings = {A: SETTINGS, B: off if why == "off" else SETTINGS, C: SETTINGS}
    async with open_swarm(pools, settings=settings) as swarm:
        await ask(swarm)
        await swarm.start(C, GivingPool("4:12"))
        await leave(swarm, B)
        if why != "unmeasured":
            knows_its_speed(swarm)
        if why == "gone":
            swarm.kill(B)
        pools[B].kept.clear() if why == "dropped" else None
        text, generation = await ask(swarm)
        assert text == await uncut(PROMPT, 8)
        assert generation.n_cached_tokens == 0
        assert hits(swarm, C) == 0
        if why == "dropped":
            # The origin was wrong, not the node that it named.
            fetcher = swarm[C].pipelines._sessions.fetches
            assert isinstance(fetcher, StageFetcher)
            assert fetcher.transfer.counts.prefix_missed.total() >= 1
            assert not fetcher.transfer.avoided.has(B, trio.current_time())


async def test_a_stage_asks_a_holder_again_soon_that_was_late(patient_clock: MockClock) -> None:
    """For another prompt."""
    pools = {A: GivingPool("0:4"), B: GivingPool("4:12"), C: GivingPool("4:12")}
    prompts = [PROMPT, PROMPT[::-1]]
    async with open_swarm({A: pools[A], B: pools[B]}, settings=SETTINGS) as swarm:
        for prompt in prompts:
            await ask(swarm, prompt=prompt)
        await swarm.start(C, pools[C])
        await leave(swarm, B)
        knows_its_speed(swarm)
        pools[B].gives_after_s = LATE_S
        _, generation = await ask(swarm, prompt=prompts[0])
        assert generation.n_cached_tokens == 0
        assert (hits(swarm, C), swarm[C].pipelines.statistics().prefix_missed.total()) == (0, 1)
        pools[B].gives_after_s = 0.0
        await trio.sleep(SOON_S)
        for _ in range(ENOUGH):
            knows_its_speed(swarm)
        text, generation = await ask(swarm, prompt=prompts[1])
        assert text == await uncut(prompts[1], 8)
        assert generation.n_cached_tokens == 3 * BLOCK
        assert hits(swarm, C) == 1


async def test_a_stage_that_rests_on_kv_of_another_node_is_not_checked() -> None:
    """Nor later, when it does not fetch any."""
    pools = {A: GivingPool("0:4"), B: GivingPool("4:8"), D: GivingPool("8:12")}
    async with open_swarm(pools, settings=replace(SETTINGS, check_rate=1.0)) as swarm:
        checker, checked = swarm[A].pipelines._checker, set[tuple[str, int]]()
        checker.chance = Random(1).random

        async def collect(attempt: Any, chain: Any, stage: int) -> None:
            await trio.lowlevel.checkpoint()
            checked.add((chain.context.view.stages[stage].node_id, stage))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(checker), "collect", staticmethod(collect))
            for _ in range(ENOUGH):
                await ask(swarm)
            assert checked == {(B, 1), (D, 2)}
            await swarm.start(C, GivingPool("4:8"))
            await leave(swarm, B)
            knows_its_speed(swarm)
            checked.clear()
            for _ in range(ENOUGH):
                await ask(swarm)
            assert hits(swarm, C) == 1
            assert checked == {(D, 2)}
            # What it computes itself is checked again, whatever it says.
            for _ in range(ENOUGH):
                await ask(swarm, prompt=PROMPT[::-1])
            assert checked == {(C, 1), (D, 2)}


STAGES = (Stage(node_id=A, start=0, end=4), Stage(node_id=B, start=4, end=12))
MOVED = (STAGES[0], Stage(node_id=C, start=4, end=12))
TOKENS = np.arange(3 * BLOCK + 5, dtype=np.int32)
SECRET = b"s" * 32


def names(*stages: Stage, formats: Any = ()) -> PrefixNames:
    return PrefixNames(SECRET, MODEL, stages, formats)


def everybody(node_id: str) -> bool:
    return True


def test_a_beginning_counts_as_far_as_every_stage_has_it() -> None:
    holders = StageHolders()
    holders.completed(names(*STAGES), TOKENS, (), 0.0)
    assert holders.sources(names(*STAGES), TOKENS, everybody, 1.0) == ()
    (source,) = holders.sources(names(*MOVED), TOKENS, everybody, 1.0)
    assert (source.stage, source.node_id, source.n_blocks, source.names) == (1, B, 3, b"")
    other = (Stage(node_id=A, start=0, end=3), Stage(node_id=C, start=3, end=12))
    assert holders.sources(names(*other), TOKENS, everybody, 1.0) == ()
    (shorter,) = holders.sources(names(*MOVED), TOKENS[: BLOCK + 1], everybody, 1.0)
    assert shorter.n_blocks == 1
    assert holders.sources(names(*MOVED), TOKENS[::-1].copy(), everybody, 1.0) == ()
    assert holders.sources(names(*MOVED), TOKENS, lambda node_id: node_id != B, 1.0) == ()
    assert holders.sources(names(*MOVED), TOKENS, everybody, REMEMBERED_S) == ()


def test_rows_that_were_rounded_elsewhere_are_others() -> None:
    holders = StageHolders()
    holders.completed(names(*STAGES, formats=("f32", "q8_0")), TOKENS, (), 0.0)
    assert holders.sources(names(*MOVED), TOKENS, everybody, 1.0) == ()
    assert len(holders.sources(names(*MOVED, formats=("f32", "q8_0")), TOKENS, everybody, 1.0)) == 1


def test_what_is_remembered_is_bounded() -> None:
    holders = StageHolders()
    for i in range(REMEMBERED_MAX):
        holders.completed(names(*STAGES), TOKENS + i, (), 0.0)
        holders.completed(names(*STAGES), TOKENS + i, (), 0.0)
    assert len(holders) == REMEMBERED_MAX
    assert holders.sources(names(*MOVED), TOKENS, everybody, 1.0) == ()
    holders.completed(names(*STAGES), TOKENS, (), REMEMBERED_S)
    assert len(holders) == 2


def test_only_a_stage_that_was_told_to_fetch_rests_on_others_kv() -> None:
    holders = StageHolders()
    holders.completed(names(*MOVED), TOKENS, (1,), 0.0)
    assert holders.rests_on_peer(names(*MOVED), 1, TOKENS)
    assert not holders.rests_on_peer(names(*MOVED), 0, TOKENS)
    assert not holders.rests_on_peer(names(*MOVED), 1, TOKENS + 1)
    assert holders.sources(names(*STAGES), TOKENS, everybody, 1.0) == ()


@pytest.mark.parametrize("keeps_itself", [False, True])
async def test_a_stage_that_replaces_a_lost_one_computes_only_what_nobody_keeps(keeps_itself: bool) -> None:
    """Of the same layers, for the same prompt: another node keeps it, or the new stage itself."""
    pools = {A: GivingPool("0:4"), B: GivingPool("4:8"), C: GivingPool("8:12")}
    new = B if keeps_itself else E
    async with open_swarm(pools, settings=replace(SETTINGS, check_rate=1.0)) as swarm:
        await ask(swarm)
        pools[D] = GivingPool("4:8")
        await swarm.start(D, pools[D])
        before = swarm[B].registry.node(B)
        assert before is not None
        await leave(swarm, B)
        knows_its_speed(swarm)
        # It has sent all rows of the request that breaks.
        pools[A].kept.clear()

        async def break_off() -> None:
            if keeps_itself:
                await say(swarm, msgspec.structs.replace(before, sequence=before.sequence + 2))
            else:
                pools[E] = GivingPool("4:8")
                await swarm.start(E, pools[E])
                knows_its_speed(swarm)
                with trio.fail_after(DEADLINE_S):
                    while E not in swarm[A].registry.nodes():
                        await trio.lowlevel.checkpoint()
            pools[new].calls.clear()
            assert hits(swarm, D) == 1
            swarm.kill(D)

        text = ""
        sampling = Sampling(max_tokens=N_TOKENS)
        async with swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, sampling) as generation:
            async for piece in generation:
                text += piece.text
                if piece.index == 5:
                    await break_off()
        await swarm.quiet()
        assert text == await uncut(PROMPT, N_TOKENS)
        assert [stage.node_id for stage in generation.route] == [A, new, C]
        assert (generation.n_recoveries, generation.n_rebuilt) == (1, 1)
        assert min(call[2] for call in pools[new].calls if call[0] == "forward") == 3 * BLOCK
        assert hits(swarm, new) == (0 if keeps_itself else 1)
        assert swarm[A].pipelines.statistics().checks_wrong == 0
