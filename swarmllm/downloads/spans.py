"""Which bytes of a file are there, and which are to be fetched next. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
"""[start, end)"""


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in the fewest spans, ascending."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def missing(done: Iterable[Span], size_bytes: int) -> list[Span]:
    """What is not in `done` of [0, size_bytes), ascending."""
    left: list[Span] = []
    at = 0
    for start, end in joined(done):
        if start > at:
            left.append((at, min(start, size_bytes)))
        at = max(at, end)
    if at < size_bytes:
        left.append((at, size_bytes))
    return left


def cut(spans: Iterable[Span], piece_bytes: int) -> list[Span]:
    """In pieces of at most `piece_bytes`."""
    return [(at, min(at + piece_bytes, end)) for start, end in spans for at in range(start, end, piece_bytes)]


def n_bytes(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in joined(spans))
