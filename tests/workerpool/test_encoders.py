"""Pictures in worker processes of their own kind: decoded, encoded, kept, and what damaged ones cost."""

from __future__ import annotations

import io
import os
import signal
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from encoder_processes import children, pool_in
from PIL import Image
from vision_models import file_of, picture, pixels, projector, text_model

from swarmllm.errors import BadModel, InvalidRequest, SwarmLLMError, WorkerDied, WorkerError
from swarmllm.models.projector import Projector, read_projector
from swarmllm.pictures import Picture, parse_picture
from swarmllm.workerpool import ModelFile, encoders
from swarmllm.workerpool.encoders import EncodedPicture, KeptPictures, checked_picture
from swarmllm_proto.ipc import PictureEncoded, PicturePart
from swarmllm_proto.tensors import tensor_bytes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return ModelFile("ab" * 32, text_model(tmp_path_factory.mktemp("text"), "llama"))


@pytest.fixture(scope="module")
def mmproj(tmp_path_factory: pytest.TempPathFactory) -> Projector:
    return read_projector(projector(tmp_path_factory.mktemp("eyes") / "mm.gguf", "janus_pro", 64))


def unchecked(data: bytes, kind: str = "png", width: int = 40, height: int = 30) -> Picture:
    """As if a header had been read in it."""
    return Picture(data, kind, width, height, blake3(data).hexdigest())


async def test_a_picture_becomes_a_jpeg_without_a_projector(tmp_path: Path) -> None:
    y, x = np.mgrid[0:300, 0:400]
    noise = np.random.default_rng(1).integers(0, 9, (300, 400, 3))
    image = (np.stack([x / 2, y / 2, (x + y) / 4], -1) + noise).astype(np.uint8)
    async with pool_in(tmp_path) as pool:
        assert not pool.can_recode_now()
        shown = parse_picture(file_of(image), "picture")
        recoded = parse_picture(await pool.recode_picture(shown), "picture")
        assert (recoded.kind, recoded.width, recoded.height) == ("jpeg", 400, 300)
        assert len(recoded.data) < len(shown.data)
        with Image.open(io.BytesIO(recoded.data)) as read:
            assert np.abs(np.asarray(read, np.int32) - image).mean() < 4
            tables = read.quantization  # type: ignore[attr-defined]
        expected = Image.open(io.BytesIO(file_of(image, "JPEG", quality=90)))
        assert tables == expected.quantization  # type: ignore[attr-defined]
        assert pool.can_recode_now()
        with pytest.raises(InvalidRequest):
            await pool.recode_picture(unchecked(shown.data[:500], width=400, height=300))
        assert await pool.recode_picture(shown) == recoded.data
        expected = Image.fromarray(image).resize((120, 90), Image.Resampling.LANCZOS)
        with Image.open(io.BytesIO(await pool.recode_picture(shown, side_max=120))) as read:
            assert read.format == "PNG"
            assert np.array_equal(read, expected)


