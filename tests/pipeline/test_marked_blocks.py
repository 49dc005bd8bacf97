"""Names of blocks of prompts with pictures: what comes before a picture is named as without it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.pipeline.origin.pictures import PictureMark, rows_digest
from swarmllm.pipeline.prefix.names import marked_block_hashes
from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes
from swarmllm_proto.picture_runs import PictureRun

ROOT = bytes(range(32))
TOKENS = np.arange(5 * BLOCK_TOKENS + 10, dtype=np.int32)
"""The same ids whatever the pictures are: as if ids of rows told nothing."""


def mark(position: int, picture: int) -> PictureMark:
    return PictureMark(position, bytes([picture]) * 32)


def names(*marks: PictureMark, n_tokens: int = len(TOKENS)) -> tuple[bytes, ...]:
    return marked_block_hashes(ROOT, TOKENS[:n_tokens], marks)


def n_alike(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    alike = [a == b for a, b in zip(one, other, strict=True)]
    n = alike.index(False) if False in alike else len(alike)
    assert not any(alike[n:]), "a chain that has parted stays apart"
    return n


def test_without_pictures_names_are_those_of_every_text() -> None:
    assert names() == extend_block_hashes(ROOT, TOKENS)
    assert names(mark(5 * BLOCK_TOKENS + 3, 1)) == names(), "its block is not complete"


def test_a_further_picture_leaves_the_names_before_it() -> None:
    first = mark(70, 1)
    assert n_alike(names(first), names()) == 1
    assert n_alike(names(first, mark(200, 2)), names(first)) == 3
    assert n_alike(names(first, mark(200, 2)), names(first, mark(200, 3))) == 3
    assert n_alike(names(first, mark(192, 2)), names(first, mark(191, 2))) == 2
    assert n_alike(names(mark(0, 1)), names()) == 0


def test_pictures_in_one_block_all_count_and_so_do_their_places() -> None:
    a, b = mark(64, 1), mark(70, 2)
    seen = [(a, b), (b,), (a,), (mark(64, 2), mark(70, 1)), (a, mark(71, 2)), (mark(65, 1), b)]
    assert len({names(*each) for each in seen}) == len(seen)
    assert {n_alike(names(*each), names()) for each in seen} == {1}


@given(st.lists(st.tuples(st.integers(0, len(TOKENS)), st.integers(0, 3)), max_size=4), st.integers(0, 330))
def test_names_of_a_beginning_are_the_beginning_of_the_names(
    said: list[tuple[int, int]], n_tokens: int
) -> None:
    marks = [mark(*each) for each in sorted(said)]
    whole, part = names(*marks), names(*marks, n_tokens=n_tokens)
    assert whole[: len(part)] == part
    assert len(part) == n_tokens // BLOCK_TOKENS


def test_rows_of_another_encoder_are_another_picture() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    other = np.nextafter(rows, np.float32(1))
    found = {
        rows_digest("p", "a", rows),
        rows_digest("p", "a", other),
        rows_digest("q", "a", rows),
        rows_digest("p", "b", rows),
        rows_digest("p", "a", rows, (PictureRun(0, 6, 2),)),
        rows_digest("p", "a", rows, (PictureRun(0, 6, 3),)),
    }
    assert len(found) == 6
    assert rows_digest("p", "a", rows[::1].copy()) in found
