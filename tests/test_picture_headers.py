"""What the header of a picture says, which headers are refused, and how pictures are found in a prompt."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_files import FILES, HEIGHT, WIDTH, gif, jpeg, png, riff, vp8, vp8l, vp8x

from swarmllm.errors import InvalidRequest
from swarmllm.pictures import (
    JPEG_SEGMENTS_MAX,
    NO_PICTURES,
    WEBP_CHUNKS_MAX,
    Picture,
    PromptPictures,
    joined,
    marker_of,
    parse_picture,
)
from swarmllm_proto.limits import PICTURE_BYTES_MAX, PICTURE_PIXELS_MAX, PICTURE_SIDE_MAX

FIELD = "messages[0].content[1].image_url.url"


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_picture(data, FIELD)
    assert caught.value.field == FIELD
    return caught.value.message


@pytest.mark.parametrize(("kind", "data"), FILES.values(), ids=list(FILES))
def test_the_header_tells_kind_and_size(kind: str, data: bytes) -> None:
    picture = parse_picture(data, FIELD)
    assert (picture.kind, picture.width, picture.height) == (kind, WIDTH, HEIGHT)
    assert (picture.data, picture.digest) == (data, blake3(data).hexdigest())
    assert "data" not in repr(picture)


@pytest.mark.parametrize(("kind", "data"), FILES.values(), ids=list(FILES))
def test_a_header_that_breaks_off_is_refused(kind: str, data: bytes) -> None:
    ends = next(n for n in range(len(data) + 1) if _is_taken(data[:n]))
    for n in range(ends):
        assert refusal(data[:n])
    for n in range(ends, len(data)):
        assert parse_picture(data[:n], FIELD).kind == kind


def _is_taken(data: bytes) -> bool:
    """Anything but a refusal passes to the test."""
    try:
        parse_picture(data, FIELD)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    "make",
    [
        png,
        jpeg,
        gif,
        lambda w, h: riff(vp8(w, h)),
        lambda w, h: riff(vp8l(w, h)),
        lambda w, h: riff(vp8x(w, h, 2)),
    ],
    ids=["png", "jpeg", "gif", "webp", "lossless webp", "animated webp"],
)
def test_sizes_beyond_the_limits_are_refused_by_the_header(make: Callable[[int, int], bytes]) -> None:
    fits = parse_picture(make(10_000, PICTURE_PIXELS_MAX // 10_000), FIELD) if make is not png else None
    assert fits is None or (fits.width, fits.height) == (10_000, PICTURE_PIXELS_MAX // 10_000)
    assert "at most" in refusal(_header_only(make, 10_000, PICTURE_PIXELS_MAX // 10_000 + 1))


def _header_only(make: Callable[..., bytes], width: int, height: int) -> bytes:
    return png(width, height, is_whole=False) if make is png else make(width, height)


def test_a_bomb_of_a_hundred_bytes_is_refused_by_its_size() -> None:
    bomb = png(60_000, 60_000, is_whole=False)
    assert len(bomb) < 100
    assert "60000 x 60000" in refusal(bomb)
    assert "at most" in refusal(png(PICTURE_SIDE_MAX + 1, 1, is_whole=False))
    assert parse_picture(png(PICTURE_SIDE_MAX, 1, is_whole=False), FIELD).width == PICTURE_SIDE_MAX
    assert "at most" in refusal(png(2**32 - 1, 2**32 - 1, is_whole=False))
    assert "larger than 32 MiB" in refusal(png() + bytes(PICTURE_BYTES_MAX))


@pytest.mark.parametrize("data", [png(0, 5), png(5, 0), jpeg(0, 5), jpeg(5, 0), gif(0, 5), riff(vp8(0, 5))])
def test_a_picture_without_pixels_is_refused(data: bytes) -> None:
    assert "empty" in refusal(data)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"  \n<?xml version='1.0'?><svg/>", "SVG"),
        (b"<!DOCTYPE html><img>", "HTML"),
        (b"<html>" + png(), "HTML"),
        (b"\0" + png(), "none of"),
        (b"%PDF-1.7" + png(), "PDF"),
        (b"BM" + bytes(60), "BMP"),
        (b"II*\0" + bytes(60), "TIFF"),
        (b"\0\0\0\x18ftypavif", "AVIF"),
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "none of"),
        (b"hello", "none of"),
        (png()[:8] + png()[16:], "damaged"),
        (b"\xff\xd8\xff\xd9" + jpeg(), "not read"),
        (jpeg(start=0xC3), "not read"),
        (jpeg(start=0xC9), "not read"),
        (jpeg(before=b"\0"), "damaged"),
        (jpeg(before=b"\xff\xe2\0\1"), "damaged"),
        (jpeg(before=b"\xff\xfe\0\2" * JPEG_SEGMENTS_MAX), "segments"),
        (riff((b"EXIF", bytes(20))), "damaged"),
        (riff(vp8x(flags=0), (b"ICCP", b""), vp8(WIDTH + 1)), "two sizes"),
        (riff(vp8x(), *[(b"ICCP", b"x")] * WEBP_CHUNKS_MAX, vp8()), "chunks"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(data: bytes, named: str) -> None:
    assert named in refusal(data)


def test_jpegs_of_8_bits_and_1_3_or_4_components_are_taken() -> None:
    for n in range(6):
        for precision in (8, 12):
            data = jpeg(n_components=n, precision=precision)
            if n in (1, 3, 4) and precision == 8:
                assert parse_picture(data, FIELD).width == WIDTH
            else:
                assert "this kind of JPEG" in refusal(data)
    longer = jpeg().replace(b"\xff\xc0\0\x11\x08\0\x07", b"\xff\xc0\0\x12\x08\0\x07")
    assert longer != jpeg()
    assert "this kind of JPEG" in refusal(longer)


@pytest.mark.parametrize(("name", "content"), [vp8(), vp8l()])
def test_a_webp_whose_frame_has_another_start_is_refused(name: bytes, content: bytes) -> None:
    assert parse_picture(riff((name, content)), FIELD).kind == "webp"
    starts = (b"\x11\0\0\x9d\x01\x2a", b"\x10\0\0\x9d\x01\x2b") if name == b"VP8 " else (b"\x2e",)
    for start in starts:
        assert "damaged" in refusal(riff((name, start + content[len(start) :])))
    for version in range(1, 8) if name == b"VP8L" else ():
        later = content[:4] + bytes([content[4] | version << 5]) + content[5:]
        assert "damaged" in refusal(riff((name, later)))


def test_all_bits_of_a_canvas_count() -> None:
    assert "70000 x 7 pixels" in refusal(riff(vp8x(70_000, 7, 2)))
    assert "12 x 16777216 pixels" in refusal(riff(vp8x(12, 2**24, 2)))


def test_a_png_that_begins_with_another_chunk_is_refused() -> None:
    for begin in (b"\0\0\0\x0dIDAT", b"\0\0\0\x0eIHDR"):
        head = bytearray(png())
        head[8:16] = begin
        head[29:33] = struct.pack(">I", zlib.crc32(head[12:29]))
        assert "damaged" in refusal(bytes(head))


@pytest.mark.parametrize(("offset", "value"), [(24, 3), (25, 1), (26, 1), (27, 1), (28, 2)])
def test_a_png_of_a_form_that_does_not_exist_is_refused(offset: int, value: int) -> None:
    """Also with the right checksum."""
    head = bytearray(png())
    head[offset] = value
    assert "damaged" in refusal(bytes(head))
    head[29:33] = struct.pack(">I", zlib.crc32(head[12:29]))
    assert "damaged" in refusal(bytes(head))


def test_the_size_of_a_thumbnail_is_not_that_of_the_picture() -> None:
    """`jpeg()` has one of 1 x 1 in its application data."""
    assert b"\xff\xc0\0\x11\x08\0\1\0\1" in jpeg()
    assert parse_picture(jpeg(300, 200), FIELD).width == 300


@settings(max_examples=2000, deadline=None)
@given(st.data())
def test_no_bytes_do_more_than_be_refused(data: st.DataObject) -> None:
    """Arbitrary bytes, and valid files with some bytes exchanged, inserted, removed or repeated."""
    _, file = data.draw(st.sampled_from(list(FILES.values())))
    damaged = bytearray(file)
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
    for each in (bytes(damaged), data.draw(st.binary(max_size=64)), file[:12] + bytes(damaged)[12:]):
        if not _is_taken(each):
            continue
        picture = parse_picture(each, FIELD)
        assert isinstance(picture, Picture)
        assert 1 <= picture.width <= PICTURE_SIDE_MAX
        assert 1 <= picture.height <= PICTURE_SIDE_MAX
        assert picture.width * picture.height <= PICTURE_PIXELS_MAX


NONCE = "0123456789abcdef"
MARKERS = [marker_of(NONCE, i) for i in range(12)]
PICTURES = {marker: parse_picture(png(1 + i, 1), FIELD) for i, marker in enumerate(MARKERS)}


@given(st.lists(st.text(max_size=20), min_size=13, max_size=13), st.permutations(MARKERS))
def test_a_prompt_is_split_at_its_pictures(texts: list[str], order: list[str]) -> None:
    text = texts[0] + "".join(marker + after for marker, after in zip(order, texts[1:], strict=True))
    pieces = PromptPictures(PICTURES).split(text)
    assert [each for each in pieces if isinstance(each, Picture)] == [PICTURES[marker] for marker in order]
    assert [each for each in pieces if isinstance(each, str)] == [each for each in texts if each]
    assert NO_PICTURES.split(text) == ((text,) if text else ())


@pytest.mark.parametrize("text", ["", MARKERS[0], MARKERS[0] * 2 + MARKERS[1], MARKERS[0] + MARKERS[1][:-1]])
def test_a_template_that_loses_or_repeats_a_picture_is_refused(text: str) -> None:
    two = PromptPictures({marker: PICTURES[marker] for marker in MARKERS[:2]}, "input")
    with pytest.raises(InvalidRequest) as caught:
        two.split(text)
    assert caught.value.field == "input"


def test_another_nonce_is_only_text() -> None:
    forged = marker_of("fedcba9876543210", 0)
    pictures = PromptPictures({MARKERS[0]: PICTURES[MARKERS[0]]})
    assert pictures.split(f"a {forged} b{MARKERS[0]}") == (f"a {forged} b", PICTURES[MARKERS[0]])


def test_parts_of_a_message_are_lines_except_beside_pictures() -> None:
    one, two = MARKERS[:2]
    assert joined([]) == ""
    assert joined(["a", "b", "", "c"]) == "a\nb\n\nc"
    assert joined(["a", one, "b", "c", two]) == f"a{one}b\nc{two}"
    assert joined([one, two, "a"]) == f"{one}{two}a"
