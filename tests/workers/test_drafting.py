"""Guesses from the text itself, the layers to leave out, and whether it pays: pure cores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm_workers.engine.ranges import plan
from swarmllm_workers.speculation.cost_gate import (
    PAUSE_AFTER_RIGHT,
    PAUSE_MAX,
    PAUSE_MIN,
    VAIN_MAX,
    CostGate,
)
from swarmllm_workers.speculation.drafting import NgramLookup


def lookup(tokens: list[int], size_max: int = 4, n_max: int = 6) -> tuple[tuple[int, ...], str] | None:
    draft = NgramLookup(size_max, 10).draft(np.array(tokens, np.int32), lambda _kind, _start_s: n_max)
    return None if draft is None else (draft.tokens, draft.kind)


def test_what_followed_the_last_tokens_before_is_the_guess() -> None:
    assert lookup([1, 2, 3, 9, 8, 7, 1, 2, 3]) == ((9, 8, 7, 1, 2, 3), "ngram-3")


def test_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    assert lookup([5, 1, 2, 10, 6, 1, 2, 11, 5, 1, 2]) == ((10, 6, 1, 2, 11, 5), "ngram-3")
    assert lookup([7, 1, 2, 10, 7, 8, 1, 2, 11, 9, 1, 2], n_max=1) == ((11,), "ngram-2")


def test_repetition_is_continued_beyond_the_text() -> None:
    assert lookup([1, 2, 3, 1, 2, 3, 1, 2]) == ((3, 1, 2, 3, 1, 2), "ngram-4")


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4, 5]])
def test_text_without_repetition_gives_nothing(tokens: list[int]) -> None:
    assert lookup(tokens) is None


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 5), max_size=20))
@settings(max_examples=150)
def test_lookup_agrees_with_searching_the_text(tokens: list[int], pieces: list[int]) -> None:
    """However the text arrives."""
    ngrams = NgramLookup(4, 10)
    at = 0
    for piece in [*pieces, len(tokens)]:
        at = min(at + piece, len(tokens))
        draft = ngrams.draft(np.array(tokens[:at], np.int32), lambda _kind, _start_s: 3)
    expected = None
    for size in (4, 3, 2):
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
        if ends:
            expected = ends[-1], size
            break
    if expected is None:
        assert draft is None
    else:
        assert draft is not None
        end, size = expected
        known = tokens[end : end + 3]
        assert draft.kind == f"ngram-{size}"
        assert list(draft.tokens[: len(known)]) == known


@given(st.integers(1, 100), st.integers(1, 8), st.floats(0, 0.9))
def test_layers_are_covered_once_and_the_first_and_last_are_kept(
    n: int, alignment: int, ratio: float
) -> None:
    pieces, skipped = plan(n, alignment, ratio)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    assert all(start % alignment == 0 for start, _ in pieces)
    assert skipped <= set(pieces)
    assert pieces[0] not in skipped
    assert pieces[-1] not in skipped
    n_skipped = sum(end - start for start, end in skipped)
    assert n_skipped <= ratio * n + alignment
    if alignment == 1 and n >= 10:
        assert abs(n_skipped - ratio * n) <= 3


def run(cost_gate: CostGate, rate: float, row_cost: float, n_steps: int = 400) -> float:
    """Tokens per second of a request whose guesses are right at `rate`, in units of a plain step's."""
    rng = random.Random(1)
    tokens, seconds = 0, 0.0
    for _ in range(n_steps):
        n = cost_gate.n_worth("kind", 6)
        n_right = 0
        while n_right < n and rng.random() < rate:
            n_right += 1
        cost = 1.0 + row_cost * n
        cost_gate.judged("kind", n, n_right, cost)
        tokens += n_right + 1
        seconds += cost
    return tokens / seconds


def test_pays_where_rows_are_cheap_and_guesses_right() -> None:
    assert run(CostGate(), rate=0.9, row_cost=0.1) > 2.5


@pytest.mark.parametrize(("rate", "row_cost"), [(0.05, 0.3), (0.95, 1.1), (0.3, 0.6)])
def test_gives_up_where_it_does_not_pay(rate: float, row_cost: float) -> None:
    assert run(CostGate(), rate, row_cost) > 0.95