async def test_every_kind_is_decoded_and_what_a_picture_became_is_kept(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    image = pixels(40, 30, 3)
    files = {
        "png": file_of(image),
        "webp": file_of(image, "WEBP", lossless=True),
        "gif": file_of(image // 128 * 128, "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30))]),
        "jpeg": file_of(image, "JPEG", quality=95),
    }
    async with pool_in(tmp_path) as pool:
        rows: dict[str, np.ndarray] = {}
        for kind, data in files.items():
            shown = parse_picture(data, "picture")
            assert shown.kind == kind
            encoded = await pool.encode_picture(model, mmproj, shown)
            assert encoded.tokens.tolist() == [-1] * 16
            assert encoded.rows.shape == (16, 64)
            assert await pool.encode_picture(model, mmproj, shown) is encoded
            rows[kind] = encoded.rows
        assert np.array_equal(rows["png"], rows["webp"])
        assert 0 < np.abs(rows["png"] - rows["jpeg"]).max() < np.abs(rows["png"] - rows["gif"]).max()
        first_frame = await pool.encode_picture(
            model, mmproj, parse_picture(file_of(image // 128 * 128, "GIF"), "picture")
        )
        assert np.array_equal(first_frame.rows, rows["gif"])


async def test_pixels_are_upright_over_white_and_of_eight_bits(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    image = pixels(40, 30, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # its right side is up
    turned = file_of(np.rot90(image), exif=exif)
    clear = np.dstack([image, np.where(np.arange(40) < 20, 255, 0)[None].repeat(30, 0).astype(np.uint8)])
    over_white = np.where(np.arange(40)[None, :, None] < 20, image, 255).astype(np.uint8)
    grey = image[:, :, 0]
    deep = io.BytesIO()
    Image.fromarray(grey.astype(np.uint16) * 257).save(deep, "PNG")
    async with pool_in(tmp_path) as pool:

        async def rows(data: bytes) -> np.ndarray:
            return (await pool.encode_picture(model, mmproj, parse_picture(data, "picture"))).rows

        assert np.array_equal(await rows(turned), await rows(file_of(image)))
        assert np.array_equal(await rows(file_of(clear)), await rows(file_of(over_white)))
        assert np.array_equal(await rows(deep.getvalue()), await rows(file_of(np.dstack([grey] * 3))))


def bomb(width: int, height: int) -> bytes:
    """A PNG of some hundred bytes that says that it is so large."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


async def test_a_picture_that_would_be_too_large_is_not_decoded(
    tmp_path: Path, model: ModelFile, mmproj: Projector
) -> None:
    async with pool_in(tmp_path) as pool:
        with pytest.raises(InvalidRequest, match="pixels are more than"):
            await pool.encode_picture(model, mmproj, unchecked(bomb(16000, 16000), width=16000, height=16000))
        with pytest.raises(InvalidRequest, match="the picture has 16000 x 16000 pixels, not 40 x 30"):
            await pool.encode_picture(model, mmproj, unchecked(bomb(16000, 16000)))
        # One that is as long as may be is squeezed, whatever comes of it.
        long = await pool.encode_picture(model, mmproj, picture(16000, 1))
        assert np.isfinite(long.rows).all()


async def test_a_worker_that_is_too_late_is_killed_and_started_again(
    tmp_path: Path, model: ModelFile, mmproj: Projector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_in(tmp_path) as pool:
        before = await pool.encode_picture(model, mmproj, picture(40, 30, 1))
        (pid,) = children()
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(encoders, "PICTURE_TIMEOUT_S", 0.2)
            with pytest.raises(WorkerDied, match="did not answer EncodePicture"):
                await pool.encode_picture(model, mmproj, picture(40, 30, 2))
        assert await pool.encode_picture(model, mmproj, picture(40, 30, 1)) is before
        assert len((await pool.encode_picture(model, mmproj, picture(40, 30, 2))).rows) == 16
        await pool.forget(model.model_id)
        assert not children()


@pytest.mark.parametrize(
    "damage",
    [
        {"without": ("v.blk.0.attn_q.weight",)},
        {"without": ("mm.0.weight",)},
        {"width": 33},
        {"patch": 0},
    ],
    ids=str,
)
async def test_a_damaged_projector_ends_its_own_process_at_most(
    tmp_path: Path, model: ModelFile, damage: dict[str, object]
) -> None:
    whole = read_projector(projector(tmp_path / "whole.gguf", "janus_pro", 64))
    path = tmp_path / "damaged.gguf"
    if damage.pop("patch", None) == 0:
        path.write_bytes(with_patches_of_none((tmp_path / "whole.gguf").read_bytes()))
    else:
        projector(path, "janus_pro", 64, **damage)
    async with pool_in(tmp_path) as pool:
        with pytest.raises((BadModel, WorkerDied)):
            await pool.check_projector(model, read_projector(path))
        assert await pool.check_projector(model, whole) == 16
        with pytest.raises(SwarmLLMError):
            await pool.encode_picture(model, read_projector(path), picture(40, 30))


def with_patches_of_none(projector: bytes) -> bytes:
    key = b"clip.vision.patch_size"
    at = projector.index(key) + len(key) + 4
    return projector[:at] + struct.pack("<I", 0) + projector[at + 4 :]


async def test_a_projector_of_another_width_or_that_has_changed_is_not_used(
    tmp_path: Path, model: ModelFile
) -> None:
    other = read_projector(projector(tmp_path / "other.gguf", "janus_pro", 96))
    async with pool_in(tmp_path) as pool:
        with pytest.raises(BadModel, match="96"):
            await pool.check_projector(model, other)
        with pytest.raises(BadModel, match="has changed since it was added"):
            await pool.check_projector(model, replace_mtime(other))


def replace_mtime(mmproj: Projector) -> Projector:
    os.utime(mmproj.path, ns=(1, 1))
    return mmproj


def test_what_is_kept_is_bounded_in_bytes_and_the_latest() -> None:
    kept = KeptPictures(max_bytes=1000)

    def encoded(n_rows: int) -> EncodedPicture:
        return EncodedPicture(np.full(n_rows, -1, np.int32), np.zeros((n_rows, 9), np.float32), ())

    for name in "abc":
        kept.put(("m", "p", name), encoded(10))
    assert (len(kept), kept.n_bytes) == (2, 800)
    assert kept.get(("m", "p", "a")) is None
    assert kept.get(("m", "p", "b")) is not None
    kept.put(("m", "p", "d"), encoded(10))
    assert kept.get(("m", "p", "c")) is None, "b was used later"
    kept.put(("m", "p", "large"), encoded(1000))
    assert (len(kept), kept.n_bytes) == (2, 800)
    kept.forget("m")
    assert (len(kept), kept.n_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ((PicturePart(n_rows=2),), np.zeros((2, 5))),
        ((PicturePart(n_rows=3),), np.zeros((2, 4))),
        ((PicturePart(n_rows=2),), np.array([[0, 0, 0, np.nan], [0, 0, 0, 0]])),
        ((PicturePart((7,), 2),), np.zeros((2, 4))),
        ((PicturePart(), PicturePart(n_rows=2)), np.zeros((2, 4))),
        ((PicturePart((7,)),), np.zeros((0, 4))),
        ((PicturePart(n_rows=4),), np.zeros(4)),
    ],
)
def test_what_a_worker_says_of_a_picture_is_checked(parts: tuple[PicturePart, ...], rows: np.ndarray) -> None:
    payload = memoryview(tensor_bytes(rows.astype(np.float32)))
    with pytest.raises(WorkerError):
        checked_picture(PictureEncoded(id=1, parts=parts), payload, 4)


def test_a_pictures_parts_follow_each_other() -> None:
    parts = PicturePart((7, 8)), PicturePart(n_rows=2), PicturePart(n_rows=1), PicturePart((9,))
    payload = memoryview(tensor_bytes(np.ones((3, 4), np.float32)))
    encoded = checked_picture(PictureEncoded(id=1, parts=parts), payload, 4)
    assert encoded.tokens.tolist() == [7, 8, -1, -1, -1, 9]
    assert encoded.ends == (2, 4, 5)
    assert not encoded.rows.flags.writeable
