"""The bundled model over three nodes with real workers, against libllama on the uncut file."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import llama_cpp
import pytest
import trio
from deadlines import DEADLINE_S
from kernel_timings import KERNEL_TIMINGS
from msgspec.structs import replace
from node_ids import A, B, C, D

from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.route.row_formats import Compression
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.scheduling.constraints import Constraints
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, computes, open_swarm

pytestmark = [pytest.mark.slow, pytest.mark.long]

THIRDS = {A: "0:4", B: "4:8", C: "8:12"}
QUESTIONS = (
    "What is a pipeline?",
    "Tell me, please, in a few words and without hurry, how a hidden state gets from one node to the next!",
    "How do I load layers 0 to 4 of the guide?",
)
N_TOKENS = 40
ANYWHERE = Constraints()
GREEDY = Sampling(temperature=0.0, max_tokens=N_TOKENS)


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> CatalogueEntry:
    return Catalogue(tmp_path_factory.mktemp("catalogue") / "models.sqlite").ensure(GUIDE_PATH, "guide")


@pytest.fixture(scope="module")
def uncut() -> Iterator[llama_cpp.Llama]:
    llama = llama_cpp.Llama(
        str(GUIDE_PATH), n_ctx=1024, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False
    )
    yield llama
    llama.close()


@asynccontextmanager
async def guide_swarm(
    folder: Path,
    entry: CatalogueEntry,
    holdings: dict[str, str],
    *,
    n_slots: int = 4,
    constraints: Constraints = ANYWHERE,
    compression: Compression = "off",
    check_rate: float = 0.0,
    chunk_tokens: int = 16,
    exact: bool = False,
) -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        pools: dict[str, WorkerPool] = {}
        for node_id in holdings:
            settings = WorkerSettings(
                cache_dir=folder / "cache", kernel_timings=KERNEL_TIMINGS, n_ctx=1024, n_slots=n_slots
            )
            pools[node_id] = WorkerPool(settings, folder / f"run-{node_id}")
            await stack.enter_async_context(pools[node_id].running())
        async with trio.open_nursery() as nursery:
            for node_id, text in holdings.items():
                for layers in text.split():
                    model = ModelFile(entry.model_id, entry.path)
                    nursery.start_soon(pools[node_id].load, model, LayerRange.parse(layers))
        pipelines = PipelineSettings(
            prefill_chunk_tokens=chunk_tokens,
            exact=exact,
            n_ctx=1024,
            constraints=constraints,
            activation_compression=compression,
            check_rate=check_rate,
        )
        yield await stack.enter_async_context(open_swarm(pools, settings=pipelines, entry=entry))


async def ask(swarm: Swarm, node_id: str, question: str) -> tuple[list[int], str]:
    prompt = Prompt(messages=[{"role": "user", "content": question}])
    async with swarm[node_id].pipelines.generate(prompt, swarm.entry, GREEDY) as generation:
        pieces = [piece async for piece in generation]
    return [piece.token for piece in pieces], "".join(piece.text for piece in pieces)


def expected_tokens(llama: llama_cpp.Llama, prompt: list[int]) -> list[int]:
    """Greedy, the end-of-sequence token included, as a generation counts it."""
    tokens: list[int] = []
    llama.reset()
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
        tokens.append(token)
        if token == llama.token_eos() or len(tokens) == N_TOKENS:
            break
    return tokens


async def test_greedy_tokens_over_three_nodes_equal_the_uncut_model(
    tmp_path: Path, entry: CatalogueEntry, uncut: llama_cpp.Llama
) -> None:
    answers: dict[str, tuple[list[int], str]] = {}
    async with guide_swarm(tmp_path, entry, THIRDS) as swarm:

        async def one(node_id: str, question: str) -> None:
            answers[question] = await ask(swarm, node_id, question)

        # At the same time, and from each node, so that every stage is once the origin's neighbour.
        async with trio.open_nursery() as nursery:
            for node_id, question in zip((A, B, C), QUESTIONS, strict=True):
                nursery.start_soon(one, node_id, question)
        await swarm.quiet()
        for question, (tokens, text) in answers.items():
            prompt = await swarm[A].pool.tokenize(
                ModelFile(entry.model_id, entry.path), messages=[{"role": "user", "content": question}]
            )
            expected = expected_tokens(uncut, prompt.tolist())
            assert tokens == expected
            shown = [token for token in expected if token != uncut.token_eos()]
            assert text == uncut.detokenize(shown).decode(errors="replace")


@pytest.mark.parametrize(
    ("holdings", "is_private"),
    [
        ({A: "0:8", B: "4:12"}, False),
        ({A: "2:10", B: "0:8", C: "4:12"}, False),
        # The ends stay at home, and the middle is part of what a node holds that has everything.
        ({A: "0:2 11:12", B: "0:12"}, True),
    ],
)
async def test_parts_of_what_is_held_make_a_pipeline(
    tmp_path: Path, entry: CatalogueEntry, uncut: llama_cpp.Llama, holdings: dict[str, str], is_private: bool
) -> None:
    constraints = Constraints(is_private=is_private)
    async with guide_swarm(tmp_path, entry, holdings, constraints=constraints) as swarm:
        prompt = await swarm[A].pool.tokenize(
            ModelFile(entry.model_id, entry.path), messages=[{"role": "user", "content": QUESTIONS[1]}]
        )
        expected = expected_tokens(uncut, prompt.tolist())
        for _ in range(2):
            assert (await ask(swarm, A, QUESTIONS[1]))[0] == expected
        await swarm.quiet()
        route = await swarm[A].pipelines.stages_for(swarm.entry)
        held = {
            node_id: [LayerRange.parse(text) for text in texts.split()] for node_id, texts in holdings.items()
        }
        assert len({stage.node_id for stage in route}) > 1
        assert any(LayerRange(stage.start, stage.end) not in held[stage.node_id] for stage in route)
        if is_private:
            assert [(stage.node_id, stage.start, stage.end) for stage in route] == [
                (A, 0, 2),
                (B, 2, 11),
                (A, 11, 12),
            ]
        # No layer is held, or announced, otherwise than before.
        for node_id, ranges in held.items():
            assert swarm[node_id].pool.loaded(entry.model_id) == tuple(ranges)


async def test_a_worker_elsewhere_tells_which_stop_string_ended_the_text(
    tmp_path: Path, entry: CatalogueEntry
) -> None:
    prompt = Prompt(messages=[{"role": "user", "content": QUESTIONS[0]}])
    async with guide_swarm(tmp_path, entry, {A: "", B: "0:12"}) as swarm:
        _, text = await ask(swarm, A, QUESTIONS[0])
        word = text[len(text) // 2 :][:6]
        sampling = replace(GREEDY, stop=("\0", word))
        async with swarm[A].pipelines.generate(prompt, entry, sampling) as generation:
            shown = "".join([piece.text async for piece in generation])
        assert shown == text[: text.index(word)]
        assert (generation.shape, generation.stop_sequence) == ("remote-generate", word)


async def test_log_probabilities_over_three_nodes_are_those_of_one(
    tmp_path: Path, entry: CatalogueEntry
) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=8, logprobs=True, top_logprobs=4)
    prompt = Prompt(messages=[{"role": "user", "content": QUESTIONS[0]}])
    reported = []
    for holdings in (THIRDS, {A: "0:12"}):
        async with (
            guide_swarm(tmp_path, entry, holdings) as swarm,
            swarm[A].pipelines.generate(prompt, entry, sampling) as generation,
        ):
            reported.append([piece.logprobs async for piece in generation])
    assert [len(logprobs) for logprobs in reported[0]] == [5] * 8
    for cut, whole in zip(*reported, strict=True):
        assert [each.token for each in cut] == [each.token for each in whole]
        assert [each.logprob for each in cut] == pytest.approx([e.logprob for e in whole], abs=1e-3)


async def test_the_next_turn_over_three_nodes_is_that_of_fresh_ones(
    tmp_path: Path, entry: CatalogueEntry
) -> None:
    """The first turn's rows serve the second on every stage, its answer included."""
    turns = [{"role": "user", "content": " ".join(QUESTIONS)}]
    cached: list[int] = []

    async def say(swarm: Swarm) -> str:
        prompt = Prompt(messages=turns)
        async with swarm[A].pipelines.generate(prompt, entry, GREEDY) as generation:
            text = "".join([piece.text async for piece in generation])
        cached.append(generation.n_cached_tokens)
        await swarm.quiet()
        return text

    async with guide_swarm(tmp_path, entry, THIRDS) as swarm:
        first = await say(swarm)
        assert await say(swarm) == first
        turns += [{"role": "assistant", "content": first}, {"role": "user", "content": QUESTIONS[2]}]
        second = await say(swarm)
    async with guide_swarm(tmp_path, entry, THIRDS) as swarm:
        assert await say(swarm) == second
    # One block: the first prompt has fewer tokens, with its answer there are more.
    assert cached == [0, 0, 64, 0]


