"""Prompts that begin like an earlier one: the index of what is kept, and the rows themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_workers.prefixes import TTL_S, Prefixes
from swarmllm_workers.segment import Span

from .client import GREEDY
from .test_batching import PROMPT, Room, batches, guide_prompts, open_room  # noqa: F401
from .test_exactness import GUIDE

OpenRoom = Callable[..., Room]
B = BLOCK_TOKENS
TOKENS = np.random.default_rng(1).integers(0, 250, 6 * B).astype(np.int32)


def done(room: Room, name: str) -> ipc.GenerateDone:
    (message,) = [m for m, _ in room.sent if isinstance(m, ipc.GenerateDone) and m.request_id == name]
    return message


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12), st.integers(0, 4))
def test_index_finds_the_longest_common_blocks_of_what_it_keeps(
    kept: list[tuple[int, int]], n_sequences: int
) -> None:
    """Prompts over two kinds of blocks, compared with a plain list of what was put in."""
    prefixes = Prefixes(8, n_sequences)
    held: dict[int, list[int]] = {}
    for now, (pattern, n_blocks) in enumerate(kept):
        tokens = np.repeat([(pattern >> i) & 1 for i in range(n_blocks)], B)
        new, dropped = prefixes.keep("here", tokens, float(now))
        for each in dropped:
            del held[each.sequence]
        if new is not None:
            assert new.sequence not in held
            assert 8 <= new.sequence < 8 + n_sequences
            held[new.sequence] = tokens.tolist()
    assert len(prefixes) == len(held)
    for pattern in range(4):
        prompt = [token for i in range(3) for token in [(pattern >> i) & 1] * B]
        found = prefixes.find("here", prompt, 99.0)
        best = max((common(prompt[:-1], tokens) for tokens in held.values()), default=0)
        assert (found.n_rows if found else 0) == best
        if found is not None:
            assert held[found.sequence][: found.n_rows] == prompt[: found.n_rows]
    assert prefixes.find("elsewhere", TOKENS, 99.0) is None


def common(left: list[int], right: list[int]) -> int:
    n = 0
    while left[n : n + B] == right[n : n + B] and len(left[n : n + B]) == B:
        n += B
    return n


def test_longer_prefix_takes_the_place_of_its_beginning() -> None:
    prefixes = Prefixes(0, 4)
    short, _ = prefixes.keep("here", TOKENS[: 2 * B], 0.0)
    long, dropped = prefixes.keep("here", TOKENS[: 4 * B], 1.0)
    assert dropped == [short]
    assert long is not None
    assert prefixes.keep("here", TOKENS[: 3 * B], 2.0) == (None, [])
    assert len(prefixes) == 1


def test_unused_prefixes_expire_and_the_oldest_gives_way() -> None:
    prefixes = Prefixes(0, 2)
    first, _ = prefixes.keep("here", TOKENS[:B], 0.0)
    second, _ = prefixes.keep("here", TOKENS[B : 2 * B], 1.0)
    prefixes.find("here", TOKENS[: B + 1], 2.0)
    _, dropped = prefixes.keep("here", TOKENS[2 * B : 3 * B], 3.0)
    assert dropped == [second]
    assert first is not None
    assert [kept.sequence for kept in prefixes.expired(2.5 + TTL_S)] == [first.sequence]
    assert len(prefixes) == 1


def test_same_prompt_again_runs_only_what_follows_its_last_whole_block(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
) -> None:
    room = open_room("llama", (0, 4), n_ctx=1024)
    prompt = TOKENS[: 2 * B]
    room.generate(prompt, "first")
    room.run()
    batches.clear()
    room.generate(prompt, "again")
    room.run()
    # The last token is run again for its logits, and a block is shared whole or not at all.
    assert batches[0] == [B]
    assert done(room, "first").n_cached_tokens == 0
    assert done(room, "again").n_cached_tokens == B
    assert done(room, "again").n_prompt_tokens == 2 * B


@pytest.mark.slow
def test_text_after_a_reused_prefix_is_that_of_a_fresh_worker(open_room: OpenRoom) -> None:  # noqa: F811
    """A second turn that begins with the whole first one."""
    room = open_room(GUIDE, (0, 12), n_ctx=1024)
    fresh = open_room(GUIDE, (0, 12), n_ctx=1024, n_prefixes=0)
    prompt = guide_prompts(room)[0]
    room.generate(prompt, "one", ipc.Sampling(temperature=0.0, max_tokens=80, ignore_eos=True))
    room.run()
    second = np.concatenate([prompt, room.tokens("one"), guide_prompts(room)[1]]).astype(np.int32)
    for each in (room, fresh):
        each.generate(second, "two", ipc.Sampling(temperature=0.0, max_tokens=24))
        each.run()
    assert done(room, "two").n_cached_tokens >= B
    assert done(fresh, "two").n_cached_tokens == 0
    assert room.tokens("two") == fresh.tokens("two")


@pytest.mark.slow
def test_logits_over_reused_rows_are_those_of_a_fresh_worker_bit_for_bit(open_room: OpenRoom) -> None:  # noqa: F811
    """Same chunks in the same cells. Where either differs, they agree to rounding only."""
    room, fresh = (open_room(GUIDE, (0, 12), n_ctx=1024) for _ in range(2))
    tokens = np.resize(guide_prompts(room)[0], 2 * B + 20)
    room.generate(tokens, "kept", GREEDY)
    room.run()
    results = []
    for each in (room, fresh):
        engine = each.handlers._opened()
        route, slot = engine.route("r", 0, 12), engine.take_slot("r")
        n = engine.reuse("r", route, tokens)
        if each is room:
            assert n == 2 * B
        else:
            assert n == 0
            engine.run(route, [Span(slot, 0, tokens[: 2 * B], "none")])
        results.append(engine.run(route, [Span(slot, 2 * B, tokens[2 * B :], "logits")])[0].copy())
    np.testing.assert_array_equal(results[0], results[1])


def test_kept_rows_give_way_to_requests_that_need_the_room(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=256)
    for i in range(3):
        room.generate(np.roll(TOKENS, 50 * i)[: 2 * B + 30], str(i))
        room.run()
    room.generate(TOKENS[-180:], "large")
    data = TOKENS[:30]
    room.call(ipc.Forward, data, request_id="f", start=0, end=4, position=0, want="none")
    room.run()
    assert not room.errors()


def test_kept_rows_go_when_layers_are_unloaded_or_cut(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=1024)
    prompt = TOKENS[: 2 * B]
    room.generate(prompt, "first")
    room.run()
    rows = np.zeros((2, 64), np.float32)
    room.call(ipc.Forward, rows, request_id="f", start=1, end=3, position=0, want="hidden")
    room.run()
    engine = room.handlers._opened()
    assert len(engine.segments) == 3
    assert sum(segment.n_rows for segment in engine.segments) == 2
    room.generate(prompt, "again")
    room.run()
    assert done(room, "again").n_cached_tokens == 0
    room.generate(prompt, "through segments")
    room.run()
    assert done(room, "through segments").n_cached_tokens == B
    room.call(ipc.Unload, start=0, end=1)
    room.call(ipc.Load, start=0, end=1)
    room.generate(prompt, "reloaded")
    room.run()
    assert done(room, "reloaded").n_cached_tokens == 0
    assert not room.errors()


def test_nothing_is_kept_where_it_is_turned_off(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=1024, n_prefixes=0)
    for name in ("first", "again"):
        room.generate(np.resize(PROMPT, 3 * B), name)
        room.run()
    assert done(room, "again").n_cached_tokens == 0
    assert all(segment.n_rows == 0 for segment in room.handlers._opened().segments)
