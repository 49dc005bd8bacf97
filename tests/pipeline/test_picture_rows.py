"""Prompts with pictures over one node and several, against libmtmd and libllama on the uncut model."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D
from vision_models import N_BATCH, picture, pixels, projector, text_model, uncut

from swarmllm.errors import ContextFull, InvalidRequest
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.models.projector import read_projector
from swarmllm.pictures import Picture, PromptPictures, parse_picture
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin import prompts
from swarmllm.pipeline.origin.pictures import FIRST_ROW_ID
from swarmllm.pipeline.prefix.choice import PrefixFetchSettings
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.ipc import Sampling
from swarmllm_workers.decode.sampling import logprobs

from .fakes import Swarm, open_swarm
from .test_stage_fetching import hits, leave

pytestmark = pytest.mark.slow

N_TOKENS = 6
SAMPLING = Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True, logprobs=True, top_logprobs=20)
TEXT = "what is in <__media__> and, compared with this one,<__media__>? Say it in a few words, please."
SIZES = (70, 50), (40, 90)
WHOLE = {A: "0:4"}
HALVES = {A: "0:2", B: "2:4"}
ELSEWHERE = {A: "", B: "0:4"}


class Seen(NamedTuple):
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    n_cached: int
    n_prompt: int


def entry_of(folder: Path, family: str, text: str, **options: Any) -> CatalogueEntry:
    folder.mkdir(exist_ok=True)
    catalogue = Catalogue(folder / "models.sqlite")
    entry = catalogue.add(text_model(folder, text), text)
    path = projector(folder / f"mmproj-{family}.gguf", family, entry.manifest.n_embd, **options)
    return catalogue.attach(entry.model_id, read_projector(path))


def worker_settings(folder: Path) -> WorkerSettings:
    # The reference has no kernels of ours for large batches, whose bits are others.
    return WorkerSettings(
        cache_dir=folder / "cache",
        kernels="ggml",
        n_ctx=1024,
        n_slots=2,
        flash_attention="off",
        ngram_max_size=0,
    )


@asynccontextmanager
async def worker_of(
    folder: Path, entry: CatalogueEntry, node_id: str, layers: str
) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(worker_settings(folder), folder / f"run-{node_id}")
    async with pool.running():
        await pool.load(ModelFile(entry.model_id, entry.path), LayerRange.parse(layers))
        yield pool


@asynccontextmanager
async def swarm_of(
    folder: Path, entry: CatalogueEntry, holdings: dict[str, str], **settings: object
) -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        pools: dict[str, WorkerPool] = {}
        for node_id in holdings:
            pools[node_id] = WorkerPool(worker_settings(folder), folder / f"run-{node_id}")
            await stack.enter_async_context(pools[node_id].running())
        async with trio.open_nursery() as nursery:
            for node_id, held in holdings.items():
                for layers in held.split():
                    model = ModelFile(entry.model_id, entry.path)
                    nursery.start_soon(pools[node_id].load, model, LayerRange.parse(layers))
        pipelines = PipelineSettings(prefill_chunk_tokens=N_BATCH, n_ctx=1024, **settings)
        yield await stack.enter_async_context(open_swarm(pools, settings=pipelines, entry=entry))


def asking(shown: Sequence[Picture], text: str = TEXT) -> Prompt:
    by_marker = {}
    for index, each in enumerate(shown):
        by_marker[marker := f"picture_{index}_"] = each
        text = text.replace("<__media__>", marker, 1)
    return Prompt(text=text, pictures=PromptPictures(by_marker))


async def seen_by(swarm: Swarm, prompt: Prompt, sampling: Sampling = SAMPLING) -> Seen:
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(prompt, swarm.entry, sampling) as generation:
            pieces = [piece async for piece in generation]
        await swarm.quiet()
    reported = [[(each.token, each.logprob) for each in piece.logprobs] for piece in pieces]
    return Seen(
        [piece.token for piece in pieces], reported, generation.n_cached_tokens, generation.n_prompt_tokens
    )


def expected(
    entry: CatalogueEntry, images: Sequence[np.ndarray], text: str = TEXT, n_batch: int = N_BATCH
) -> Seen:
    assert entry.projector is not None
    answer = uncut(entry.path, Path(entry.projector.path), text, images, N_TOKENS, n_batch)
    reported = [
        [(each.token, each.logprob) for each in logprobs(row, token, 20, lambda _: b"")]
        for token, row in zip(answer.tokens, answer.logits, strict=True)
    ]
    return Seen(answer.tokens, reported, 0, answer.n_prompt)


async def test_a_node_without_layers_sees_what_one_process_sees_bit_for_bit(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "models", "janus_pro", "llama", image=64)
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES, start=1)]
    wanted = expected(entry, [pixels(*size, seed) for seed, size in enumerate(SIZES, start=1)])
    async with swarm_of(tmp_path, entry, ELSEWHERE) as swarm:
        seen = await seen_by(swarm, asking(pictures))
        assert seen == wanted
        other = await seen_by(swarm, asking([pictures[1], pictures[0]]))
        assert other.logprobs != seen.logprobs
        assert other.n_cached == 0


async def test_a_picture_may_stand_at_both_ends_and_beside_another(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "models", "mlp", "llama")
    images = [pixels(30, 30, seed) for seed in (1, 2)]
    pictures = [picture(30, 30, seed) for seed in (1, 2)]
    async with swarm_of(tmp_path, entry, HALVES) as swarm:
        for text in ("<__media__><__media__>?", "<__media__> what?"):
            shown = text.count("<__media__>")
            assert await seen_by(swarm, asking(pictures[:shown], text)) == expected(
                entry, images[:shown], text
            )


async def test_the_same_prompt_is_not_computed_again_and_another_picture_is(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "models", "janus_pro", "llama", image=64)
    text = "<__media__>" + "what can be seen in this picture? " * 3
    # However long it takes.
    fetching = PrefixFetchSettings(True, *(DEADLINE_S,) * 3)
    async with swarm_of(tmp_path, entry, HALVES, prefix_fetch=fetching) as swarm:
        first = await seen_by(swarm, asking([picture(70, 50, 1)], text))
        again = await seen_by(swarm, asking([picture(70, 50, 1)], text))
        other = await seen_by(swarm, asking([picture(70, 50, 2)], text))
        assert (first.n_cached, again.n_cached, other.n_cached) == (0, 128, 0)
        assert again.tokens == first.tokens
        assert other.logprobs != first.logprobs
        images = [pixels(70, 50, 2)]
        assert other == expected(entry, images, text)
        # A node that takes over layers gets the KV of the picture's rows from the one before.
        async with worker_of(tmp_path, entry, C, "2:4") as pool:
            await swarm.start(C, pool)
            await leave(swarm, B)
            swarm[C].observations.observe(entry.model_id, "prefill", DEADLINE_S, 4, 1)
            moved = await seen_by(swarm, asking([picture(70, 50, 2)], text))
            assert moved == other._replace(n_cached=128)
            new = await seen_by(swarm, asking([picture(70, 50, 3)], text))
            assert (new.n_cached, hits(swarm, C)) == (0, 1)
            swarm.kill(C)


async def test_a_whole_model_gets_the_kv_of_a_picture_from_the_node_before(
    tmp_path: Path,
) -> None:
    entry = entry_of(tmp_path / "models", "janus_pro", "llama", image=64)
    text = "<__media__>" + "what can be seen in this picture? " * 3
    fetching = PrefixFetchSettings(True, *(DEADLINE_S,) * 3)
    async with (
        swarm_of(tmp_path, entry, {A: "", B: "0:4"}, prefix_fetch=fetching) as swarm,
        worker_of(tmp_path, entry, C, "0:4") as pool,
    ):
        before = await seen_by(swarm, asking([picture(70, 50, 1)], text))
        await swarm.start(C, pool)
        await leave(swarm, B)
        swarm[C].observations.observe(entry.model_id, "prefill", DEADLINE_S, 4, 1)
        assert await seen_by(swarm, asking([picture(70, 50, 1)], text)) == before._replace(n_cached=128)
        assert hits(swarm, C) == 1
        swarm.kill(C)


async def test_a_later_turn_with_one_more_picture_begins_after_what_is_there(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "models", "janus_pro", "llama", image=64)
    text = "<__media__>" + "what can be seen in this picture? " * 3
    later = text + "and what in this one? <__media__> is it the same?"
    shown, images = zip(*((picture(70, 50, seed), pixels(70, 50, seed)) for seed in (1, 2)), strict=True)
    async with swarm_of(tmp_path, entry, HALVES) as swarm:
        first = await seen_by(swarm, asking(shown[:1], text))
        second = await seen_by(swarm, asking(shown, later))
        assert (first.n_cached, second.n_cached) == (0, 128)
        wanted = expected(entry, images, later)
        assert second.tokens == wanted.tokens
        assert second._replace(n_cached=0) == wanted
        # The first picture is another one: nothing of it is there.
        other = await seen_by(swarm, asking([picture(70, 50, 3), shown[1]], later))
        assert other.n_cached == 0


async def test_pictures_are_told_apart_where_the_ids_of_their_rows_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alike(tokens: np.ndarray, identity: bytes) -> np.ndarray:
        return np.where(tokens < 0, FIRST_ROW_ID, tokens).astype(np.int32)

    monkeypatch.setattr(prompts, "with_row_ids", alike)
    entry = entry_of(tmp_path / "models", "janus_pro", "llama", image=64)
    async with swarm_of(tmp_path, entry, HALVES) as swarm:
        seen = [
            await seen_by(swarm, asking([picture(70, 50, seed)], "<__media__> what is it?"))
            for seed in (1, 2, 1)
        ]
    assert [each.n_cached for each in seen] == [0, 0, 64]
    assert seen[0].tokens == seen[2].tokens
    assert seen[0].logprobs != seen[1].logprobs


@pytest.mark.parametrize(
    ("holdings", "spare"),
    [
        ({A: "0:1", B: "1:3", C: "3:4", D: "1:3"}, {B, D}),
        # The first stage is built again from what the origin embeds.
        ({A: "", B: "0:2", C: "2:4", D: "0:2"}, {B, D}),
    ],
)
async def test_a_stream_goes_on_where_a_stage_was_lost(
    tmp_path: Path, holdings: dict[str, str], spare: set[str]
) -> None:
    entry = entry_of(tmp_path / "models", "janus_pro", "llama", image=64)
    prompt = asking([picture(70, 50, 1), picture(70, 50, 2)])
    sampling = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
    async with swarm_of(tmp_path, entry, holdings) as swarm:
        undisturbed = (await seen_by(swarm, prompt, sampling)).tokens
        tokens = []
        with trio.fail_after(DEADLINE_S):
            async with swarm[A].pipelines.generate(prompt, entry, sampling) as generation:
                async for piece in generation:
                    tokens.append(piece.token)
                    if piece.index == 5:
                        (busy,) = {stage.node_id for stage in generation.route} & spare
                        (worker,) = swarm[busy].pool.statistics()
                        os.kill(worker.pid, signal.SIGKILL)
        assert tokens == undisturbed
        assert generation.n_recoveries == 1
        await swarm.quiet()


async def test_what_cannot_be_answered_rightly_is_refused(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "models", "mlp", "llama")
    shown = picture(30, 30)
    async with swarm_of(tmp_path, entry, WHOLE) as swarm:
        broken = parse_picture(shown.data[:-40], "picture")
        with pytest.raises(InvalidRequest, match="the png file is damaged"):
            await seen_by(swarm, asking([broken], "<__media__>"))
        with pytest.raises(InvalidRequest, match="cannot be exact"):
            await seen_by(swarm, asking([shown], "<__media__>"), Sampling(exact=True))
        with pytest.raises(ContextFull, match="has room for 1024"):
            await seen_by(swarm, asking([shown] * 64, "<__media__>" * 64))
        assert (await seen_by(swarm, asking([shown], "<__media__>"))).n_prompt == 16
    blind = Catalogue(tmp_path / "blind.sqlite").add(entry.path, "blind")
    async with swarm_of(tmp_path, blind, WHOLE) as swarm:
        with pytest.raises(InvalidRequest, match="blind takes no pictures"):
            await seen_by(swarm, asking([shown], "<__media__>"))
