"""What a node computes for others: rates, totals, and what is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B

from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.stage.served import FORGET_S, SERVED_MAX, WINDOW_S, ServedBook
from swarmllm_proto.identifiers import ModelId, NodeId

GUIDE, OTHER = ModelId("ab" * 32), ModelId("cd" * 32)
LAYERS = (LayerRange(4, 6), LayerRange(6, 8))


def test_it_says_what_for_whom_and_how_fast() -> None:
    book = ServedBook()
    book.began(GUIDE, A, LAYERS, 100.0)
    book.began(OTHER, B, LAYERS[:1], 100.0)
    for tenth in range(100):
        book.computed(GUIDE, A, 2, 100 + tenth / 10)
    first, second = book.view({(GUIDE, A): 1}, 110.0)
    assert (first.model_id, first.origin, first.layers) == (GUIDE, A, (LayerRange(4, 8),))
    assert (first.n_active, first.n_requests, first.n_tokens) == (1, 1, 200)
    assert first.tokens_per_s == pytest.approx(20)
    assert (second.origin, second.n_active, second.tokens_per_s) == (B, 0, 0)
    assert book.view({}, 110.0 + WINDOW_S + 1)[0].tokens_per_s == 0
    assert book.totals == {GUIDE: 200}


def test_what_is_over_is_forgotten_and_what_runs_is_not() -> None:
    book = ServedBook()
    book.began(GUIDE, A, LAYERS, 0.0)
    book.began(GUIDE, B, LAYERS, 0.0)
    book.computed(GUIDE, B, 3, 0.0)
    assert len(book.view({}, FORGET_S - 1)) == 2
    assert [each.origin for each in book.view({(GUIDE, A): 1}, FORGET_S)] == [A]
    assert book.totals == {GUIDE: 3}


def test_a_token_of_a_request_that_was_forgotten_counts() -> None:
    book = ServedBook()
    book.computed(GUIDE, A, 1, 0.0)
    assert [(each.origin, each.n_tokens) for each in book.view({}, 1.0)] == [(A, 1)]


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9), st.floats(0, 30)), max_size=300))
def test_the_book_is_bounded_and_the_totals_are_exact(events: list[tuple[int, int, float]]) -> None:
    book, now_s = ServedBook(), 0.0
    for origin, n_tokens, passed_s in events:
        now_s += passed_s
        book.began(GUIDE, NodeId(f"node {origin}"), LAYERS, now_s)
        book.computed(GUIDE, NodeId(f"node {origin}"), n_tokens, now_s)
    view = book.view({}, now_s)
    assert len(view) <= SERVED_MAX
    assert sum(book.totals.values()) == sum(n_tokens for _, n_tokens, _ in events)
    assert all(0 <= each.tokens_per_s <= each.n_tokens for each in view)
