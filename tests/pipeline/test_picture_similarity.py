"""How far rows of one picture are from those that other roundings make, and from those of other pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vision_models
from kernel_timings import KERNEL_TIMINGS
from vision_models import file_of, picture, pixels

from swarmllm.models.entry import CatalogueEntry
from swarmllm.pictures import Picture, parse_picture
from swarmllm.pipeline.check.verdict import Match
from swarmllm.pipeline.vision.similarity import LIMIT, picture_distance, similarity
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm.workerpool.encoders import EncodedPicture, encoded_picture
from swarmllm_proto.ipc import PicturePart

from .test_picture_rows import entry_of

SIZE = 70, 50


def rounded_weights(kind: str) -> Any:
    plain = vision_models.ProjectorWriter.matrix

    def matrix(self: Any, name: str, *shape: int, scale: float | None = None) -> None:
        add = self.gguf.add_tensor

        def rounding(name: str, values: np.ndarray) -> None:
            if kind == "f16":
                values = values.astype(np.float16).astype(np.float32)
            else:
                step = np.abs(values).max(-1, keepdims=True) / 127
                values = (np.round(values / step) * step).astype(np.float32)
            add(name, values)

        self.gguf.add_tensor = rounding
        plain(self, name, *shape, scale=scale)
        self.gguf.add_tensor = add

    return matrix


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mlp", "janus_pro", "idefics3", "internvl", "pixtral"])
async def test_the_limit_lies_between_roundings_and_other_pictures(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = {"n_layers": 12, "width": 64}
    plain = entry_of(tmp_path / "plain", family, "llama", **deep)
    roundings: dict[str, CatalogueEntry] = {}
    for kind in ("f16", "eight bits"):
        with monkeypatch.context() as patch:
            patch.setattr(vision_models.ProjectorWriter, "matrix", rounded_weights(kind))
            roundings[kind] = entry_of(tmp_path / kind, family, "llama", **deep)
    image, rng = pixels(*SIZE, 1), np.random.default_rng(1)
    others = {
        "one part in another colour": picture(*SIZE, 2),
        "grey": parse_picture(file_of(np.full_like(image, 127)), "picture"),
        "noise": parse_picture(file_of(rng.integers(0, 256, image.shape).astype(np.uint8)), "picture"),
    }
    pool = WorkerPool(
        WorkerSettings(
            cache_dir=tmp_path / "cache",
            kernel_timings=KERNEL_TIMINGS,
        ),
        tmp_path / "run",
    )
    async with pool.running():

        async def rows(entry: CatalogueEntry, shown: Picture) -> EncodedPicture:
            assert entry.projector is not None
            return await pool.encode_picture(ModelFile.of(entry), entry.projector, shown, is_kept=False)

        base = await rows(plain, picture(*SIZE, 1))
        assert similarity(base, await rows(plain, picture(*SIZE, 1))) is Match.EQUAL
        for kind, most in (("f16", LIMIT / 40), ("eight bits", LIMIT / 2)):
            again = await rows(roundings[kind], picture(*SIZE, 1))
            assert 0 < picture_distance(base, again) < most
            assert similarity(base, again) is Match.CLOSE
        for shown in others.values():
            assert picture_distance(base, other := await rows(plain, shown)) > 2 * LIMIT
            assert similarity(base, other) is similarity(other, base) is Match.WRONG


def seen(rows: np.ndarray, *parts: PicturePart) -> EncodedPicture:
    rows = rows.astype(np.float32)
    return encoded_picture(parts or (PicturePart((), len(rows)),), rows, rows.shape[1])


def test_zeros_noise_and_rows_in_another_order_are_no_likeness() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((20, 64)) + 3 * rng.standard_normal(64)
    assert similarity(seen(rows), seen(rows + 1e-3 * rng.standard_normal(rows.shape))) is Match.CLOSE
    for other in (
        0 * rows,
        rng.standard_normal(rows.shape),
        rows[::-1],
        rows * 1e30,
        np.full_like(rows, 3e38),
    ):
        assert similarity(seen(rows), seen(other.copy())) is Match.WRONG
        assert similarity(seen(other.copy()), seen(rows)) is Match.WRONG
    assert similarity(seen(rows), seen(rows[:19])) is Match.WRONG
    marked = PicturePart((7,)), PicturePart((), 20)
    assert similarity(seen(rows), seen(rows, *marked)) is Match.WRONG
    tiles = PicturePart((), 12), PicturePart((), 8)
    assert similarity(seen(rows), seen(rows, *tiles)) is Match.WRONG


def test_rows_of_a_flat_picture_may_be_rounded_otherwise() -> None:
    """Nothing is special about any of them, so that roundings are all that lies between them."""
    rng = np.random.default_rng(6)
    rows = np.tile(rng.standard_normal(64), (20, 1))
    assert similarity(seen(rows), seen(rows + 1e-3 * rng.standard_normal(rows.shape))) is Match.CLOSE
    assert similarity(seen(rows), seen(np.tile(rng.standard_normal(64), (20, 1)))) is Match.WRONG
