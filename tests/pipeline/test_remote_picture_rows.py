"""Pictures that a node without layers encodes for one without a projector: the bits of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C
from vision_models import picture, pixels

from swarmllm.workerpool import ModelFile
from swarmllm_proto.identifiers import Digest
from swarmllm_proto.swarm import ProjectorAnnounce

from .test_picture_rows import SIZES, asking, entry_of, expected, seen_by, swarm_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["mlp", "idefics3"])
async def test_rows_of_another_nodes_encoder_are_those_of_one_here_bit_for_bit(
    tmp_path: Path, family: str
) -> None:
    entry = entry_of(tmp_path / "models", family, "llama")
    images = [pixels(*size, seed) for seed, size in enumerate(SIZES, start=1)]
    shown = [picture(*size, seed) for seed, size in enumerate(SIZES, start=1)]
    wanted = expected(entry, images)
    assert entry.projector is not None
    announced = ProjectorAnnounce(
        model_id=entry.model_id,
        projector=Digest(entry.projector.blake3),
        n_embd=entry.projector.n_embd,
    )
    async with swarm_of(tmp_path, entry, {A: "0:2", B: "2:4", C: ""}) as swarm:
        await swarm[C].announce_projectors(announced)
        with trio.fail_after(DEADLINE_S):
            while C not in swarm[A].registry.encoders(entry.model_id):
                await trio.lowlevel.checkpoint()
        swarm.entry = replace(entry, projector=None)
        assert await seen_by(swarm, asking(shown)) == wanted
        (encoder,) = await swarm[A].pipelines.encoders.by_projector(swarm.entry, shown, "picture")
        far = await encoder.encode(shown[0], "picture")
        assert encoder.looked[0].is_kept
        here = await swarm[A].pool.encode_picture(ModelFile.of(entry), entry.projector, shown[0])
        assert far is not here
        assert far.rows.tobytes() == here.rows.tobytes()
        assert (far.tokens.tolist(), far.ends) == (here.tokens.tolist(), here.ends)
        assert swarm[C].pipelines.statistics().pictures_given == len(shown)
