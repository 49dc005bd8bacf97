"""Chains that recognise a beginning they computed before: the same text for less work."""

from __future__ import annotations

import numpy as np
import pytest
from block_names import block_hashes
from node_ids import A, B, C

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import WorkerError
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.generation import Generation
from swarmllm.pipeline.prefix.names import PrefixNames
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import NAMES_MAX, Stage

from .fakes import Swarm, open_swarm
from .test_damage import damage_on_arrival

BLOCK = BLOCK_TOKENS
SETTINGS = PipelineSettings(prefill_chunk_tokens=20)
PROMPT = "where do the layers live, and who knows it? " * 5
"""220 tokens: three blocks and a rest."""
STAGES = (Stage(node_id=A, start=0, end=4), Stage(node_id=B, start=4, end=12))


def three() -> dict[str, FakePool]:
    return {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}


async def ask(swarm: Swarm, node_id: str, prompt: str = PROMPT, n_tokens: int = 8) -> tuple[str, Generation]:
    sampling = Sampling(max_tokens=n_tokens)
    async with swarm[node_id].pipelines.generate(Prompt(text=prompt), swarm.entry, sampling) as generation:
        text = "".join([piece.text async for piece in generation])
    await swarm.quiet()
    return text, generation


def prefilled(pool: FakePool) -> int:
    """Rows of prompts that it computed, since the last time somebody asked."""
    rows = sum(call[3] for call in pool.calls if call[0] == "forward" and call[3] > 1)
    pool.calls.clear()
    return rows


async def test_the_same_prompt_again_begins_after_its_whole_blocks() -> None:
    pools = three()
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        first, generation = await ask(swarm, A)
        assert generation.n_cached_tokens == 0
        assert {prefilled(pool) for pool in pools.values()} == {len(PROMPT)}
        again, generation = await ask(swarm, A)
    assert first == again == await uncut(PROMPT, 8)
    assert generation.n_cached_tokens == 3 * BLOCK
    assert {prefilled(pool) for pool in pools.values()} == {len(PROMPT) - 3 * BLOCK}


async def test_a_next_turn_finds_the_answer_of_the_one_before() -> None:
    pools = three()
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        answer, _ = await ask(swarm, A, n_tokens=60)
        # The model's tokens are numbers; its text names them.
        said = "".join(map(chr, map(int, answer.split())))
        turn = PROMPT + said + "and then?"
        text, generation = await ask(swarm, A, turn)
    assert text == await uncut(turn, 8)
    assert generation.n_cached_tokens == (len(PROMPT) + 60 - 1) // BLOCK * BLOCK


async def test_the_prefill_begins_after_what_every_stage_has() -> None:
    pools = three()
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        await ask(swarm, A)
        (scope, layers, name) = next(key for key in reversed(pools[B].kept))
        del pools[B].kept[scope, layers, name]
        text, generation = await ask(swarm, A)
        pools[C].kept.clear()
        text_2, generation_2 = await ask(swarm, A)
    assert text == text_2 == await uncut(PROMPT, 8)
    assert (generation.n_cached_tokens, generation_2.n_cached_tokens) == (2 * BLOCK, 0)


async def test_what_one_origin_named_serves_no_other() -> None:
    pools = three()
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        await ask(swarm, A)
        text, generation = await ask(swarm, B)
    assert text == await uncut(PROMPT, 8)
    assert generation.n_cached_tokens == 0
    assert {scope for scope, _, _ in pools[C].kept} == {A, B}


async def test_nothing_is_named_where_it_is_turned_off() -> None:
    pools = three()
    settings = PipelineSettings(prefill_chunk_tokens=20, shares_prefixes=False)
    async with open_swarm(pools, settings=settings) as swarm:
        await ask(swarm, A)
        _, generation = await ask(swarm, A)
    assert generation.n_cached_tokens == 0
    assert not any(pool.kept for pool in pools.values())


@pytest.mark.parametrize("n_prompt", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
async def test_the_last_token_is_always_computed(n_prompt: int) -> None:
    prompt = PROMPT[:n_prompt]
    async with open_swarm(three(), settings=SETTINGS) as swarm:
        await ask(swarm, A, prompt)
        text, generation = await ask(swarm, A, prompt)
    assert text == await uncut(prompt, 8)
    assert generation.n_cached_tokens == (n_prompt - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("n_behind", [0, 1])
async def test_a_chunk_behind_known_rows_that_arrives_damaged_is_repeated(n_behind: int) -> None:
    pools = three()
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        await ask(swarm, A)
        position = 3 * BLOCK + n_behind * 20
        damaged = damage_on_arrival(swarm, B, lambda message: message.position == position)
        text, generation = await ask(swarm, A)
    assert damaged == [position]
    assert generation.n_cached_tokens == 3 * BLOCK
    assert text == await uncut(PROMPT, 8)


async def test_a_worker_that_knows_no_names_costs_nothing_but_time() -> None:
    pools = three()

    async def fail(*args: object, **kwargs: object) -> int:
        raise WorkerError("no slot")

    pools[B].name_prefix = fail  # type: ignore[method-assign, assignment]
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        await ask(swarm, A)
        text, generation = await ask(swarm, A)
    assert text == await uncut(PROMPT, 8)
    assert generation.n_cached_tokens == 0


def test_names_are_each_stages_own_and_cannot_be_looked_up() -> None:
    tokens = np.arange(3 * BLOCK + 5, dtype=np.int32)
    names = PrefixNames(b"s" * 32, "ab" * 32, STAGES)
    (mine,), (other,) = names.of_node(A, tokens), names.of_node(B, tokens)
    assert (mine.stage, other.stage) == (0, 1)
    assert len(mine.names) == len(other.names) == 3 * 32
    assert mine.names != other.names
    assert names.of_node(A, tokens[: 2 * BLOCK])[0].names == mine.names[:64]
    assert names.of_node(A, tokens[: BLOCK - 1]) == ()
    assert names.of_node("nobody", tokens) == ()
    assert PrefixNames(b"t" * 32, "ab" * 32, STAGES).of_node(A, tokens) != (mine,)
    assert block_hashes("ab" * 32, 0, 4, tokens)[0] != mine.names[:32]
    long = np.zeros(BLOCK * (NAMES_MAX // 32 + 9), np.int32)
    assert len(names.of_node(A, long)[0].names) == NAMES_MAX
