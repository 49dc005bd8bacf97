"""Spans of bytes: what is there and what is missing make the whole, whatever the order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.downloads.digest_book import Span, cut, joined, missing, n_bytes

SIZE = 60
spans = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8)


def covered(parts: list[Span]) -> set[int]:
    return {at for start, end in parts for at in range(start, end)}


@given(spans)
def test_what_is_missing_is_what_is_not_there(done: list[Span]) -> None:
    assert covered(missing(done, SIZE)) == set(range(SIZE)) - covered(done)
    assert n_bytes(missing(done, SIZE)) + n_bytes(done) == SIZE


@given(spans)
def test_joined_spans_are_the_same_bytes_and_do_not_touch(parts: list[Span]) -> None:
    found = joined(parts)
    assert covered(found) == covered(parts)
    assert all(before[1] < after[0] for before, after in pairwise(found))


@given(spans, st.integers(1, 20))
def test_pieces_are_the_same_bytes_and_small_enough(parts: list[Span], piece_bytes: int) -> None:
    pieces = cut(joined(parts), piece_bytes)
    assert covered(pieces) == covered(parts)
    assert all(0 < end - start <= piece_bytes for start, end in pieces)
