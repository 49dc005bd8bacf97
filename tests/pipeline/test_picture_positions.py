"""Pictures whose rows stand on a grid (M-RoPE), or see each other: over one to four stages, against libmtmd
and libllama on the uncut model."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from msgspec import UNSET
from node_ids import A, B, C, D
from vision_models import N_BATCH, picture, pixels

from swarmllm.errors import NoPipeline
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pictures import Picture
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import NodeCapability, PipelineAck, PipelineAssignment

from .test_picture_rows import SAMPLING, Seen, asking, entry_of, expected, seen_by, swarm_of

pytestmark = pytest.mark.slow

TEXT = "what is in <__media__> and in this,<__media__>? Say it."
"""Runs of it are shorter than a chunk, so that n_batch counts for pictures alone."""
GRIDS = (200, 130), (70, 90)
SQUARES = (70, 50), (40, 90)
WHOLE_BATCH = 512


def cuts(n_layers: int, unit: int = 1) -> list[dict[str, str]]:
    """One to four stages, of multiples of so many layers. Of two stages, the first is not where the prompt
    is."""
    inner = ((), (unit,), (unit, n_layers - unit), (unit, 2 * unit, n_layers - unit))
    return [
        {
            node_id: f"{start}:{end}"
            for node_id, (start, end) in zip(
                (B, A) if len(between) == 1 else (A, B, C, D),
                pairwise((0, *between, n_layers)),
                strict=False,
            )
        }
        for between in inner
    ]


def shown(sizes: Sequence[tuple[int, int]]) -> tuple[list[np.ndarray], list[Picture]]:
    numbered = list(enumerate(sizes, start=1))
    return [pixels(*size, seed) for seed, size in numbered], [picture(*size, seed) for seed, size in numbered]


def same(seen: Seen, wanted: Seen) -> bool:
    return (seen.tokens, seen.logprobs) == (wanted.tokens, wanted.logprobs)


@pytest.mark.parametrize(
    ("family", "text"),
    [("qwen2vl_merger", "qwen2vl"), ("qwen2.5vl_merger", "qwen2vl"), ("qwen3vl_merger", "qwen3vl")],
)
async def test_rows_on_a_grid_give_the_logits_of_one_process(tmp_path: Path, family: str, text: str) -> None:
    entry = entry_of(tmp_path / "models", family, text)
    images, pictures = shown(GRIDS)
    wanted = expected(entry, images, TEXT)
    for holdings in cuts(entry.manifest.n_layers, entry.manifest.cut_alignment):
        async with swarm_of(tmp_path, entry, holdings) as swarm:
            seen = await seen_by(swarm, asking(pictures, TEXT))
            assert same(seen, wanted)
            assert seen.n_prompt > wanted.n_prompt, "of rows there are more than of positions"


async def test_rows_that_see_each_other_give_the_logits_of_one_process(tmp_path: Path) -> None:
    # 144 rows of each picture: more than a chunk of the prompt, and than a piece of one in a batch.
    entry = entry_of(tmp_path / "models", "gemma3", "gemma3", image=192)
    images, pictures = shown(SQUARES)
    wanted = expected(entry, images, TEXT, WHOLE_BATCH)
    for holdings in cuts(12):
        async with swarm_of(tmp_path, entry, holdings) as swarm:
            assert same(await seen_by(swarm, asking(pictures, TEXT)), wanted)


FAMILIES = [("qwen2vl_merger", "qwen2vl", {}, N_BATCH), ("gemma3", "gemma3", {"image": 160}, WHOLE_BATCH)]
"""With pictures of 96 and of 100 rows."""


@pytest.mark.parametrize(("family", "text", "options", "n_batch"), FAMILIES)
async def test_a_later_turn_goes_on_from_kept_rows_and_never_within_a_picture(
    tmp_path: Path, family: str, text: str, options: dict[str, int], n_batch: int
) -> None:
    entry = entry_of(tmp_path / "models", family, text, **options)
    n_layers = entry.manifest.n_layers
    halves = {A: f"0:{n_layers // 2}", B: f"{n_layers // 2}:{n_layers}"}
    images, pictures = shown([(200, 130), (200, 130)])
    # Kept are whole blocks of 64 rows. Three of them end in the second picture; the other prompt's end where
    # a batch of one process does.
    turns = [("what is in <__media__> and <__media__>?", "! And then?", range(110, 151))]
    if family != "gemma3":
        turns.append(("a" * 31 + "<__media__>" + "b" * 90, "c" * 20, range(192, 193)))
    for prompt, more, n_known in turns:
        n = prompt.count("<__media__>")
        async with swarm_of(tmp_path, entry, halves) as swarm:
            for text_of_turn, known in ((prompt, range(1)), (prompt + more, n_known)):
                seen = await seen_by(swarm, asking(pictures[:n], text_of_turn))
                assert same(seen, expected(entry, images[:n], text_of_turn, n_batch))
                assert seen.n_cached in known


# F16: how its products of many rows are rounded depends on how many there are.
@pytest.mark.parametrize(
    ("family", "text", "options", "n_batch"),
    [("qwen3vl_merger", "qwen3vlmoe", {}, N_BATCH), ("gemma3", "gemma3-f16", *FAMILIES[1][2:])],
)
async def test_a_stream_goes_on_where_a_stage_was_lost(
    tmp_path: Path, family: str, text: str, options: dict[str, int], n_batch: int
) -> None:
    entry = entry_of(tmp_path / "models", family, text, **options)
    n = entry.manifest.n_layers
    images, pictures = shown(GRIDS)
    wanted = expected(entry, images, TEXT, n_batch)
    holdings = {A: "0:1", B: f"1:{n - 1}", C: f"{n - 1}:{n}", D: f"1:{n - 1}"}
    if text == "qwen3vlmoe":
        # The first stage, which has further parts of the pictures' rows.
        holdings = {A: "", B: f"0:{n - 6}", C: f"{n - 6}:{n}", D: f"0:{n - 6}"}
    async with swarm_of(tmp_path, entry, holdings) as swarm:
        tokens, reported = [], []
        with trio.fail_after(DEADLINE_S):
            async with swarm[A].pipelines.generate(asking(pictures, TEXT), entry, SAMPLING) as generation:
                async for piece in generation:
                    tokens.append(piece.token)
                    reported.append([(each.token, each.logprob) for each in piece.logprobs])
                    if piece.index == 2:
                        (busy,) = {stage.node_id for stage in generation.route} & {B, D}
                        (worker,) = swarm[busy].pool.statistics()
                        os.kill(worker.pid, signal.SIGKILL)
        assert (tokens, reported) == (wanted.tokens, wanted.logprobs)
        assert generation.n_recoveries == 1
        await swarm.quiet()


@pytest.fixture(scope="module")
def grid_entry(tmp_path_factory: pytest.TempPathFactory) -> CatalogueEntry:
    return entry_of(tmp_path_factory.mktemp("entry") / "models", "qwen2vl_merger", "qwen2vl")


async def test_nodes_that_do_not_know_where_rows_stand_take_no_part(
    tmp_path: Path, grid_entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acknowledge(self: Sessions, sender: NodeId, assignment: PipelineAssignment) -> PipelineAck:
        """As a node does that says that it knows, and does not."""
        ack = await known(self, sender, assignment)
        is_old = self.router.node_id == C
        return msgspec.structs.replace(ack, picture_runs=UNSET) if is_old else ack

    known = Sessions.acknowledge
    monkeypatch.setattr(Sessions, "acknowledge", acknowledge)
    _, (shown_one,) = shown([(70, 90)])
    prompt = asking([shown_one], "what is <__media__>?")
    async with swarm_of(tmp_path, grid_entry, {A: "0:1", B: "1:4", C: "1:4", D: "1:4"}) as swarm:
        for node_id in (B, C, D):
            swarm[node_id].picture_runs = node_id != B
        await swarm.tell(A, {node_id: NodeCapability() for node_id in (B, C, D)})
        for _ in range(2):
            with trio.fail_after(DEADLINE_S):
                async with swarm[A].pipelines.generate(prompt, grid_entry, SAMPLING) as generation:
                    async for _piece in generation:
                        pass
            assert [stage.node_id for stage in generation.route] == [A, D]
        for node_id in (C, D):
            swarm[node_id].picture_runs = False
        await swarm.tell(A, {C: NodeCapability(), D: NodeCapability()})
        with pytest.raises(NoPipeline, match=r"where rows of this model's pictures stand: 3"):
            await seen_by(swarm, prompt)
        text = await seen_by(swarm, Prompt(text="what is that?"))
        assert len(text.tokens) == 6, "prompts without pictures go over them"
