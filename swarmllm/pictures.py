"""Reads the kind and the size of a picture from its header, and finds pictures by their markers in a prompt.

Nothing is decoded here: a decoder that is given hostile bytes runs in the encoder's process. The header tells
how large the picture would be, so that what would take too much memory is refused before that.

In the text of a prompt a marker stands for each picture, and for each sound. It contains a nonce of the
request, so that the author of the text cannot write a marker.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from blake3 import blake3

from swarmllm.errors import InvalidRequest
from swarmllm.sounds import Sound, parse_sound
from swarmllm_proto.ipc import PictureKind
from swarmllm_proto.limits import MIB, PICTURE_BYTES_MAX, PICTURE_PIXELS_MAX, PICTURE_SIDE_MAX
from swarmllm_proto.sound_headers import looks_like_mp3

Size = tuple[int, int]
"""Width and height, in pixels."""

LOW_DETAIL_SIDE: Final = 512
"""Pixels of the longer side of a picture that a client wants looked at with low detail, as OpenAI has it."""
PICTURES_MAX: Final = 64
"""Pictures and sounds of one request, and so of one prompt."""
JPEG_SEGMENTS_MAX: Final = 4096
WEBP_CHUNKS_MAX: Final = 64
LOOK_BYTES: Final = 256
"""At the beginning of what is no picture, to say what it is."""

MEDIA_TYPES: Final[Mapping[PictureKind, str]] = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
}
NAMES: Final = "PNG, JPEG, WebP and GIF"

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
"""By colour type."""
_JPEG_SIZES: Final = (0xC0, 0xC1, 0xC2)
"""Start of a frame: baseline, extended, progressive. Others (lossless, arithmetic) hardly exist."""
_JPEG_BEFORE: Final = (0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0))
"""What may come before: tables, restart interval, comment, application data."""
_OTHERS: Final = (
    (re.compile(rb"\s*<(?:\?xml|!--|!doctype|svg|html|script|\w)", re.IGNORECASE), "SVG, HTML or XML"),
    (re.compile(rb"....ftyp(?:avif|avis)", re.DOTALL), "AVIF"),
    (re.compile(rb"....ftyp", re.DOTALL), "HEIC or a video"),
    (re.compile(rb"II\*\0|MM\0\*"), "TIFF"),
    (re.compile(rb"%PDF"), "PDF"),
    (re.compile(rb"BM"), "BMP"),
)


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A file whose header says that it is a picture within the limits. Only `parse_picture` makes one.

    Its pixels have not been decoded and may be damaged."""

    data: bytes
    kind: PictureKind
    width: int
    """In pixels, as the header has it: not yet turned as its EXIF orientation says."""
    height: int
    digest: str
    """BLAKE3 of `data`, in hexadecimal."""
    side_max: int = 0
    """Pixels of the longer side to which it is to be scaled down before it is encoded; 0: it is encoded as it
    is."""

    @property
    def is_too_large(self) -> bool:
        return 0 < self.side_max < max(self.width, self.height)

    def __repr__(self) -> str:
        return f"<Picture {self.kind} {self.width}x{self.height} {len(self.data)} bytes>"


Medium: TypeAlias = Picture | Sound
"""What an encoder makes rows of."""
MediumName = Literal["picture", "sound"]
"""As projectors say that they take it."""


def name_of(medium: Medium) -> MediumName:
    return "picture" if isinstance(medium, Picture) else "sound"


def parse_medium(data: bytes, field: str) -> Medium:
    """A picture or a sound, as its first bytes tell. Raises InvalidRequest naming the field."""
    is_sound = looks_like_mp3(data) or data[:4] == b"fLaC" or (data[:4], data[8:12]) == (b"RIFF", b"WAVE")
    return parse_sound(data, field) if is_sound else parse_picture(data, field)


class _Wrong(Exception):
    """What is wrong with the header."""


def parse_picture(data: bytes, field: str) -> Picture:
    """Raises InvalidRequest naming the field."""
    if len(data) > PICTURE_BYTES_MAX:
        raise InvalidRequest(f"the picture is larger than {PICTURE_BYTES_MAX // MIB} MiB.", field=field)
    try:
        kind, (width, height) = _header(data)
    except _Wrong as error:
        raise InvalidRequest(f"{error}.", field=field) from None
    if not (width and height):
        raise InvalidRequest(f"the picture is {width} x {height} pixels: empty.", field=field)
    if max(width, height) > PICTURE_SIDE_MAX or width * height > PICTURE_PIXELS_MAX:
        raise InvalidRequest(
            f"the picture is {width} x {height} pixels; at most {PICTURE_SIDE_MAX} a side and"
            f" {PICTURE_PIXELS_MAX / 10**6:.1f} million in all are taken.",
            field=field,
        )
    return Picture(data, kind, width, height, blake3(data).hexdigest())