async def test_a_node_without_layers_uses_one_that_has_them_all(
    tmp_path: Path, entry: CatalogueEntry, uncut: llama_cpp.Llama
) -> None:
    async with guide_swarm(tmp_path, entry, {A: "", B: "0:12"}) as swarm:
        remote = await ask(swarm, A, QUESTIONS[1])
        assert await ask(swarm, B, QUESTIONS[1]) == remote
        prompt = Prompt(messages=[{"role": "user", "content": QUESTIONS[1]}])
        async with swarm[A].pipelines.generate(prompt, entry, GREEDY) as generation:
            assert [piece.token async for piece in generation] == remote[0]
        assert generation.shape == "remote-generate"
        assert generation.timings.decode_s > 0
        # B shares every token among the clients of A, who asked the same before.
        assert generation.n_cached_tokens == generation.n_prompt_tokens - 1
        await swarm.quiet()


async def test_leaving_early_frees_the_only_slot_of_every_worker(
    tmp_path: Path, entry: CatalogueEntry
) -> None:
    async with guide_swarm(tmp_path, entry, THIRDS, n_slots=1) as swarm:
        prompt = Prompt(messages=[{"role": "user", "content": QUESTIONS[0]}])
        endless = Sampling(temperature=0.0, max_tokens=900, ignore_eos=True)
        for _ in range(3):
            async with swarm[A].pipelines.generate(prompt, entry, endless) as generation:
                async for piece in generation:
                    if piece.index == 5:
                        break
            await swarm.quiet()


