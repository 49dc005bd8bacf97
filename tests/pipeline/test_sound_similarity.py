"""How far rows of one sound are from those that other roundings make, and from those of other sounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import vision_models
from kernel_timings import KERNEL_TIMINGS
from sound_models import sound, sound_projector, tones, wav_of

from swarmllm.models.projector import read_projector
from swarmllm.pipeline.check.verdict import Match
from swarmllm.pipeline.vision.similarity import picture_distance, similarity
from swarmllm.sounds import parse_sound
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings

from .test_picture_similarity import rounded_weights


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ultravox", "qwen2a", "qwen3a"])
async def test_a_short_sound_is_told_from_another_one_and_from_silence(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelFile("ab" * 32, vision_models.text_model(tmp_path, "llama"))
    plain = read_projector(sound_projector(tmp_path / "plain.gguf", family, 64))
    with monkeypatch.context() as patch:
        patch.setattr(vision_models.ProjectorWriter, "matrix", rounded_weights("f16"))
        rounded = read_projector(sound_projector(tmp_path / "rounded.gguf", family, 64))
    assert plain.blake3 != rounded.blake3
    pool = WorkerPool(
        WorkerSettings(
            cache_dir=tmp_path / "cache",
            kernel_timings=KERNEL_TIMINGS,
        ),
        tmp_path / "run",
    )
    async with pool.running():
        base = await pool.encode_picture(model, plain, sound(1.5, 1))
        again = await pool.encode_picture(model, rounded, sound(1.5, 1))
        assert similarity(base, again, "sound") is Match.CLOSE
        silence = parse_sound(wav_of(0 * tones(1.5)), "sound")
        for other in (sound(1.5, 2), silence):
            rows = await pool.encode_picture(model, plain, other)
            assert similarity(base, rows, "sound") is similarity(rows, base, "sound") is Match.WRONG
        if family != "qwen3a":
            # Most rows are of what is behind the sound: all of them together would not tell.
            rows = await pool.encode_picture(model, plain, sound(1.5, 2))
            assert picture_distance(base, rows) < 0.2
        assert np.isfinite(base.rows).all()