@given(st.floats(0, 1), st.floats(0.02, 3), st.integers(0, 5), st.sampled_from(["ngram-2", "model", "swift"]))
@settings(max_examples=40)
def test_whatever_the_text_trying_costs_a_hundredth_at_most(
    rate: float, row_cost: float, seed: int, kind: str
) -> None:
    """And two steps, once per model. Text that changes its nature is the worst case."""
    rng, cost_gate, n_steps = random.Random(seed), CostGate(), 1500
    tokens, seconds = 0, 0.0
    for step in range(n_steps):
        n = cost_gate.n_worth(kind, 6, 100)
        n_right = 0
        while n_right < n and rng.random() < (rate if step // 250 % 2 else 0.0):
            n_right += 1
        cost_gate.judged(kind, n, n_right, 1.0 + row_cost * n)
        tokens += n_right + 1
        seconds += 1.0 + row_cost * n
    assert seconds <= tokens * 1.01 + 2 + 6 * row_cost


def test_a_start_that_takes_long_is_made_where_enough_is_left_to_gain() -> None:
    cost_gate = CostGate()
    run(cost_gate, rate=0.9, row_cost=0.1)
    later = cost_gate.successor()
    later.spare_steps = 0.0
    assert later.n_worth("kind", 4, n_left=500, start_s=50.0) > 0
    assert later.n_worth("kind", 4, n_left=20, start_s=50.0) == 0


def test_a_step_that_was_held_up_says_little() -> None:
    cost_gate = CostGate()
    run(cost_gate, rate=0.9, row_cost=0.1)
    assert cost_gate.n_worth("kind", 6) == 6
    cost_gate.judged("kind", 6, 6, 1000.0)
    cost_gate.judged("kind", 0, 0, 1000.0)
    assert cost_gate.n_worth("kind", 6) > 0
    assert cost_gate.plain_s < 2


def test_a_number_of_guesses_that_was_slow_once_is_tried_again() -> None:
    """More of them were quicker since."""
    cost_gate = CostGate()
    cost_gate.measured("kind", 1.0, 6, 2.0)
    for _ in range(9):
        cost_gate.judged("kind", 3, 3, 50.0)
    for _ in range(30):
        cost_gate.judged("kind", 6, 6, 2.0)
    assert cost_gate.n_worth("kind", 3) == 3


def test_comes_back_when_the_text_changes() -> None:
    cost_gate = CostGate()
    run(cost_gate, rate=0.0, row_cost=0.2)
    assert run(cost_gate, rate=0.95, row_cost=0.2, n_steps=2000) > 1.8


def depths(cost_gate: CostGate, answers: Sequence[bool], kind: str, row_cost: float) -> list[int]:
    """Guesses behind each token. `answers`: whether a guess at that token is right."""
    found, at = [], 0
    while at < len(answers):
        n = cost_gate.n_worth(kind, 6, len(answers) - at)
        right = answers[at : at + n]
        n_right = right.index(False) if False in right else len(right)
        cost_gate.judged(kind, n, n_right, 1.0 + row_cost * n)
        found += [n, *[0] * n_right]
        at += n_right + 1
    return found


KINDS = st.sampled_from(["ngram-2", "ngram-4", "ngram-again", "model", "swift"])


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]), max_size=6),
    st.floats(0, 2),
    KINDS,
    st.integers(0, 9),
)
@settings(max_examples=200)
def test_after_eight_refusals_in_a_row_nothing_is_guessed_but_a_single_token_now_and_then(
    rates: list[float], row_cost: float, kind: str, seed: int
) -> None:
    """Whatever the text: passages of 60 tokens, each with guesses right at its own rate."""
    rng, cost_gate = random.Random(seed), CostGate()
    n_refused, n_since, was_right = 0, 0, False
    for rate in rates:
        for _ in range(60):
            n = cost_gate.n_worth(kind, 6, 100)
            n_right = 0
            while n_right < n and rng.random() < rate:
                n_right += 1
            cost_gate.judged(kind, n, n_right, 1.0 + row_cost * n)
            if n and n_refused >= VAIN_MAX:
                n_pause = min(PAUSE_MIN << (n_refused - VAIN_MAX), PAUSE_MAX)
                assert n == 1
                assert n_since >= (PAUSE_AFTER_RIGHT if was_right else n_pause)
            n_since = n_since + 1 if not n else 0
            n_refused = 0 if n_right else n_refused + (n > 0)
            was_right |= n_right > 0


