"""Logits of prompts with sounds over one to four nodes, for every family that hears, against libmtmd and
libllama in one process that gets the same files: all of them, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from long_runs import part_or_whole
from node_ids import A, B, C
from sound_models import sound, sound_file, sound_projector
from vision_models import N_BATCH, Question, Uncut, text_model, uncut_all

from swarmllm.errors import InvalidRequest, VisionEncoderUnavailable
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.projector import SOUND_FAMILIES, read_projector
from swarmllm.sounds import Sound
from swarmllm.workerpool import ModelFile
from swarmllm_proto.identifiers import Digest
from swarmllm_proto.swarm import ProjectorAnnounce

from .test_picture_rows import asking, seen_by, swarm_of
from .test_projector_families import N_TOKENS, PLAIN_PIPELINES, PLAIN_SETTINGS, pools_in

pytestmark = pytest.mark.slow

N_CTX: Final = 2048
FIRST_TURN: Final = "what is said in <__media__>? Say it in a few words."
SECOND_TURN: Final = FIRST_TURN + " And what is behind it, in <__media__>, and who says it?"
OTHER_TEXTS: Final = {"long-qwen2": "qwen2a", "long-qwen3": "qwen3a"}
"""Over three nodes, with a family that is published with such a model."""
N_WINDOWS: Final = {"qwen3a": 2}
"""Runs of rows that the first sound becomes; it is longer than a window of those."""


def heard() -> list[Sound]:
    return [sound(8.5, 1), sound_file("sweep-44100-stereo.mp3")]


def entry_of(folder: Path, text: str, family: str) -> CatalogueEntry:
    folder.mkdir(exist_ok=True)
    catalogue = Catalogue(folder / f"{family}.sqlite")
    entry = catalogue.add(text_model(folder, text), text)
    mmproj = sound_projector(folder / f"{family}.gguf", family, entry.manifest.n_embd)
    return catalogue.attach(entry.model_id, read_projector(mmproj))


def answers_of_one_process(entry: CatalogueEntry) -> list[Uncut]:
    assert entry.projector is not None
    files = [np.frombuffer(each.data, np.uint8) for each in heard()]
    questions = [
        Question(entry.path, Path(entry.projector.path), turn, files[:n], N_TOKENS)
        for n, turn in ((1, FIRST_TURN), (2, SECOND_TURN))
    ]
    return uncut_all(questions, n_batch=N_BATCH, n_ctx=N_CTX)


@pytest.mark.parametrize("family", sorted(SOUND_FAMILIES))
async def test_logits_over_one_to_four_nodes_are_those_of_one_process(tmp_path: Path, family: str) -> None:
    await compare(tmp_path, "long-llama", family, part_or_whole((1, 4), (1, 2, 3, 4)))


@pytest.mark.parametrize("text", OTHER_TEXTS)
async def test_logits_of_other_text_models_are_those_of_one_process(tmp_path: Path, text: str) -> None:
    await compare(tmp_path, text, OTHER_TEXTS[text], (3,))


async def test_rows_of_another_nodes_encoder_are_those_of_one_here(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "models", "long-llama", "ultravox")
    assert entry.projector is not None
    announced = ProjectorAnnounce(
        model_id=entry.model_id,
        projector=Digest(entry.projector.blake3),
        n_embd=entry.projector.n_embd,
        takes=("sound",),
    )
    (shown, *_), first = heard(), answers_of_one_process(entry)[0]
    async with swarm_of(tmp_path, entry, {A: "0:2", B: "2:4", C: ""}) as swarm:
        await swarm[C].announce_projectors(announced)
        with trio.fail_after(DEADLINE_S):
            while C not in swarm[A].registry.encoders(entry.model_id):
                await trio.lowlevel.checkpoint()
        swarm.entry = replace(entry, projector=None)
        found = await seen_by(swarm, asking([shown], FIRST_TURN))
        assert (found.tokens, found.n_prompt) == (first.tokens, first.n_prompt)
        (encoder,) = await swarm[A].pipelines.encoders.by_projector(swarm.entry, [shown], "sound")
        far = await encoder.encode(shown, "sound")
        assert (encoder.looked[0].is_kept, encoder.looked[0].medium) == (True, "sound")
        here = await swarm[A].pool.encode_picture(ModelFile.of(entry), entry.projector, shown)
        assert far.rows.tobytes() == here.rows.tobytes()
        assert swarm[C].pipelines.statistics().pictures_given == 1
        encoders = swarm[A].pipelines.encoders
        assert await encoders.require(swarm.entry, "f", {"sound"}) is None
        for needs in ({"picture"}, {"picture", "sound"}):
            with pytest.raises(InvalidRequest, match="takes no pictures; send text only"):
                await encoders.require(swarm.entry, "f", needs)
        await swarm[C].announce_projectors()
        with trio.fail_after(DEADLINE_S):
            while C in swarm[A].registry.encoders(entry.model_id):
                await trio.lowlevel.checkpoint()
        with pytest.raises(VisionEncoderUnavailable, match="no node that encodes sounds"):
            await encoders.require(swarm.entry, "f", {"sound"})


async def compare(folder: Path, text: str, family: str, layouts: Sequence[int]) -> None:
    entry = entry_of(folder / "models", text, family)
    first, second = answers_of_one_process(entry)
    assert not np.array_equal(first.logits, second.logits)
    sounds = heard()
    settings, pipelines = PLAIN_SETTINGS | {"n_ctx": N_CTX}, PLAIN_PIPELINES | {"n_ctx": N_CTX}
    async with pools_in(folder, max(layouts), settings) as pools:
        for n_nodes in layouts:
            await pools.share(entry, n_nodes)
            pools.forget()
            async with pools.swarm(entry, n_nodes, pipelines) as swarm:
                one = await pools.answer(swarm, asking(sounds[:1], FIRST_TURN))
                two = await pools.answer(swarm, asking(sounds, SECOND_TURN))
            assert await pools.tiles(entry, sounds[0]) == N_WINDOWS.get(family, 1)
            assert (one.n_prompt, two.n_prompt) == (first.n_prompt, second.n_prompt)
            assert one.n_cached == 0
            assert two.n_cached > 0
            assert np.array_equal(one.logits, first.logits), n_nodes
            assert np.array_equal(two.logits, second.logits), n_nodes
