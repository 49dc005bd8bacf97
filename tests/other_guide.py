"""The guide under another name in its metadata, and so another model, one that no catalogue knows."""

from __future__ import annotations

from swarmllm.guide import GUIDE_PATH

_KEY = b"general.name"
_TYPE_AND_LENGTH_BYTES = 4 + 8


def other_guide(letter: str) -> bytes:
    """`letter` is the name's first: another one makes another model."""
    data = GUIDE_PATH.read_bytes()
    at = data.index(_KEY) + len(_KEY) + _TYPE_AND_LENGTH_BYTES
    assert data[at : at + 1] != letter.encode(), "that is the guide itself"
    return data[:at] + letter.encode() + data[at + 1 :]