@pytest.mark.parametrize("row_cost", [0.0, 0.02, 0.15, 1.0])
@pytest.mark.parametrize("kind", ["ngram-2", "ngram-again", "model", "swift"])
def test_guesses_that_are_always_wrong_end_within_eight(kind: str, row_cost: float) -> None:
    found = depths(CostGate(), [False] * 400, kind, row_cost)
    tried = [at for at, n in enumerate(found) if n]
    if row_cost <= 0.02:
        assert tried[:8] == [*range(1, 9)], "a step without guesses comes first"
    assert all(later - earlier > PAUSE_MIN for earlier, later in pairwise(tried[7:]))
    assert len(tried) <= 8 + 2 + 400 / PAUSE_MAX


@pytest.mark.parametrize("n_wrong", [9, 20, 50, 200, 390])
@pytest.mark.parametrize("was_right", [False, True])
def test_guesses_come_back_when_they_are_right_again(n_wrong: int, was_right: bool) -> None:
    answers = [True] * 20 * was_right + [False] * n_wrong + [True] * 80
    found = depths(CostGate(), answers, "model", 0.02)[-80:]
    first = next(at for at, n in enumerate(found) if n)
    assert first <= (PAUSE_AFTER_RIGHT if was_right else PAUSE_MAX) + 1
    assert max(found[first : first + 20]) > 1
    assert max(found[first:]) == 6


def test_guesses_that_are_right_too_seldom_to_pay_end_nearly_as_soon() -> None:
    """A fifth of them, where a guess takes three tenths of a step: the first one that is right could be the
    first of many."""
    found = depths(CostGate(), [False, False, False, False, True] * 80, "model", 0.3)
    assert sum(n > 0 for n in found[:40]) <= 2 * VAIN_MAX
    assert sum(n > 0 for n in found) < 40


def test_the_next_request_tries_half_as_often_what_was_given_up() -> None:
    first = CostGate()
    depths(first, [False] * 60, "model", 0.01)
    later = first.successor()
    found = depths(later, [False] * 30, "model", 0.01)
    assert [at for at, n in enumerate(found) if n] == [0, 1, 2, 3, 12, 29]
    assert later.n_worth("ngram-2", 6, 100), "another way of guessing has its own tries"
    for _ in range(PAUSE_MAX // 7 + 1):
        assert not later.n_worth("model", 6, 100)
        later.judged("ngram-2", 6, 6, 1.1)
    assert later.n_worth("model", 6, 100), "it paused for as many tokens, in a few steps"


def test_what_is_given_up_sends_nothing_ahead() -> None:
    gate = CostGate()
    depths(gate, [True] * 60, "model", 0.01)
    assert gate.n_ahead("model", 7) > 6
    depths(gate, [False] * 8, "model", 0.01)
    assert gate.n_ahead("model", 7) == 0


def test_first_step_is_without_guesses() -> None:
    assert CostGate().n_worth("kind", 6) == 0


def test_what_steps_take_is_handed_on_and_how_often_guesses_are_right_is_not() -> None:
    """On a machine where guesses never pay, a later request wastes next to nothing on finding out."""
    cost_gate = CostGate()
    run(cost_gate, rate=0.9, row_cost=0.9, n_steps=300)
    later = cost_gate.successor()
    assert run(later, rate=0.9, row_cost=0.9, n_steps=100) > 0.94
    assert run(CostGate(), rate=0.0, row_cost=0.2) > 0.9
    paying = CostGate()
    run(paying, rate=0.0, row_cost=0.1)
    assert run(paying.successor(), rate=0.95, row_cost=0.1, n_steps=100) > 3
