"""Guesses that are not sent show when guesses pay again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm_workers.speculation.cost_gate import (
    PAUSE_AFTER_RIGHT,
    PRIOR_RATES,
    PRIOR_WEIGHT,
    RATE_DECAY,
    VAIN_MAX,
    CostGate,
)
from swarmllm_workers.speculation.drafting import Draft, NgramLookup, Worth
from swarmllm_workers.speculation.speculation import Guesser
from swarmllm_workers.speculation.unsent_guesses import UnsentGuesses

KIND = "ngram-2"


class Says:
    """Always guesses the same token."""

    def __init__(self, token: int, kind: str = KIND, *, is_free: bool = True) -> None:
        self.token, self.kind, self.is_free = token, kind, is_free
        self.n_asked: list[int] = []

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        n = worth(self.kind, 0.0)
        self.n_asked.append(n)
        return Draft((self.token,) * n, self.kind) if n else None

    def close(self) -> None:
        pass


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_what_would_have_been_guessed_is_compared_with_the_token_that_came() -> None:
    saw: list[tuple[str, bool]] = []
    unsent = UnsentGuesses(lambda kind, is_right: saw.append((kind, is_right)))
    drafters = [Says(7, "a"), Says(8, "b"), Says(9, "c", is_free=False)]
    assert unsent.draft(drafters, text(1, 2), lambda kind, once_s: 0) is None
    assert [each.n_asked for each in drafters] == [[1], [1], [0]]
    unsent.compare(text(1, 2))
    assert saw == []
    unsent.compare(text(1, 2, 8, 7))
    unsent.compare(text(1, 2, 8, 7, 7))
    assert saw == [("a", False), ("b", True)]


def test_the_first_draft_that_is_worth_it_is_sent() -> None:
    saw: list[tuple[str, bool]] = []
    unsent = UnsentGuesses(lambda kind, is_right: saw.append((kind, is_right)))
    drafters = [Says(7, "a"), Says(8, "b", is_free=False), Says(9, "c")]
    draft = unsent.draft(drafters, text(1), lambda kind, once_s: 3 * (kind == "b"))
    assert draft == Draft((8, 8, 8), "b")
    assert drafters[2].n_asked == []
    unsent.compare(text(1, 7))
    assert saw == [("a", True)]


def depths(gate: CostGate, answers: Sequence[bool], row_cost: float, *, is_seen: bool = True) -> list[int]:
    """Guesses behind each token. `answers`: whether a guess at that token is right; `is_seen`: also where it
    is not sent."""
    found, at = [], 0
    while at < len(answers):
        n = gate.n_worth(KIND, 6, len(answers) - at)
        right = answers[at : at + n]
        n_right = right.index(False) if False in right else len(right)
        gate.judged(KIND, n, n_right, 1.0 + row_cost * n)
        if not n and is_seen:
            gate.saw_unsent(KIND, answers[at])
        found += [n, *[0] * n_right]
        at += n_right + 1
    return found


def gain(answers: Sequence[bool], row_cost: float, *, is_seen: bool) -> float:
    """Times of the speed without guesses."""
    found = depths(CostGate(), answers, row_cost, is_seen=is_seen)
    seconds, at = 0.0, 0
    while at < len(answers):
        n = found[at]
        right = answers[at : at + n]
        seconds += 1.0 + row_cost * n
        at += 1 + (right.index(False) if False in right else len(right))
    return len(answers) / seconds


@pytest.mark.parametrize("row_cost", [0.0, 0.02, 0.15, 1.0])
def test_what_is_never_right_is_not_sent_again(row_cost: float) -> None:
    found = depths(CostGate(), [False] * 400, row_cost)
    tried = [at for at, n in enumerate(found) if n]
    assert len(tried) <= VAIN_MAX
    if row_cost <= 0.02:
        assert tried == [*range(1, 9)], "a step without guesses comes first"


@pytest.mark.parametrize("n_wrong", [9, 20, 50, 200, 390])
def test_guesses_come_back_behind_the_first_two_that_would_have_been_right(n_wrong: int) -> None:
    """One says too little where none was right for long."""
    found = depths(CostGate(), [True] * 20 + [False] * n_wrong + [True] * 80, 0.02)[20 + n_wrong :]
    assert found[0] == 0
    assert max(found[1:3]) > 0
    assert max(found) == 6


def test_one_that_is_right_too_seldom_to_pay_brings_nothing_back() -> None:
    gate = CostGate()
    depths(gate, [False] * 60, 0.02)
    gate.spare_steps = 4.0
    gate.saw_unsent(KIND, True)
    assert gate.n_worth(KIND, 6, 100) == 0
    gate.saw_unsent(KIND, True)
    assert gate.n_worth(KIND, 6, 100) > 0


def test_guesses_are_sent_where_unsent_ones_show_that_they_pay() -> None:
    """Nothing is left to be lost on trying."""
    gate = CostGate(plain_s=1.0, spare_steps=0.0)
    assert gate.n_worth(KIND, 6, 100) == 0
    for _ in range(8):
        gate.saw_unsent(KIND, True)
    assert gate.n_worth(KIND, 6, 100) == 0, "what they cost was never measured"
    gate.measured(KIND, 1.0, 6, 1.3)
    gate.saw_unsent(KIND, True)
    assert gate.n_worth(KIND, 6, 100) == 6


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3])
def test_texts_of_which_few_guesses_are_right_gain_more(rate: float) -> None:
    rng = random.Random(5)
    answers = [rng.random() < rate for _ in range(4000)]
    seen, unseen = gain(answers, 0.015, is_seen=True), gain(answers, 0.015, is_seen=False)
    always = 1 / (1.015 - rate)
    assert seen > 1.0 + 0.45 * (always - 1.0)
    assert seen > unseen + 0.01


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]), max_size=6), st.floats(0, 2), st.integers(0, 9))
@settings(max_examples=200)
def test_after_eight_in_vain_nothing_is_sent_until_one_would_have_been_right(
    rates: list[float], row_cost: float, seed: int
) -> None:
    rng = random.Random(seed)
    answers = [rng.random() < rate for rate in rates for _ in range(60)]
    n_vain, at = 0, 0
    found = depths(CostGate(), answers, row_cost)
    while at < len(answers):
        n = found[at]
        right = answers[at : at + n]
        n_right = right.index(False) if False in right else len(right)
        if n:
            assert n_vain < VAIN_MAX
            n_vain = 0 if n_right else n_vain + 1
        elif answers[at]:
            n_vain = 0
        at += n_right + 1


@given(st.floats(0, 1), st.floats(0.02, 3), st.integers(0, 5))
@settings(max_examples=40)
def test_whatever_the_text_trying_costs_a_hundredth_at_most(rate: float, row_cost: float, seed: int) -> None:
    """And two steps, as without unsent guesses."""
    rng = random.Random(seed)
    answers = [rng.random() < (rate if at // 250 % 2 else 0.0) for at in range(1500)]
    assert len(answers) / gain(answers, row_cost, is_seen=True) <= len(answers) * 1.01 + 2 + 6 * row_cost


def test_lookup_comes_back_behind_the_first_token_of_a_passage_that_is_known() -> None:
    """Pairs that always go on otherwise, and then a passage for the second time."""
    rng = random.Random(3)
    passage = [1000 + i for i in range(60)]
    pairs = [token for i in range(60) for token in (1, 2, 3000 + rng.randrange(1000))]
    history, gate, lookup = [*passage, *pairs], CostGate(), NgramLookup(4, 10)
    unsent, whole, sent = UnsentGuesses(gate.saw_unsent), [*passage, *pairs, *passage], list[int]()
    while len(history) < len(whole):
        known = np.array(history, np.int32)
        unsent.compare(known)
        draft = unsent.draft([lookup], known, lambda kind, once_s: gate.n_worth(kind, 6, 100))
        guesses = draft.tokens if draft else ()
        due = whole[len(history) : len(history) + len(guesses)]
        n_right = next((i for i, (a, b) in enumerate(zip(due, guesses, strict=False)) if a != b), len(due))
        gate.judged(draft.kind if draft else "", len(guesses), n_right, 1.0 + 0.02 * len(guesses))
        sent.append(len(guesses))
        history = whole[: len(history) + n_right + 1]
    assert len(sent) < 30, "60 tokens"


def test_pauses_end_where_nothing_is_seen_any_more() -> None:
    """Of a way of guessing that had nothing to say for a while, one is tried."""
    gate = CostGate()
    depths(gate, [False] * 60, 0.02)
    for _ in range(PAUSE_AFTER_RIGHT):
        assert not gate.n_worth(KIND, 6, 100)
        gate.judged(KIND, 0, 0, 1.0)
    assert gate.n_worth(KIND, 6, 100) == 1


def test_a_worker_learns_from_what_it_does_not_send() -> None:
    """Not even before its first step without guesses."""
    speculation: Any = SimpleNamespace(cost_gate=CostGate(), n_rows_exact=lambda route: 7)
    nowhere: Any = None
    guesser = Guesser(speculation, nowhere, 0, [NgramLookup(4, 10)])
    assert guesser.guess(text(1, 2, 3, 4, 1, 2), 7, 100) == ()
    assert guesser.guess(text(1, 2, 3, 4, 1, 2, 3), 7, 100) == ()
    assert guesser.guess(text(1, 2, 3, 4, 1, 2, 3, 4), 7, 100) == ()
    rate = PRIOR_RATES["ngram-2"]
    assert guesser.cost_gate._record("ngram-2").rate == pytest.approx(
        (rate * PRIOR_WEIGHT * RATE_DECAY + 1) / (PRIOR_WEIGHT * RATE_DECAY + 1)
    )
    assert guesser.cost_gate._record("ngram-3").rate > PRIOR_RATES["ngram-3"]
