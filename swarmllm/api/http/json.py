"""JSON of answers. Long lists are encoded in slices: strangers decide how many models and peers there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import trio

encode = msgspec.json.encode

SLICE_BYTES = 16 * 1024
"""Of JSON, about a tenth of a millisecond of encoding and a few of making what is encoded."""
T = TypeVar("T")


async def encoded(items: Iterable[T], as_json: Callable[[T], object]) -> list[msgspec.Raw]:
    """Each item's JSON, ready to be put into a larger one. Others have their turn in between."""
    pieces: list[msgspec.Raw] = []
    n_bytes = 0
    for item in items:
        piece = encode(as_json(item))
        pieces.append(msgspec.Raw(piece))
        n_bytes += len(piece)
        if n_bytes >= SLICE_BYTES:
            n_bytes = 0
            await trio.lowlevel.checkpoint()
    return pieces
