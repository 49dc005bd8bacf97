"""Sounds that are made to break their decoder, one after the other in one process, which survives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encoder_processes import children, pool_in
from hostile_pictures import peak_bytes
from hostile_sounds import lying_sounds, n_refused, unchecked
from sound_models import float_wav, sound, sound_file, sound_projector, tones, wav_of
from vision_models import picture, projector, text_model

from swarmllm.errors import BadModel, InvalidRequest
from swarmllm.models.projector import Projector, read_projector
from swarmllm.sounds import parse_sound
from swarmllm.workerpool import ModelFile

pytestmark = pytest.mark.slow

N_DAMAGED = 1000
MEMORY_MAX = 96 * 2**20
"""What a small file may take: all of ten minutes are 38 MiB of samples, and libmtmd copies them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return ModelFile("ab" * 32, text_model(tmp_path_factory.mktemp("text"), "llama"))


@pytest.fixture(scope="module")
def mmproj(tmp_path_factory: pytest.TempPathFactory) -> Projector:
    """Of the family that takes the least time for short sounds."""
    return read_projector(sound_projector(tmp_path_factory.mktemp("ears") / "mm.gguf", "qwen3a", 64))


async def test_damaged_sounds_end_nothing_but_themselves(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    async with pool_in(tmp_path) as pool:
        before = await pool.encode_picture(model, mmproj, sound(0.5), is_kept=False)
        (pid,) = children()
        refused = await n_refused(pool, model, mmproj, N_DAMAGED)
        assert N_DAMAGED // 3 < refused < N_DAMAGED
        after = await pool.encode_picture(model, mmproj, sound(0.5), is_kept=False)
        assert np.array_equal(before.rows, after.rows)
        assert children() == [pid]


async def test_headers_that_lie_are_refused_with_little_memory(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    async with pool_in(tmp_path) as pool:
        await pool.encode_picture(model, mmproj, sound(0.5))
        (pid,) = children()
        before = peak_bytes(pid)
        for name, (lying, why) in lying_sounds().items():
            with pytest.raises(InvalidRequest, match=why):
                await pool.encode_picture(model, mmproj, lying)
            assert children() == [pid], name
            assert peak_bytes(pid) - before < MEMORY_MAX, name


async def test_an_mp3_that_says_to_be_days_long_is_as_long_as_it_is(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    whole = sound_file("sweep-22050-mono.mp3").data
    at = whole.index(b"Xing") + 8
    lying = whole[:at] + b"\x00\xd4\x00\x1d" + whole[at + 4 :]
    unreadable = lying[:4] + b"\xff" * 9 + lying[13:208]
    async with pool_in(tmp_path) as pool:
        honest = await pool.encode_picture(model, mmproj, parse_sound(whole, "sound"))
        (pid,) = children()
        before = peak_bytes(pid)
        rows = await pool.encode_picture(model, mmproj, parse_sound(lying, "sound"))
        assert np.array_equal(rows.rows, honest.rows)
        # A decoder that cannot read the first frame takes the next one for it.
        await pool.encode_picture(model, mmproj, parse_sound(unreadable + lying, "sound"))
        assert peak_bytes(pid) - before < MEMORY_MAX


async def test_what_is_no_sound_is_refused_under_any_name(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    others = (b"\0", b"<svg/>", picture(16, 12).data, b"OggS" + bytes(60), b"\x1aE\xdf\xa3" + bytes(60))
    async with pool_in(tmp_path) as pool:
        for kind in ("wav", "mp3", "flac"):
            for data in others:
                with pytest.raises(InvalidRequest, match="none of WAV, MP3 and FLAC"):
                    await pool.encode_picture(model, mmproj, unchecked(data, kind))
        assert len(children()) == 1


async def test_tags_pictures_and_unknown_chunks_around_a_sound_change_nothing(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    wav, mp3, flac = (
        wav_of(tones(0.4)),
        sound_file("sweep-22050-mono.mp3").data,
        sound_file("sweep-22050-stereo.flac").data,
    )
    cover = b"\x06\0\x10\0" + bytes(0x1000)
    around = {
        wav: wav[:12] + b"LIST\x08\0\0\0INFOabcd" + wav[12:] + b"junk\4\0\0\0abcd",
        mp3: b"ID3\4\0\0\0\0\0\4abcd" + mp3 + b"TAG" + bytes(125),
        flac: flac[:42] + cover + flac[42:],
    }
    async with pool_in(tmp_path) as pool:
        for bare, file in around.items():
            one = await pool.encode_picture(model, mmproj, parse_sound(bare, "sound"))
            other = await pool.encode_picture(model, mmproj, parse_sound(file, "sound"))
            assert np.array_equal(one.rows, other.rows), parse_sound(bare, "sound").kind


async def test_samples_beyond_what_a_loudspeaker_plays_are_cut(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    loud = 4 * tones(0.4)
    async with pool_in(tmp_path) as pool:
        cut = await pool.encode_picture(model, mmproj, parse_sound(float_wav(np.clip(loud, -1, 1)), "sound"))
        rows = await pool.encode_picture(model, mmproj, parse_sound(float_wav(loud), "sound"))
        assert np.array_equal(cut.rows, rows.rows)


async def test_a_projector_encodes_only_what_it_takes(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    eyes = read_projector(projector(tmp_path / "eyes.gguf", "janus_pro", 64))
    assert (eyes.takes, mmproj.takes) == ({"picture"}, {"sound"})
    async with pool_in(tmp_path) as pool:
        # Half a second of silence becomes the rows of a second.
        assert await pool.check_projector(model, mmproj) == 13
        with pytest.raises(InvalidRequest, match="encodes no pictures"):
            await pool.encode_picture(model, mmproj, picture(40, 30))
        with pytest.raises(InvalidRequest, match="encodes no sounds"):
            await pool.encode_picture(model, eyes, sound(0.5))
        assert len(children()) == 2


async def test_a_damaged_projector_of_sounds_is_refused_when_it_is_opened(
    tmp_path: Path, model: ModelFile
) -> None:
    whole = sound_projector(tmp_path / "mm.gguf", "ultravox", 64).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole.replace(b"a.conv1d.1.bias", b"a.conv1d.9.bias"))
    async with pool_in(tmp_path) as pool:
        with pytest.raises(BadModel, match="conv1d"):
            await pool.check_projector(model, read_projector(damaged))
