"""Makes small picture files by hand: valid headers of every kind, and damaged ones."""

from __future__ import annotations

import base64
import struct
import zlib

WIDTH, HEIGHT = 12, 7


def png(width: int = WIDTH, height: int = HEIGHT, *, is_whole: bool = True) -> bytes:
    """A white RGB picture; without `is_whole` its header alone."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    if not is_whole:
        return head
    rows = (b"\0" + b"\xff" * 3 * width) * height
    return head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def jpeg(
    width: int = WIDTH,
    height: int = HEIGHT,
    *,
    start: int = 0xC0,
    before: bytes = b"",
    n_components: int = 3,
    precision: int = 8,
) -> bytes:
    """A header up to the size; `before`: further segments in front of it."""
    app0 = b"\xff\xe0" + struct.pack(">H", 16) + b"JFIF\0\1\1\0\0\1\0\1\0\0"
    thumbnail = (
        b"\xff\xe1" + struct.pack(">H", 2 + 19) + b"\xff\xd8" + b"\xff\xc0\0\x11\x08\0\1\0\1\3" + bytes(7)
    )
    frame = struct.pack(">BHHB", precision, height, width, n_components)
    frame += b"".join(bytes([i + 1, 0x11, 0]) for i in range(n_components))
    size = bytes([0xFF, start]) + struct.pack(">H", 2 + len(frame)) + frame
    return b"\xff\xd8" + app0 + thumbnail + before + b"\xff\xff" + size + b"\xff\xd9"


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    content = b"".join(
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(content)) + b"WEBP" + content


def vp8(width: int = WIDTH, height: int = HEIGHT) -> tuple[bytes, bytes]:
    return b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", width | 1 << 14, height) + b"\0"


def vp8l(width: int = WIDTH, height: int = HEIGHT) -> tuple[bytes, bytes]:
    return b"VP8L", b"\x2f" + struct.pack("<I", width - 1 | height - 1 << 14 | 1 << 28) + b"\0"


def vp8x(width: int = WIDTH, height: int = HEIGHT, flags: int = 0) -> tuple[bytes, bytes]:
    sides = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return b"VP8X", bytes([flags, 0, 0, 0]) + sides


def gif(width: int = WIDTH, height: int = HEIGHT, version: bytes = b"GIF89a") -> bytes:
    return version + struct.pack("<HH", width, height) + b"\0\0\0;"


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


FILES: dict[str, tuple[str, bytes]] = {
    "png": ("png", png()),
    "jpeg": ("jpeg", jpeg()),
    "progressive jpeg": ("jpeg", jpeg(start=0xC2)),
    "webp": ("webp", riff(vp8())),
    "lossless webp": ("webp", riff(vp8l())),
    "extended webp": ("webp", riff(vp8x(), (b"ICCP", b"odd"), vp8())),
    "animated webp": ("webp", riff(vp8x(flags=2), (b"ANIM", bytes(6)))),
    "gif": ("gif", gif()),
    "old gif": ("gif", gif(version=b"GIF87a")),
}
"""By name: the kind, and a file of WIDTH x HEIGHT pixels."""
