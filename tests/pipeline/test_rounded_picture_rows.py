"""Rows of pictures that travel as f16: where that gains time, never unasked, never for exact requests."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from msgspec import UNSET
from node_ids import A, B, C
from vision_models import file_of, picture, pixels

from bench.common.arithmetic import N_EMBD
from swarmllm.pictures import Picture, parse_picture
from swarmllm.pipeline.route.row_formats import Packing
from swarmllm.pipeline.vision.compression import (
    PictureCompression,
    measured_half,
    recodes_picture,
    rounds_rows,
)
from swarmllm.swarm.in_memory.link import LinkQuality
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm.workerpool.encoders import EncodedPicture
from swarmllm_proto.codec import decode_request, encode_request
from swarmllm_proto.half_rows import pack_half, rows_each
from swarmllm_proto.limits import MIB
from swarmllm_proto.swarm import VisionEncodeRequest, VisionEncodeResponse

from .test_remote_encoders import LARGE, SHOWN, assert_same, lie, look, replaced, seeing, what

HALF = Packing(saved=0.5, seconds_per_byte=1e-9)
ROWS = 10 * MIB


@pytest.mark.parametrize(
    ("compression", "n_bytes", "bytes_per_s", "is_exact", "expected"),
    [
        ("off", ROWS, 1e6, False, False),
        ("always", ROWS, None, False, True),
        ("always", ROWS, 1e6, True, False),
        ("auto", ROWS, 1e6, True, False),
        ("auto", ROWS, 1e6, False, True),
        ("auto", ROWS, 1e8, False, True),
        ("auto", ROWS, 1e9, False, False),
        ("auto", ROWS, None, False, False),
        ("auto", 1000, 1e6, False, False),
    ],
)
def test_where_it_is_worth_it(
    compression: str, n_bytes: int, bytes_per_s: float | None, is_exact: bool, expected: bool
) -> None:
    rounds = rounds_rows(compression, n_bytes, bytes_per_s, HALF, is_exact=is_exact)  # type: ignore[arg-type]
    assert rounds is expected


def test_this_machine_saves_more_than_half() -> None:
    assert 0.5 < measured_half(512).saved < 0.7


def rounded(encoded: EncodedPicture) -> EncodedPicture:
    rows = encoded.rows.astype(np.float16).astype(np.float32)
    return replace(encoded, rows=rows, is_rounded=True)


async def test_rows_come_rounded_in_slices_and_the_answer_says_so() -> None:
    async with seeing(B, picture_compression="always") as swarm:
        swarm[B].pool.n_rows = 2 * rows_each(N_EMBD) + 11
        said: list[VisionEncodeResponse] = []
        asked = lie(swarm[B], lambda request, response: said.append(response) or response)
        encoded, looked = await look(swarm, LARGE)
        assert_same(encoded, rounded(what(LARGE, swarm[B].pool.n_rows)))
        assert encoded.is_rounded
        assert looked.is_rounded
        assert {each.rows_as for each in asked} == {"half"}
        slices = [each for each in said if each.n_rows]
        assert [each.n_here for each in slices] == [rows_each(N_EMBD)] * 2 + [11]
        assert sum(len(each.rows) for each in slices) < 0.5 * encoded.rows.nbytes
        await swarm.quiet()


@pytest.mark.parametrize("settings", [{}, {"picture_compression": "always", "exact": True}])
async def test_nothing_is_rounded_that_was_not_to_be(settings: dict[str, object]) -> None:
    async with seeing(B, **settings) as swarm:
        asked = lie(swarm[B], lambda request, response: response)
        encoded, looked = await look(swarm)
        assert_same(encoded, what(SHOWN))
        assert not looked.is_rounded
        assert {each.rows_as for each in asked} == {UNSET}


async def test_numbers_that_f16_does_not_hold_come_as_they_are() -> None:
    async with seeing(B, picture_compression="always") as swarm:
        large = what(SHOWN)
        rows = large.rows.copy()
        rows[2, 3] = 7e4
        rows.flags.writeable = False

        async def encode(*_: object, **__: object) -> EncodedPicture:
            return replace(large, rows=rows)

        swarm[B].pool.encode_picture = encode
        encoded, looked = await look(swarm)
        assert encoded.rows.tobytes() == rows.tobytes()
        assert not looked.is_rounded


async def test_a_node_of_before_sends_what_it_knows() -> None:
    async with seeing(B, picture_compression="always") as swarm:
        serve = swarm[B].pipelines.on_request

        async def of_before(sender: object, body: bytes) -> bytes:
            request = decode_request(body)
            if isinstance(request, VisionEncodeRequest):
                body = encode_request(msgspec.structs.replace(request, rows_as=UNSET))
            return bytes(await serve(sender, body))

        swarm[B].router.serve(of_before, swarm[B].pipelines.on_message)
        encoded, looked = await look(swarm)
        assert_same(encoded, what(SHOWN))
        assert not looked.is_rounded


def repacked(said: VisionEncodeResponse, n_rows: int) -> VisionEncodeResponse:
    return replaced(said, rows=memoryview(pack_half(np.ones((n_rows, N_EMBD), np.float32))))


LIARS = {
    "more here than there are": lambda said: replaced(repacked(said, 6), n_here=6),
    "fewer than it says": lambda said: repacked(said, 4),
    "other rows": lambda said: repacked(said, 5),
    "no number": lambda said: replaced(said, n_here=UNSET),
    "a form that nobody knows": lambda said: replaced(said, rows_as="quarter"),
    "f32 called half": lambda said: replaced(said, rows=memoryview(bytes(4 * 5 * N_EMBD))),
    "half called f32": lambda said: replaced(said, rows_as=UNSET),
}


@pytest.mark.parametrize("name", LIARS)
async def test_what_cannot_be_is_refused_and_the_next_node_asked(name: str) -> None:
    async with seeing(B, C, picture_compression="always") as swarm:
        lie(swarm[B], lambda request, said: LIARS[name](said) if said.n_rows else said)
        swarm.network.set_link(A, C, LinkQuality(0.02))
        encoded, looked = await look(swarm)
        assert_same(encoded, rounded(what(SHOWN)))
        assert looked.node_id == C
        assert swarm[A].trust.score(B) < NEUTRAL


async def test_rows_that_are_rounded_unasked_are_refused() -> None:
    async with seeing(B, C) as swarm:
        lie(
            swarm[B],
            lambda request, said: (
                replaced(repacked(said, 5), rows_as="half", n_here=5) if said.n_rows else said
            ),
        )
        swarm.network.set_link(A, C, LinkQuality(0.02))
        encoded, looked = await look(swarm)
        assert_same(encoded, what(SHOWN))
        assert looked.node_id == C
        assert swarm[A].trust.score(B) < NEUTRAL


def of_kind(kind: str, width: int, height: int, n_bytes: int) -> Picture:
    return Picture(bytes(n_bytes), kind, width, height, "ab" * 32)  # type: ignore[arg-type]


LARGE_PNG = of_kind("png", 3000, 2000, 12_000_000)


@pytest.mark.parametrize(
    ("compression", "shown", "bytes_per_s", "can_now", "is_exact", "expected"),
    [
        ("off", LARGE_PNG, 1e6, True, False, False),
        ("always", LARGE_PNG, None, False, False, True),
        ("always", LARGE_PNG, None, False, True, False),
        ("always", of_kind("jpeg", 3000, 2000, 12_000_000), 1e6, True, False, False),
        ("auto", LARGE_PNG, None, True, False, False),
        ("auto", LARGE_PNG, 1e6, False, False, True),
        ("auto", LARGE_PNG, 1e6, True, True, False),
        ("auto", LARGE_PNG, 1e7, False, False, False),
        ("auto", LARGE_PNG, 1e7, True, False, True),
        ("auto", LARGE_PNG, 1e8, True, False, False),
        ("auto", of_kind("png", 3000, 2000, 2_000_000), 1e6, True, False, False),
        ("auto", of_kind("webp", 300, 200, 60_000), 1e6, True, False, True),
        ("auto", of_kind("webp", 300, 200, 60_000), 1e6, False, False, False),
    ],
)
def test_where_a_picture_goes_as_jpeg(
    compression: PictureCompression,
    shown: Picture,
    bytes_per_s: float | None,
    can_now: bool,
    is_exact: bool,
    expected: bool,
) -> None:
    goes = recodes_picture(compression, shown, bytes_per_s, can_now=can_now, is_exact=is_exact)
    assert goes is expected


async def test_a_picture_goes_as_jpeg_and_what_it_became_is_that_of_the_picture() -> None:
    shown = picture(200, 150, 3)
    smaller = file_of(pixels(200, 150, 3), "JPEG", quality=20)
    assert len(smaller) < len(shown.data)
    async with seeing(B, picture_compression="always") as swarm:
        recoded: list[str] = []

        async def recode(given: Picture, *, side_max: int = 0) -> bytes:
            recoded.append(given.digest)
            return smaller

        swarm[A].pool.recode_picture = recode
        encoded, looked = await look(swarm, shown)
        assert_same(encoded, rounded(what(parse_picture(smaller, "picture"))))
        assert looked.is_rounded
        assert swarm[B].pool.seen == [parse_picture(smaller, "picture").digest]
        again, looked = await look(swarm, shown)
        assert again is encoded
        assert looked.is_kept
        assert recoded == [shown.digest]
        # What a node gave that has lied since goes, whatever file it was given.
        checker = swarm[A].pipelines.encoders._checker
        assert checker is not None
        checker._forget(B)
        assert not (await look(swarm, shown))[1].is_kept


@pytest.mark.parametrize("given", [b"no picture", file_of(pixels(400, 400, 9), "JPEG", quality=95)])
async def test_what_re_encoding_does_not_make_smaller_goes_as_it_is(given: bytes) -> None:
    async with seeing(B, picture_compression="always") as swarm:

        async def recode(_: Picture, *, side_max: int = 0) -> bytes:
            return given

        swarm[A].pool.recode_picture = recode
        encoded, _ = await look(swarm)
        assert_same(encoded, rounded(what(SHOWN)))
        assert swarm[B].pool.seen == [SHOWN.digest]