def _header(data: bytes) -> tuple[PictureKind, Size]:
    if not data:
        raise _Wrong("the picture is empty")
    try:
        if data.startswith(_PNG):
            return "png", _png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return "jpeg", _jpeg(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return "webp", _webp(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return "gif", struct.unpack_from("<HH", data, 6)
    except (struct.error, IndexError):
        raise _Wrong("the picture ends within its header") from None
    found = next((name for pattern, name in _OTHERS if pattern.match(data[:LOOK_BYTES])), None)
    raise _Wrong(f"this is {found}, but only {NAMES} are read" if found else f"this is none of {NAMES}")


def _png(data: bytes) -> Size:
    length, name, width, height, depth, colour, compression, filtering, interlace, checksum = (
        struct.unpack_from(">I4sIIBBBBBI", data, len(_PNG))
    )
    is_valid = (
        (length, name) == (13, b"IHDR")
        and depth in _PNG_DEPTHS.get(colour, ())
        and (compression, filtering) == (0, 0)
        and interlace in (0, 1)
        and zlib.crc32(data[12:29]) == checksum
    )
    if not is_valid:
        raise _Wrong("the header of the PNG is damaged")
    return width, height


def _jpeg(data: bytes) -> Size:
    """Nothing may stand between segments: a decoder that looks for markers elsewhere would find another
    size."""
    at = 2
    for _ in range(JPEG_SEGMENTS_MAX):
        if data[at] != 0xFF:
            raise _Wrong("the header of the JPEG is damaged")
        marker = data[at + 1]
        if marker == 0xFF:
            # Any number of them may fill the place before a marker.
            at += 1
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker in _JPEG_SIZES:
            precision, height, width, n_components = struct.unpack_from(">BHHB", data, at + 4)
            if length != 8 + 3 * n_components or n_components not in (1, 3, 4) or precision != 8:
                raise _Wrong("this kind of JPEG is not read: only 8 bits a sample, of 1, 3 or 4 components")
            return width, height
        if marker not in _JPEG_BEFORE:
            raise _Wrong("this kind of JPEG is not read, or its header is damaged")
        if length < 2:
            raise _Wrong("the header of the JPEG is damaged")
        at += 2 + length
    raise _Wrong(f"the JPEG has more than {JPEG_SEGMENTS_MAX} segments before its size")


def _webp(data: bytes) -> Size:
    name, size = _webp_chunk(data, 12)
    if name != b"VP8X":
        return _webp_frame(data, 12, name)
    if size < 10:
        raise _Wrong("the header of the WebP is damaged")
    flags, width, height = data[20], _u24(data, 24) + 1, _u24(data, 27) + 1
    if flags & 0x02:
        # Frames of an animation lie within its canvas, or its decoder refuses it.
        return width, height
    at = 12
    for _ in range(WEBP_CHUNKS_MAX):
        at += 8 + size + size % 2
        name, size = _webp_chunk(data, at)
        if name in (b"VP8 ", b"VP8L"):
            if _webp_frame(data, at, name) != (width, height):
                raise _Wrong("the WebP says two sizes")
            return width, height
    raise _Wrong(f"the WebP has more than {WEBP_CHUNKS_MAX} chunks before its picture")


def _webp_chunk(data: bytes, at: int) -> tuple[bytes, int]:
    """Name, and bytes of content."""
    name, size = struct.unpack_from("<4sI", data, at)
    return name, size


def _webp_frame(data: bytes, at: int, name: bytes) -> Size:
    if name == b"VP8 ":
        tag, start, width, height = struct.unpack_from("<B2x3sHH", data, at + 8)
        if tag & 1 or start != b"\x9d\x01\x2a":
            raise _Wrong("the header of the WebP is damaged")
        return width & 0x3FFF, height & 0x3FFF
    if name == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, at + 8)
        if signature != 0x2F or bits >> 29:
            raise _Wrong("the header of the WebP is damaged")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise _Wrong("the header of the WebP is damaged")


def _u24(data: bytes, at: int) -> int:
    return data[at] | data[at + 1] << 8 | data[at + 2] << 16


class Marker(str):
    """Stands for a picture or a sound in the text of a prompt."""

    __slots__ = ()


def marker_of(nonce: str, index: int) -> Marker:
    """Letters, digits and underlines only, so that chat templates leave it as it is; of the same length for
    each index, so that none is the beginning of another. `nonce`: random, and told to nobody."""
    return Marker(f"picture_{nonce}_{index:04d}_")


def joined(parts: Iterable[str | Marker]) -> str:
    """Parts of a message as its text: a line each, except beside a picture or a sound."""
    text = ""
    after_marker = True
    for part in parts:
        is_marker = isinstance(part, Marker)
        text += part if is_marker or after_marker else f"\n{part}"
        after_marker = is_marker
    return text


@dataclass(frozen=True, slots=True)
class PromptPictures:
    """The pictures and sounds of one prompt, each by the marker that stands for it in the prompt's text."""

    by_marker: Mapping[str, Medium]
    field: str = "messages"
    """What the client's API calls the first of them, for refusals."""

    def __bool__(self) -> bool:
        return bool(self.by_marker)

    def split(self, text: str) -> tuple[str | Medium, ...]:
        """A rendered prompt as pieces of text, none of them empty, pictures and sounds, in their order.
        Raises InvalidRequest where one of these is not there exactly once: the chat template leaves it out,
        or repeats it."""
        if not self.by_marker:
            return (text,) if text else ()
        pieces = re.split("(" + "|".join(map(re.escape, self.by_marker)) + ")", text)
        found = pieces[1::2]
        if sorted(found) != sorted(self.by_marker):
            raise InvalidRequest(
                "the model's chat template does not show every picture and sound of this conversation once.",
                field=self.field,
            )
        return tuple(self.by_marker.get(piece, piece) for piece in pieces if piece)


NO_PICTURES: Final = PromptPictures({})
