"""The index of prompts whose rows are kept: what is found, replaced, and dropped first."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.blocks import BLOCK_TOKENS, root_hash
from swarmllm_workers.cache.prefixes import Kept, Name, Prefixes, PrefixSettings, token_name

B = BLOCK_TOKENS
TOKENS = np.random.default_rng(1).integers(0, 250, 6 * B).astype(np.int32)


def named(tokens: np.ndarray, session: str = "") -> Name:
    return token_name(root_hash("0" * 64, 0, 1), tokens, session)


def index(n: int, **settings: Any) -> Prefixes:
    return Prefixes(8, PrefixSettings(n_cells_entries=n, n_entries=settings.pop("n_entries", n), **settings))


def put(prefixes: Prefixes, tokens: np.ndarray, now: float, session: str = "") -> list[Kept]:
    """As `PrefixCache.keep` does; what was dropped."""
    name = named(tokens, session)
    n_rows = len(tokens) if session else len(name.hashes) * B
    if not n_rows or prefixes.is_known("here", name, now):
        return []
    dropped = prefixes.replaced_by("here", name)
    if not prefixes.has_free_sequence:
        oldest = prefixes.least_wanted(in_cells=True)
        if oldest is None:
            return []
        dropped += prefixes.drop(oldest)
    return dropped + prefixes.add(Kept("here", name, n_rows, now, prefixes.take_sequence()))


def found(prefixes: Prefixes, tokens: np.ndarray, now: float = 99.0, session: str = "") -> int:
    """Rows that a prompt would get."""
    hit = prefixes.find("here", named(tokens[:-1], session), len(tokens) - 1, now)
    return hit[1] if hit else 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12), st.integers(0, 4))
def test_index_finds_the_longest_common_blocks_of_what_it_keeps(
    kept: list[tuple[int, int]], n_sequences: int
) -> None:
    """Prompts over two kinds of blocks, compared with a plain list of what was put in."""
    prefixes = index(n_sequences)
    held: dict[int, list[int]] = {}
    for now, (pattern, n_blocks) in enumerate(kept):
        tokens = np.repeat([(pattern >> i) & 1 for i in range(n_blocks)], B)
        for each in put(prefixes, tokens, float(now)):
            assert each.sequence is not None
            del held[each.sequence]
        for each in prefixes:
            assert each.sequence is not None
            assert 8 <= each.sequence < 8 + n_sequences
            held.setdefault(each.sequence, tokens.tolist())
    assert len(prefixes) == len(held) <= n_sequences
    for pattern in range(4):
        prompt = np.array([token for i in range(3) for token in [(pattern >> i) & 1] * B])
        best = max((common(prompt[:-1].tolist(), tokens) for tokens in held.values()), default=0)
        assert found(prefixes, prompt) == best
    assert prefixes.find("elsewhere", named(TOKENS), 9 * B, 99.0) is None


def common(left: list[int], right: list[int]) -> int:
    n = 0
    while left[n : n + B] == right[n : n + B] and len(left[n : n + B]) == B:
        n += B
    return n


def test_longer_prefix_takes_the_place_of_its_beginning() -> None:
    prefixes = index(4)
    put(prefixes, TOKENS[: 2 * B], 0.0)
    (dropped,) = put(prefixes, TOKENS[: 4 * B], 1.0)
    assert dropped.n_rows == 2 * B
    assert put(prefixes, TOKENS[: 3 * B], 2.0) == []
    assert [kept.n_rows for kept in prefixes] == [4 * B]


def test_unused_prefixes_expire_sessions_by_a_clock_of_their_own() -> None:
    prefixes = index(4, ttl_s=10.0, session_ttl_s=100.0)
    put(prefixes, TOKENS[:B], 0.0)
    put(prefixes, TOKENS[B : 2 * B], 1.0)
    put(prefixes, TOKENS[2 * B : 3 * B], 2.0, "talk")
    assert found(prefixes, TOKENS[: B + 1], 8.0) == B
    assert prefixes.next_expiry() == 11.0
    assert [kept.used_at for kept in prefixes.expired(12.0)] == [1.0]
    assert [kept.used_at for kept in prefixes.expired(20.0)] == [8.0]
    assert prefixes.next_expiry() == 102.0
    assert len(prefixes.expired(103.0)) == 1


def test_sessions_are_the_last_to_give_way() -> None:
    prefixes = index(2)
    put(prefixes, TOKENS[:B], 0.0, "talk")
    put(prefixes, TOKENS[B : 2 * B], 5.0)
    (dropped,) = put(prefixes, TOKENS[2 * B : 3 * B], 6.0)
    assert dropped.used_at == 5.0
    put(prefixes, TOKENS[3 * B : 4 * B], 7.0, "other talk")
    (dropped,) = put(prefixes, TOKENS[4 * B : 5 * B], 8.0, "third talk")
    assert dropped.name.session == "talk"


def test_a_session_goes_on_from_its_last_row_and_holds_one_turn() -> None:
    prefixes = index(4)
    put(prefixes, TOKENS[: B + 20], 0.0, "talk")
    assert found(prefixes, TOKENS[: 3 * B], session="talk") == B + 20
    assert found(prefixes, TOKENS[: B + 20], session="talk") == B + 19
    assert found(prefixes, TOKENS[: 3 * B]) == B
    assert found(prefixes, TOKENS[: 3 * B], session="another") == B
    (dropped,) = put(prefixes, TOKENS[: B + 50], 1.0, "talk")
    assert dropped.n_rows == B + 20
    put(prefixes, TOKENS[2 * B : 3 * B], 2.0, "talk")
    assert [kept.n_rows for kept in prefixes] == [B]


def test_too_little_in_common_is_not_shared() -> None:
    prefixes = index(4, min_tokens=2 * B)
    put(prefixes, TOKENS[: 3 * B], 0.0)
    assert found(prefixes, TOKENS[: 2 * B]) == 0
    assert found(prefixes, TOKENS[: 2 * B + 1]) == 2 * B


def test_host_memory_has_a_budget_and_the_oldest_pays() -> None:
    prefixes = index(1, n_entries=3, max_bytes=250)
    for i in range(4):
        put(prefixes, TOKENS[i * B : (i + 1) * B], float(i))
        (newest,) = [kept for kept in prefixes if kept.sequence is not None]
        dropped = prefixes.swap_out(newest, (b"x" * 60, b"y" * 40), 0)
        assert [kept.used_at for kept in dropped] == ([i - 2.0] if i >= 2 else [])
    assert prefixes.n_bytes == 200
    assert prefixes.fits(250)
    assert not prefixes.fits(251)
    assert [found(prefixes, TOKENS[i * B : (i + 1) * B + 1]) for i in range(4)] == [0, 0, B, B]


def test_rows_of_a_window_are_used_to_their_end_or_not_at_all() -> None:
    prefixes = index(1, max_bytes=100)
    put(prefixes, TOKENS[: 3 * B], 0.0)
    (kept,) = prefixes
    assert prefixes.swap_out(kept, (b"x",), 3 * B) == []
    assert found(prefixes, TOKENS[: 3 * B]) == 0
    assert found(prefixes, TOKENS[: 3 * B + 1]) == 3 * B
    assert not prefixes.is_known("here", named(TOKENS[: 2 * B]), 1.0)