@pytest.mark.parametrize("victim", [A, C])
async def test_a_stream_survives_a_killed_worker(tmp_path: Path, entry: CatalogueEntry, victim: str) -> None:
    """Its node starts it again; sampled with penalties, so that the sampler has to be what it was."""
    sampling = Sampling(temperature=0.8, seed=5, repeat_penalty=1.2, max_tokens=24, ignore_eos=True)
    prompt = Prompt(messages=[{"role": "user", "content": QUESTIONS[0]}])

    async def read(kill_at: int) -> list[int]:
        tokens = []
        async with swarm[A].pipelines.generate(prompt, entry, sampling) as generation:
            async for piece in generation:
                tokens.append(piece.token)
                if piece.index == kill_at:
                    (worker,) = swarm[victim].pool.statistics()
                    os.kill(worker.pid, signal.SIGKILL)
        assert generation.n_recoveries == (kill_at >= 0)
        return tokens

    async with guide_swarm(tmp_path, entry, THIRDS) as swarm:
        undisturbed = await read(-1)
        with trio.fail_after(DEADLINE_S):
            assert await read(9) == undisturbed
        await swarm.quiet()


@pytest.mark.parametrize(("victim", "layers"), [(B, "4:8"), (C, "8:12")])
async def test_a_spare_is_built_up_from_what_the_others_have(
    tmp_path: Path, entry: CatalogueEntry, victim: str, layers: str
) -> None:
    prompt = Prompt(messages=[{"role": "user", "content": QUESTIONS[0]}])
    async with guide_swarm(tmp_path, entry, {**THIRDS, D: layers}) as swarm:
        # By what it says it is slower, and so the spare.
        await swarm.tell(A, {D: computes(entry.model_id, 10.0)})
        expected = await ask(swarm, A, QUESTIONS[0])
        tokens = []
        with trio.fail_after(DEADLINE_S):
            async with swarm[A].pipelines.generate(prompt, entry, GREEDY) as generation:
                async for piece in generation:
                    tokens.append(piece.token)
                    if piece.index == 7:
                        (worker,) = swarm[victim].pool.statistics()
                        os.kill(worker.pid, signal.SIGKILL)
        assert tokens == expected[0]
        assert (generation.n_recoveries, generation.n_rebuilt) == (1, 1)
        assert D in {stage.node_id for stage in generation.route}
        await swarm.quiet()


async def test_a_stream_survives_the_only_worker(tmp_path: Path, entry: CatalogueEntry) -> None:
    async with guide_swarm(tmp_path, entry, {A: "0:12"}) as swarm:
        expected = await ask(swarm, A, QUESTIONS[0])
        (worker,) = swarm[A].pool.statistics()
        prompt = Prompt(messages=[{"role": "user", "content": QUESTIONS[0]}])
        tokens = []
        async with swarm[A].pipelines.generate(prompt, entry, GREEDY) as generation:
            async for piece in generation:
                tokens.append(piece.token)
                if piece.index == 5:
                    os.kill(worker.pid, signal.SIGKILL)
        assert tokens == expected[0]
        assert generation.n_recoveries == 1
        await swarm.quiet()
