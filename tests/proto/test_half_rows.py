"""Rows as f16: the numbers that f16 has, in fewer bytes; what is not of the right size is not unpacked."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.errors import BadTensor
from swarmllm_proto.half_rows import pack_half, rounded_to_half, rows_each, unpack_half
from swarmllm_proto.limits import IMAGE_ROWS_MAX


def rows_of(n: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 5))
def test_both_ends_have_the_numbers_of_f16(n: int, width: int, seed: int) -> None:
    rows = rows_of(n, width, seed) * 10.0 ** (seed - 3)
    half = rounded_to_half(rows)
    assert half is not None
    assert half.tobytes() == rows.astype(np.float16).astype(np.float32).tobytes()
    assert unpack_half(pack_half(half), n_rows=n, width=width).tobytes() == half.tobytes()


def test_it_is_less_than_half() -> None:
    rows = rounded_to_half(rows_of(64, 1024))
    assert rows is not None
    assert len(pack_half(rows)) < 0.47 * rows.nbytes


@pytest.mark.parametrize("number", [65520.0, 1e9, np.inf, -np.inf, np.nan])
def test_what_f16_cannot_hold_is_not_rounded(number: float) -> None:
    rows = rows_of(3, 8)
    rows[1, 2] = number
    assert rounded_to_half(rows) is None
    rows[1, 2] = 65504.0
    assert rounded_to_half(rows) is not None


def test_as_many_as_fit_in_a_message_do_even_where_zstd_gains_nothing() -> None:
    for width in (64, 4096, 8192):
        n = rows_each(width)
        noise = np.random.default_rng(1).bytes(2 * n * width)
        frame = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(noise)
        assert len(frame) <= IMAGE_ROWS_MAX
        assert 2 * n * width > 0.95 * IMAGE_ROWS_MAX
    assert rows_each(IMAGE_ROWS_MAX) == 0


GOOD = pack_half(rows_of(4, 8).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("data", "n_rows", "width"),
    [
        (b"", 4, 8),
        (b"nonsense", 4, 8),
        (GOOD[:-3], 4, 8),
        (GOOD + b"more", 4, 8),
        (GOOD, 4, 9),
        (GOOD, 3, 8),
        (GOOD, 2**20, 2**20),
        (GOOD, 0, 8),
        (zstandard.ZstdCompressor(level=1).compress(bytes(2**28)), 4, 8),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64)), 4, 8),
    ],
    ids=["none", "no frame", "cut", "more", "wider", "fewer", "huge", "no rows", "a bomb", "no size"],
)
def test_frames_of_strangers_are_refused_before_they_are_unpacked(
    data: bytes, n_rows: int, width: int
) -> None:
    with pytest.raises(BadTensor, match="rows"):
        unpack_half(data, n_rows=n_rows, width=width)
