"""Which chunks a stage takes after damage, and how far it says to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.pipeline.stage.session_queue import ReceivedRows

CHUNK = 4


def received(*positions: int, stage: int = 0, n_stages: int = 2) -> ReceivedRows:
    rows = ReceivedRows(n_stages)
    for position in positions:
        rows.add(stage, position, CHUNK)
    return rows


def test_without_damage_a_gap_is_not_passed_over_in_silence() -> None:
    """A worker is to find it: a stage before this one has left rows out."""
    assert not received(0).is_behind_damage(0, 2 * CHUNK)


@pytest.mark.parametrize(("position", "is_behind"), [(0, False), (CHUNK, False), (2 * CHUNK, True)])
def test_after_damage_only_what_lies_ahead_of_the_next_rows_comes_again(
    position: int, is_behind: bool
) -> None:
    rows = received(0)
    assert rows.damaged(CHUNK)
    assert rows.is_behind_damage(0, position) is is_behind


def test_the_damaged_chunk_itself_is_taken_wherever_it_lies() -> None:
    rows = received(0)
    assert rows.damaged(2 * CHUNK)
    assert not rows.is_behind_damage(0, 2 * CHUNK)
    assert rows.is_behind_damage(0, 3 * CHUNK)


def test_stages_of_one_node_are_told_apart() -> None:
    rows = received(0, CHUNK, stage=1)
    assert rows.damaged(0)
    assert rows.is_behind_damage(0, 2 * CHUNK)
    assert not rows.is_behind_damage(1, 2 * CHUNK)


def test_of_damage_behind_damage_the_origin_is_not_told_twice() -> None:
    rows = received()
    assert [rows.damaged(position) for position in (CHUNK, 2 * CHUNK, CHUNK, 0)] == [True, False, True, True]


@pytest.mark.parametrize(("position", "is_pending"), [(0, False), (CHUNK, False), (2 * CHUNK, True)])
def test_damage_is_over_once_its_rows_or_earlier_ones_have_come(position: int, is_pending: bool) -> None:
    rows = received()
    assert rows.damaged(CHUNK)
    rows.add(0, position, CHUNK)
    assert rows.damaged(3 * CHUNK) is not is_pending


def test_a_token_that_the_origin_has_repeated_ends_its_damage() -> None:
    rows = received(0)
    assert rows.damaged(CHUNK)
    rows.repeated()
    assert rows.damaged(2 * CHUNK)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(1, 5))))
def test_as_far_as_any_row_has_come(chunks: list[tuple[int, int, int]]) -> None:
    rows = ReceivedRows(2)
    for stage, position, n_tokens in chunks:
        rows.add(stage, position, n_tokens)
    assert rows.n_rows == max((position + n for _, position, n in chunks), default=0)
