"""A request over several nodes: same tokens as uncut, whatever the cut, and nothing left behind."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import trio
from node_ids import A, B, C, D, X, node_id_named
from trio.testing import wait_all_tasks_blocked

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import (
    ContextFull,
    InvalidRequest,
    NoPipeline,
)
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import Tensor

from .fakes import Swarm, open_swarm

SMALL_CHUNKS = PipelineSettings(prefill_chunk_tokens=4)
PROMPT = "where do the layers live?"


async def ask(swarm: Swarm, node_id: str, prompt: str = PROMPT, n_tokens: int = 12) -> str:
    pipelines = swarm[node_id].pipelines
    async with pipelines.generate(
        Prompt(text=prompt), swarm.entry, Sampling(max_tokens=n_tokens)
    ) as generation:
        return "".join([piece.text async for piece in generation])


@pytest.mark.parametrize(
    "holdings",
    [
        {A: ["0:4"], B: ["4:8"], C: ["8:12"]},
        {A: ["4:8"], B: ["0:4"], C: ["8:12"]},
        {A: ["8:12"], B: ["0:4"], C: ["4:8"]},
        {A: [], B: ["0:5"], C: ["5:12"]},
        {A: [], B: ["0:12"]},
        {A: ["0:4", "8:12"], B: ["4:8"]},
        {A: ["4:8"], B: ["0:4", "8:12"]},
        {A: ["0:4", "4:8"], B: ["8:12"]},
        {A: ["0:12"]},
        {node_id_named(letter): [f"{i}:{i + 1}"] for i, letter in enumerate("abcdefghijkl")},
    ],
    ids=lambda holdings: " ".join(f"{node}={','.join(ranges)}" for node, ranges in holdings.items()),
)
async def test_every_cut_gives_the_uncut_text_and_frees_everything(holdings: dict[str, list[str]]) -> None:
    pools = {node_id: FakePool(*ranges) for node_id, ranges in holdings.items()}
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm:
        assert await ask(swarm, A) == await uncut(PROMPT, 12)
        await swarm.quiet()


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 8, 9, 41])
async def test_prompts_of_every_length_relative_to_the_chunk(n_prompt: int) -> None:
    prompt = ("abcdefghijklmnopqrstuvwxyz" * 2)[:n_prompt]
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm:
        assert await ask(swarm, A, prompt) == await uncut(prompt, 12)
        assert await ask(swarm, C, prompt) == await uncut(prompt, 12)


@pytest.mark.parametrize("seed", range(12))
async def test_random_cuts_on_random_nodes_from_random_origins(seed: int) -> None:
    random = Random(seed)
    cuts = sorted({0, 12, *(random.randrange(1, 12) for _ in range(random.randrange(8)))})
    holdings: dict[str, list[str]] = {node_id: [] for node_id in (A, B, C, D)}
    for start, end in pairwise(cuts):
        holdings[random.choice((A, B, C, D))].append(f"{start}:{end}")
    prompt = "".join(random.choices("abcdefgh", k=random.randrange(1, 60)))
    settings = PipelineSettings(prefill_chunk_tokens=random.randrange(1, 9))
    pools = {node_id: FakePool(*ranges) for node_id, ranges in holdings.items()}
    async with open_swarm(pools, settings=settings) as swarm:
        assert await ask(swarm, random.choice((A, B, C, D)), prompt) == await uncut(prompt, 12)
        await swarm.quiet()


async def test_interleaved_requests_do_not_mix() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}
    prompts = [f"question {i} " * (i + 1) for i in range(6)]
    answers: dict[str, str] = {}
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm:

        async def one(prompt: str, node_id: str) -> None:
            answers[prompt] = await ask(swarm, node_id, prompt)

        async with trio.open_nursery() as nursery:
            for index, prompt in enumerate(prompts):
                nursery.start_soon(one, prompt, (A, B, C)[index % 3])
        await swarm.quiet()
    assert answers == {prompt: await uncut(prompt, 12) for prompt in prompts}


async def test_the_prompt_never_leaves_the_origin() -> None:
    pools = {A: FakePool(), B: FakePool("0:6"), C: FakePool("6:12")}
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm:
        await ask(swarm, A, n_tokens=3)
    n_prompt = len(PROMPT)
    assert sum(call[1] for call in pools[A].calls if call[0] == "embed") == n_prompt
    assert not [call for pool in (pools[B], pools[C]) for call in pool.calls if call[0] == "embed"]


async def test_no_message_carries_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither jobs nor the assignment: not its text, and rows instead of its tokens."""
    pools = {A: FakePool(), B: FakePool("0:6"), C: FakePool("6:12")}
    secret, said = "Quixotic whimsy, hushed.", list[bytes]()
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm:
        router = swarm[A].router
        send, request = router.send, router.request

        async def overheard(node_id: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            said.append(header + bytes(payload))
            await send(node_id, header, payload)

        async def overheard_request(node_id: str, body: bytes, *, timeout_s: float) -> bytes:
            said.append(body)
            return await request(node_id, body, timeout_s=timeout_s)

        monkeypatch.setattr(router, "send", overheard)
        monkeypatch.setattr(router, "request", overheard_request)
        await ask(swarm, A, secret, n_tokens=3)
        tokens = await pools[A].tokenize(ModelFile.of(swarm.entry), text=secret)
    assert len(said) >= 2 + len(secret) // 4  # Two assignments, and the chunks of the prompt.
    for at in range(len(secret) - 3):
        assert not [message for message in said if secret[at : at + 4].encode() in message]
        for kind in (np.uint8, np.int32, np.int64, np.float32):
            ids = tokens[at : at + 4].astype(kind).tobytes()
            assert not [message for message in said if ids in message]


async def test_chunks_overlap_within_the_window() -> None:
    """While the last stage is held up, as many chunks leave as the window allows, and no more."""
    pools = {A: FakePool("0:6"), B: FakePool("6:12")}
    held = trio.Event()

    async def hold(position: int, layers: LayerRange) -> None:
        await held.wait()

    pools[B].before_forward = hold
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm, trio.open_nursery() as nursery:
        nursery.start_soon(ask, swarm, A, X * 40)
        await wait_all_tasks_blocked(0.01)
        n_chunks = len([call for call in pools[A].calls if call[0] == "forward"])
        held.set()
    assert n_chunks == 3


async def test_the_report_names_stages_and_counts_tokens() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}
    async with (
        open_swarm(pools, settings=SMALL_CHUNKS) as swarm,
        swarm[A].pipelines.generate(
            Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=5), queue_s=1.5
        ) as generation,
    ):
        pieces = [piece async for piece in generation]
    assert [piece.index for piece in pieces] == [0, 1, 2, 3, 4]
    assert pieces[-1].finish_reason == generation.finish_reason == "length"
    assert (generation.n_prompt_tokens, generation.n_generated) == (len(PROMPT), 5)
    assert (generation.shape, generation.is_local) == ("chain", False)
    assert [(stage.node_id, stage.nickname, str(stage.layers)) for stage in generation.route] == [
        (A, "nick-a", "0:4"),
        (B, "nick-b", "4:12"),
    ]
    # The fake computes a millisecond per call.
    assert [stage.compute_s for stage in generation.route] == pytest.approx([0.001, 0.001])
    assert generation.route[0].prefill_s == pytest.approx(0.001 * -(-len(PROMPT) // 4))
    assert generation.timings.queue_s == 1.5
    assert generation.timings.prefill_s > 0


async def test_a_model_held_here_runs_here_without_jobs() -> None:
    pools = {A: FakePool("0:12"), B: FakePool("0:12")}
    async with (
        open_swarm(pools) as swarm,
        swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=5)) as generation,
    ):
        assert [piece.index async for piece in generation] == [0, 1, 2, 3, 4]
        assert generation.is_local
        assert [(stage.node_id, str(stage.layers)) for stage in generation.route] == [(A, "0:12")]
    assert not pools[B].calls


