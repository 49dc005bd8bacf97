"""A worker tells what it keeps, where that is wanted, and when it changes."""

from __future__ import annotations

import numpy as np
from block_names import block_hashes

from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.ipc.kv import split_names
from swarmllm_workers.cache.manifest import MANIFEST_MAX, beginnings
from swarmllm_workers.cache.prefixes import Kept, Name, Prefixes, PrefixSettings, token_name

from .test_batching import OpenRoom, Room, open_room  # noqa: F401

MODEL = "ab" * 32
N_LAYERS = 4


def entries(said: list[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """Without their shorter beginnings."""
    return [each for each in said if each[1] == 2]


def told(room: Room) -> list[list[tuple[bytes, int]]]:
    room.handlers.pause_ms()
    return [
        entries(list(zip(split_names(payload), message.n_blocks, strict=True)))
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
    assert len(room.handlers.state.engine().prefixes) == 1
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


def test_shorter_beginnings_come_after_all_entries_the_coarse_ones_first() -> None:
    tokens = np.arange(7 * BLOCK_TOKENS, dtype=np.int32)
    name = token_name(bytes(32), tokens)
    other = token_name(bytes(32), tokens[::-1][: 2 * BLOCK_TOKENS].copy())
    kept = [Kept("here", name, len(tokens), 2.0), Kept("here", other, 2 * BLOCK_TOKENS, 1.0)]
    said = beginnings(kept)
    assert [n for _, n in said] == [7, 2, 4, 2, 6, 1, 3, 5, 1]
    assert said[2] == (name.hashes[3], 4)


def test_no_more_is_told_than_a_node_may_announce() -> None:
    kept = []
    for i in range(9):
        tokens = np.full(20 * BLOCK_TOKENS, i, np.int32)
        kept.append(Kept("here", token_name(bytes(32), tokens), len(tokens), float(i)))
    said = beginnings(kept)
    assert len(said) == len(set(said)) == MANIFEST_MAX
    assert [n for _, n in said[:9]] == [20] * 9


def test_what_came_from_another_node_is_told_once_it_was_checked() -> None:
    tokens = np.arange(BLOCK_TOKENS, dtype=np.int32)
    name = token_name(bytes(32), tokens)
    kept = Kept("here", name, BLOCK_TOKENS, 1.0, unchecked=name.hashes[-1])
    assert beginnings([kept]) == ()
    kept.unchecked = b""
    assert beginnings([kept]) == ((name.hashes[0], 1),)


def test_what_is_to_be_checked_is_found_in_its_own_segments_only() -> None:
    tokens = np.arange(BLOCK_TOKENS, dtype=np.int32)
    name = token_name(bytes(32), tokens)
    prefixes = Prefixes(0, PrefixSettings(n_entries=1))
    kept = Kept("here", name, BLOCK_TOKENS, 1.0, unchecked=name.hashes[-1])
    prefixes.add(kept)
    assert prefixes.unchecked("here", name) is kept
    assert prefixes.unchecked("elsewhere", name) is None
    assert prefixes.unchecked("here", Name(())) is None
