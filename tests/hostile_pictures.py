"""Files that are made to break a decoder of pictures, and what one process of an encoder makes of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from vision_models import file_of, pixels

from swarmllm.errors import InvalidRequest
from swarmllm.models.projector import Projector
from swarmllm.pictures import Picture
from swarmllm.workerpool import ModelFile, WorkerPool

WIDTH, HEIGHT = 16, 12
INFLATED: Final = 300 * 2**20
"""What a compressed part of some hundred kilobytes becomes."""


def unchecked(data: bytes, kind: str = "png", width: int = WIDTH, height: int = HEIGHT) -> Picture:
    """As if a header had been read in it."""
    return Picture(data, kind, width, height, blake3(data).hexdigest())  # type: ignore[arg-type]


def damaged_pictures(n: int, seed: int = 0) -> Iterator[Picture]:
    """Of every kind in turn: bytes exchanged, removed, repeated or cut off."""
    rng = np.random.default_rng(seed)
    kinds = ("png", "jpeg", "webp", "gif")
    whole = {kind: file_of(pixels(WIDTH, HEIGHT, 3), kind.upper()) for kind in kinds}
    for index in range(n):
        kind = kinds[index % 4]
        data = bytearray(whole[kind])
        if index % 3 == 0:
            del data[int(rng.integers(1, len(data))) :]
        for _ in range(int(rng.integers(1, 8))):
            at = int(rng.integers(0, len(data)))
            match int(rng.integers(0, 4)):
                case 0:
                    del data[at : at + int(rng.integers(1, 5))]
                case 1:
                    data[at:at] = data[at : at + int(rng.integers(1, 40))]
                case _:
                    data[at : at + 1] = bytes([int(rng.integers(0, 256))])
            data = data or bytearray(b"\0")
        yield unchecked(bytes(data), kind)


async def n_refused(pool: WorkerPool, model: ModelFile, mmproj: Projector, n: int, seed: int = 0) -> int:
    """How many of `n` damaged pictures are refused; the others are taken for what they look like. Raises what
    else becomes of them."""
    refused = 0
    for picture in damaged_pictures(n, seed):
        try:
            encoded = await pool.encode_picture(model, mmproj, picture, is_kept=False)
            assert np.isfinite(encoded.rows).all()
        except InvalidRequest:
            refused += 1
    return refused


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _inflating() -> bytes:
    packer = zlib.compressobj(9)
    piece = bytes(2**20)
    return b"".join([*(packer.compress(piece) for _ in range(INFLATED // 2**20)), packer.flush()])


def bombs() -> dict[str, Picture]:
    """Small files of which a part becomes hundreds of megabytes, or a picture larger than its header."""
    plain = file_of(pixels(WIDTH, HEIGHT, 3))
    head, rest = plain[:33], plain[33:]
    inflating = _inflating()
    end = chunk(b"IEND", b"")
    gif = bytearray(file_of(pixels(WIDTH, HEIGHT, 3) // 128 * 128, "GIF"))
    at = gif.index(b"\x2c", 13)  # the descriptor of the frame
    gif[at + 5 : at + 9] = struct.pack("<HH", 65535, 65535)
    webp = bytearray(file_of(pixels(WIDTH, HEIGHT, 3), "WEBP", lossless=True))
    at = webp.index(b"VP8L") + 9
    webp[at : at + 4] = struct.pack("<I", 16383 | 16383 << 14)
    return {
        "PNG whose data inflate beyond its size": unchecked(head + chunk(b"IDAT", inflating) + end),
        "PNG with a colour profile that inflates": unchecked(
            head + chunk(b"iCCP", b"icc\0\0" + inflating) + rest
        ),
        "PNG with a text that inflates": unchecked(head + chunk(b"zTXt", b"Comment\0\0" + inflating) + rest),
        "PNG with many texts that inflate": unchecked(
            head + chunk(b"zTXt", b"Comment\0\0" + inflating) * 20 + rest
        ),
        "GIF with a frame beyond its canvas": unchecked(bytes(gif), "gif"),
        "WebP whose frame is larger than its header says": unchecked(bytes(webp), "webp"),
    }


def polyglots() -> dict[str, tuple[Picture, Picture]]:
    """Files that are something else, too, and the picture that they are."""
    image = pixels(WIDTH, HEIGHT, 3)
    png, jpeg, gif = file_of(image), file_of(image, "JPEG"), file_of(image // 128 * 128, "GIF")
    other = file_of(pixels(WIDTH, HEIGHT, 4))
    archive = b"PK\x03\x04" + bytes(26) + b"PK\x05\x06" + bytes(18)
    comment = b"\xff\xfe" + struct.pack(">H", 2 + 34) + b"<script>alert('a comment')</script>"[:34]
    return {
        "PNG and zip": (unchecked(png + archive), unchecked(png)),
        "GIF and JavaScript": (unchecked(gif + b"*/=1;alert(1)//", "gif"), unchecked(gif, "gif")),
        "JPEG and HTML": (
            unchecked(jpeg[:2] + comment + jpeg[2:] + b"<html></html>", "jpeg"),
            unchecked(jpeg, "jpeg"),
        ),
        "two pictures in a file": (unchecked(png + other), unchecked(png)),
    }


def peak_bytes(pid: int) -> int:
    """Of the memory that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no process {pid}")