async def test_what_cannot_run_says_which_layers_are_missing() -> None:
    async with open_swarm({A: FakePool("0:4"), B: FakePool("6:12")}) as swarm:
        with pytest.raises(NoPipeline, match="no reachable node holds layers 4:6 of 0:12"):
            await ask(swarm, A)


async def test_prompts_that_do_not_fit_are_refused_before_anybody_is_asked() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}
    async with open_swarm(pools, settings=PipelineSettings(n_ctx=16)) as swarm:
        with pytest.raises(ContextFull, match="25 tokens"):
            await ask(swarm, A)
        with pytest.raises(InvalidRequest, match="no tokens"):
            await ask(swarm, A, "")
        assert not pools[B].calls
        # What fits gets as many tokens as there is room for.
        async with swarm[A].pipelines.generate(
            Prompt(text="x" * 10), swarm.entry, Sampling(max_tokens=100)
        ) as generation:
            assert len([piece async for piece in generation]) == 6
        assert generation.finish_reason == "length"


async def test_characters_cut_between_tokens_arrive_whole() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}
    tokens = [int(word) for word in (await uncut(PROMPT, 4)).split()]
    known = dict(zip(tokens, ["ü".encode()[:1], "ü".encode()[1:], b"x", "€".encode()[:2]], strict=True))

    async def pieces(model: ModelFile, tokens: Tensor) -> tuple[bytes, ...]:
        return tuple(known.get(token, b"") for token in tokens.tolist())

    pools[A].pieces = pieces  # type: ignore[method-assign]
    async with (
        open_swarm(pools) as swarm,
        swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=4)) as generation,
    ):
        texts = [piece.text async for piece in generation]
    assert texts == ["", "ü", "x", "\ufffd"]
