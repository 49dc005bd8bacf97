"""Logits of every family of projectors over one to four nodes, against libmtmd and libllama in one process:
all of them, bit for bit, and those of a second turn that begins with what the nodes kept of the first."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from long_runs import part_or_whole
from node_ids import A, B, C, D
from vision_models import (
    GRID_FAMILIES,
    N_BATCH,
    Question,
    Uncut,
    picture,
    pixels,
    projector,
    text_model,
    uncut_all,
)

from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.models.projector import FAMILIES, TEXT_ARCHITECTURES, read_projector
from swarmllm.pictures import Picture
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, open_swarm
from .test_picture_rows import asking

pytestmark = [pytest.mark.slow, pytest.mark.long]

NODES: Final = (A, B, C, D)
LAYOUTS: Final = part_or_whole((1, 4), (1, 2, 3, 4))
"""Over how many nodes."""
N_TOKENS: Final = 6
SAMPLING: Final = Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
FIRST_TURN: Final = "what is in <__media__> and, compared with this one,<__media__>? Say it in a few words."
SECOND_TURN: Final = FIRST_TURN + " And what is on the left of the first of them, behind the second one?"
SIZES: Final = (70, 50), (40, 90)
LOGITS_WORKER: Final = Path(__file__).parents[1] / "logits_worker.py"


@dataclass(frozen=True)
class Eyes:
    """A projector, and pictures to look at."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = SIZES
    n_tiles: int = 1
    """Of the first picture, that one as a whole included; each is encoded by itself."""


TILES: Final = {"tiles": (32, 64, 64, 32, 64, 64, 32, 96)}
EYES: Final[dict[str, tuple[Eyes, ...]]] = {
    "llama-q8_0": (
        Eyes("mlp", {"image": 64}),
        Eyes("mlp", TILES, n_tiles=5),
        Eyes("janus_pro", {"image": 64}),
        Eyes("idefics3", n_tiles=5),
        Eyes("internvl", n_tiles=7),
        Eyes("pixtral"),
        Eyes("pixtral", {"merge": 2}),
        Eyes("adapter"),
        Eyes("dots_ocr"),
        Eyes("kimivl"),
        Eyes("ldpv2"),
        Eyes("lfm2"),
        Eyes("lightonocr"),
        Eyes("llama4", n_tiles=7),
        Eyes("phi4"),
    ),
    "qwen2-wide": (Eyes("resampler", n_tiles=5),),
}
"""By text model: every family over one, two, three and four nodes. Rows of products in Q8_0 have the same
bits in every batch, so that it does not matter where chunks of a second turn begin."""
OTHER_TEXTS: Final = {
    "chatglm": Eyes("adapter"),
    "deepseek2": Eyes("kimivl"),
    "gemma": Eyes("mlp"),
    "granite": Eyes("mlp"),
    "lfm2": Eyes("lfm2", sizes=((560, 1130), (40, 90)), n_tiles=3),
    "llama4": Eyes("llama4", n_tiles=7),
    "mistral3": Eyes("pixtral", {"merge": 2}),
    "phi3": Eyes("phi4"),
    "qwen2": Eyes("internvl", n_tiles=7),
    "qwen3": Eyes("lightonocr"),
    "qwen3moe": Eyes("internvl", n_tiles=7),
}
"""Over three nodes, with a family that is published with such a model."""
RECURRENT: Final = {"lfm2"}
"""Nodes keep no prefixes of them."""


def test_every_family_that_is_supported_is_compared() -> None:
    elsewhere = {*GRID_FAMILIES, "gemma3"}
    assert {eyes.family for each in EYES.values() for eyes in each} | elsewhere == FAMILIES
    assert {"llama", *OTHER_TEXTS, "qwen2vl", "qwen3vl", "qwen3vlmoe", "gemma3"} == TEXT_ARCHITECTURES


