"""Pictures that are made to break their decoder, one after the other in one process, which survives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encoder_processes import children, pool_in
from hostile_pictures import bombs, n_refused, peak_bytes, polyglots, unchecked
from vision_models import picture, projector, text_model

from swarmllm.errors import InvalidRequest
from swarmllm.models.projector import Projector, read_projector
from swarmllm.pictures import parse_picture
from swarmllm.workerpool import ModelFile

pytestmark = pytest.mark.slow

N_DAMAGED = 400
"""`make compliance` sends 10,000."""
MEMORY_MAX = 48 * 2**20
"""What a small picture may take, whatever is in its file."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return ModelFile("ab" * 32, text_model(tmp_path_factory.mktemp("text"), "llama"))


@pytest.fixture(scope="module")
def mmproj(tmp_path_factory: pytest.TempPathFactory) -> Projector:
    path = tmp_path_factory.mktemp("eyes") / "mm.gguf"
    return read_projector(projector(path, "janus_pro", 64, image=16))


async def test_damaged_pictures_end_nothing_but_themselves(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    async with pool_in(tmp_path) as pool:
        before = await pool.encode_picture(model, mmproj, picture(40, 30, 3), is_kept=False)
        (pid,) = children()
        refused = await n_refused(pool, model, mmproj, N_DAMAGED)
        assert N_DAMAGED // 2 < refused < N_DAMAGED
        after = await pool.encode_picture(model, mmproj, picture(40, 30, 3), is_kept=False)
        assert np.array_equal(before.rows, after.rows)
        assert children() == [pid]


async def test_a_bomb_inside_a_small_picture_takes_no_memory(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    made = bombs()
    async with pool_in(tmp_path) as pool:
        await pool.encode_picture(model, mmproj, picture(40, 30, 3))
        (pid,) = children()
        before = peak_bytes(pid)
        largest = max(len(each.data) for each in made.values())
        for name, bomb in made.items():
            if name == "PNG whose data inflate beyond its size":
                assert np.isfinite((await pool.encode_picture(model, mmproj, bomb)).rows).all()
            else:
                with pytest.raises(InvalidRequest, match=r"file is damaged|pixels, not 16 x 12"):
                    await pool.encode_picture(model, mmproj, bomb)
            assert peak_bytes(pid) - before < MEMORY_MAX + 4 * largest, name
            assert children() == [pid], name


async def test_a_file_that_is_something_else_too_is_the_picture_that_it_begins_with(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    async with pool_in(tmp_path) as pool:
        for name, (both, alone) in polyglots().items():
            seen = await pool.encode_picture(model, mmproj, parse_picture(both.data, "picture"))
            expected = await pool.encode_picture(model, mmproj, alone)
            assert np.array_equal(seen.rows, expected.rows), name
            assert parse_picture(both.data, "picture").kind == alone.kind, name


async def test_what_is_no_picture_is_refused_under_any_name(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    whole = picture(16, 12, 3)
    others = {
        b"\0",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<?xml version='1.0'?><!DOCTYPE svg [<!ENTITY a 'aaaa'>]><svg>&a;</svg>",
        b"\x1f\x8b\x08\0" + bytes(16) + b"<svg/>",
        b"RIFF\x24\0\0\0WAVEfmt " + bytes(40),
    }
    async with pool_in(tmp_path) as pool:
        for kind in ("png", "jpeg", "webp", "gif"):
            for data in others | ({whole.data} if kind != "png" else set()):
                with pytest.raises(InvalidRequest, match=f"the {kind} file is damaged"):
                    await pool.encode_picture(model, mmproj, unchecked(data, kind))
        assert len((await pool.encode_picture(model, mmproj, whole)).rows) == 4
        assert len(children()) == 1
