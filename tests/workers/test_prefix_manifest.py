"""A worker tells what it keeps, where that is wanted, and when it changes."""

from __future__ import annotations

import numpy as np
from block_names import block_hashes

from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.ipc_kv import split_names
from swarmllm_workers.cache.prefix_cache import beginnings
from swarmllm_workers.cache.prefixes import Kept, Name

from .test_batching import OpenRoom, Room, open_room  # noqa: F401

MODEL = "ab" * 32
N_LAYERS = 4


def told(room: Room) -> list[list[tuple[bytes, int]]]:
    room.handlers.pause_ms()
    return [
        list(zip(split_names(payload), message.n_blocks, strict=True))
        for message, payload in room.sent
        if isinstance(message, ipc.PrefixManifestUpdate)
    ]


def prompt(first: int) -> np.ndarray:
    return np.array([first, *([70] * (2 * BLOCK_TOKENS))], np.int32)


def ask(room: Room, name: str, first: int) -> tuple[bytes, int]:
    """What the request leaves behind."""
    tokens = prompt(first)
    room.generate(tokens, name)
    room.run()
    assert not room.errors()
    return block_hashes(MODEL, 0, N_LAYERS, tokens)[1], 2


def test_beginnings_are_told_when_they_come_and_go(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, N_LAYERS), n_ctx=512, model_id=MODEL, tell_prefixes=True, n_prefixes=2)
    assert told(room) == []
    first = ask(room, "1", 71)
    assert told(room) == [[first]]
    ask(room, "again", 71)
    assert told(room) == [[first]]
    second = ask(room, "2", 72)
    assert told(room)[1:] == [[second, first]]
    third = ask(room, "3", 73)
    assert told(room)[2:] == [[third, second]]
    room.call(ipc.Unload, start=0, end=2)
    assert told(room)[3:] == [[]]


def test_nothing_is_told_unless_it_is_wanted(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, N_LAYERS), n_ctx=512, model_id=MODEL)
    ask(room, "1", 71)
    assert len(room.handlers._opened().prefixes) == 1
    assert told(room) == []


def test_what_an_origin_named_is_not_among_them() -> None:
    hashes = (bytes(32), bytes([1]) * 32)
    tokens = np.zeros(2 * BLOCK_TOKENS, np.int32)
    kept = [
        Kept("here", Name(hashes, scope="origin"), 2 * BLOCK_TOKENS, 3.0),
        Kept("here", Name(hashes), 2 * BLOCK_TOKENS, 2.0),
        Kept("here", Name((), tokens[:40], session="s"), 40, 2.0),
        Kept("here", Name(hashes[:1], tokens[:BLOCK_TOKENS]), BLOCK_TOKENS, 0.0),
        Kept("here", Name(hashes, tokens), 2 * BLOCK_TOKENS, 1.0),
    ]
    assert beginnings(kept) == ((hashes[1], 2), (hashes[0], 1))