PLAIN_SETTINGS: Final = {"n_ctx": 1024, "n_slots": 2, "flash_attention": "off", "ngram_max_size": 0}
PLAIN_PIPELINES: Final = {"n_ctx": 1024, "prefill_chunk_tokens": N_BATCH}


class Answer(NamedTuple):
    logits: np.ndarray
    """f32 [n_tokens, n_vocab]"""
    tokens: list[int]
    n_prompt: int
    n_cached: int


class Pools:
    """Workers of four nodes, that write down their logits."""

    def __init__(self, pools: dict[str, WorkerPool], written: Path, forget: Path) -> None:
        self._pools = pools
        self._written = written
        self._forget = forget

    async def share(self, entry: CatalogueEntry, n_nodes: int) -> None:
        """Let the first `n_nodes` have the layers, and nobody else, in workers that go on."""
        alignment, n_layers = entry.manifest.cut_alignment, entry.manifest.n_layers
        bounds = [n_layers // alignment * i // n_nodes * alignment for i in range(n_nodes)] + [n_layers]

        async def hold(pool: WorkerPool, layers: LayerRange) -> None:
            await pool.load(ModelFile(entry.model_id, entry.path), layers)
            for start, end in ((0, layers.start), (layers.end, n_layers)):
                if any(held.start < end and start < held.end for held in pool.loaded(entry.model_id)):
                    await pool.unload(entry.model_id, LayerRange(start, end))

        async with trio.open_nursery() as nursery:
            for node_id, start, end in zip(NODES, bounds[:-1], bounds[1:], strict=False):
                nursery.start_soon(hold, self._pools[node_id], LayerRange(start, end))

    @asynccontextmanager
    async def swarm(
        self, entry: CatalogueEntry, n_nodes: int, settings: dict[str, Any]
    ) -> AsyncIterator[Swarm]:
        own = PipelineSettings(**settings)
        pools = {node_id: self._pools[node_id] for node_id in NODES[:n_nodes]}
        async with open_swarm(pools, settings=own, entry=entry) as swarm:
            yield swarm

    async def tiles(self, entry: CatalogueEntry, shown: Picture) -> int:
        """Runs of rows that the picture became."""
        assert entry.projector is not None
        encoded = await self._pools[A].encode_picture(ModelFile.of(entry), entry.projector, shown)
        return sum(encoded.tokens[start] < 0 for start in encoded.ends[:-1])

    def forget(self) -> None:
        """What they keep of prompts."""
        self._forget.write_text(f"{int(self._forget.read_text()) + 1}")

    async def answer(self, swarm: Swarm, prompt: Prompt) -> Answer:
        self._written.write_bytes(b"")
        with trio.fail_after(DEADLINE_S):
            async with swarm[A].pipelines.generate(prompt, swarm.entry, SAMPLING) as generation:
                tokens = [piece.token async for piece in generation]
            await swarm.quiet()
        logits = np.fromfile(self._written, np.float32).reshape(N_TOKENS, -1)
        return Answer(logits, tokens, generation.n_prompt_tokens, generation.n_cached_tokens)


@asynccontextmanager
async def pools_in(folder: Path, n: int, settings: dict[str, Any] = PLAIN_SETTINGS) -> AsyncIterator[Pools]:
    written, forget = folder / "logits.f32", folder / "forget"
    forget.write_text("0")
    async with AsyncExitStack() as stack:
        pools = {}
        for node_id in NODES[:n]:
            # The reference has no kernels of ours for large batches, whose bits are others.
            worker = WorkerSettings(cache_dir=folder / "cache", kernels="ggml", **settings)
            command = [sys.executable, "-P", str(LOGITS_WORKER), str(written), str(forget)]
            pools[node_id] = WorkerPool(worker, folder / f"run-{node_id}", command=command)
            await stack.enter_async_context(pools[node_id].running())
        yield Pools(pools, written, forget)


def entries_of(folder: Path, text: str, looking: Sequence[Eyes]) -> list[tuple[Eyes, CatalogueEntry]]:
    folder.mkdir()
    path = text_model(folder, text)
    entries = []
    for number, eyes in enumerate(looking):
        catalogue = Catalogue(folder / f"models-{number}.sqlite")
        entry = catalogue.add(path, text)
        width = entry.manifest.n_embd
        mmproj = projector(folder / f"mm-{number}.gguf", eyes.family, width, **eyes.options)
        entries.append((eyes, catalogue.attach(entry.model_id, read_projector(mmproj))))
    return entries


def answers_of_one_process(
    entries: Sequence[tuple[Eyes, CatalogueEntry]], turns: Sequence[str], **settings: Any
) -> list[list[Uncut]]:
    """For each of the `entries` one of each of the `turns`."""
    questions = []
    for eyes, entry in entries:
        images = [pixels(*size, seed) for seed, size in enumerate(eyes.sizes, start=1)]
        assert entry.projector is not None
        mmproj = Path(entry.projector.path)
        questions += [Question(entry.path, mmproj, turn, images, N_TOKENS) for turn in turns]
    answers = uncut_all(questions, **settings)
    return [answers[i : i + len(turns)] for i in range(0, len(answers), len(turns))]


@pytest.mark.parametrize("text", EYES)
async def test_logits_over_one_to_four_nodes_are_those_of_one_process(tmp_path: Path, text: str) -> None:
    await compare(tmp_path, text, EYES[text], LAYOUTS)


@pytest.mark.parametrize("text", OTHER_TEXTS)
async def test_logits_of_every_kind_of_text_model_are_those_of_one_process(tmp_path: Path, text: str) -> None:
    await compare(tmp_path, text, (OTHER_TEXTS[text],), (3,))


async def test_logits_are_those_of_one_process_with_the_settings_of_an_installed_node(tmp_path: Path) -> None:
    own = {"n_threads": 2}
    there = {"n_batch": PipelineSettings().prefill_chunk_tokens, "flash_attention": "auto", **own}
    # Not those of a second turn: chunks of its prompt begin where what was kept ends.
    only = {"turns": (FIRST_TURN,), "settings": own, "pipelines": {}, "reference": there}
    await compare(tmp_path, "llama", (Eyes("ldpv2"),), (2,), **only)


async def compare(
    folder: Path,
    text: str,
    looking: Sequence[Eyes],
    layouts: Sequence[int],
    *,
    turns: Sequence[str] = (FIRST_TURN, SECOND_TURN),
    settings: dict[str, Any] = PLAIN_SETTINGS,
    pipelines: dict[str, Any] = PLAIN_PIPELINES,
    reference: dict[str, Any] | None = None,
) -> None:
    entries = entries_of(folder / "models", text, looking)
    expected = answers_of_one_process(entries, turns, **(reference or {}))
    different = []
    async with pools_in(folder, max(layouts), settings) as pools:
        for n_nodes in layouts:
            await pools.share(entries[0][1], n_nodes)
            for (eyes, entry), wanted in zip(entries, expected, strict=True):
                reported = text, eyes.family, eyes.options, n_nodes
                shown = [picture(*size, seed) for seed, size in enumerate(eyes.sizes, start=1)]
                pools.forget()
                async with pools.swarm(entry, n_nodes, pipelines) as swarm:
                    seen = [await pools.answer(swarm, asking(shown, turn)) for turn in turns]
                assert await pools.tiles(entry, shown[0]) == eyes.n_tiles, reported
                assert [each.n_prompt for each in seen] == [each.n_prompt for each in wanted], reported
                keeps = text not in RECURRENT
                assert [each.n_cached > 0 for each in seen] == [False, keeps][: len(turns)], reported
                for number, (got, one) in enumerate(zip(seen, wanted, strict=True)):
                    if not np.array_equal(got.logits, one.logits):
                        different.append((*reported, number, np.abs(got.logits - one.logits).max()))
    assert different == [], "\n".join(map(str, different))
