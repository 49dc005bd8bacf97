"""What stages have said of their rows is kept by stretch, and where two neighbours differ it is told."""

from __future__ import annotations

from typing import Any

import pytest

from swarmllm.pipeline.check.ledger import Disagreement, InvalidCommitment, Ledger, spans
from swarmllm.pipeline.check.verdict_recorder import CERTAIN, NODES_MAX, Contradictions
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.row_commitments import RowsCommitment

LIAR, V, W, X, Y = (node_id_named(name) for name in ("liar", "v", "w", "x", "y"))


def of(stage: int, position: int = 0, n_rows: int = 64, **said: Any) -> RowsCommitment:
    n_bytes = 32 * -(-n_rows // 32)
    made = {side: bytes([byte]) * n_bytes for side, byte in said.items()}
    return RowsCommitment(
        request_id="r", stage=stage, position=position, n_rows=n_rows, signature=bytes(64), **made
    )


def test_two_who_say_the_same_agree() -> None:
    ledger = Ledger(3, 200)
    assert ledger.add(of(0, sent=1)) == []
    assert not ledger.is_agreed(0, 0, 64)
    assert ledger.add(of(1, received=1, sent=2)) == []
    assert ledger.is_agreed(0, 0, 64)
    assert not ledger.is_agreed(0, 0, 96)
    assert ledger.said(1, "sent", 32, 32) == bytes([2]) * 32
    assert ledger.said(1, "sent", 32, 31) is None
    assert ledger.said(1, "sent", 64, 32) is None
    assert ledger.has_of(1)
    assert not ledger.has_of(2)


@pytest.mark.parametrize("first", [0, 1])
def test_each_stretch_in_which_they_differ_is_told_once(first: int) -> None:
    ledger = Ledger(3, 200)
    said = [of(0, sent=1), of(1, received=3, sent=2)]
    assert ledger.add(said[first]) == []
    assert ledger.add(said[1 - first]) == [Disagreement(0, 0, 32), Disagreement(0, 32, 32)]
    assert ledger.add(said[first]) == []
    assert not ledger.is_agreed(0, 0, 64)


def test_last_stretches_that_end_at_different_rows_are_not_compared() -> None:
    ledger = Ledger(2, 200)
    ledger.add(of(0, n_rows=40, sent=1))
    assert ledger.add(of(1, n_rows=41, received=2)) == [Disagreement(0, 0, 32)]
    assert ledger.stretch_with(0, 39) == (32, (8, bytes([1]) * 32))
    assert ledger.stretch_with(0, 40) is None
    assert ledger.stretch_with(1, 0) is None


def test_rows_that_came_again_after_damage_are_left_out() -> None:
    ledger = Ledger(2, 200)
    ledger.add(of(0, n_rows=96, sent=1))
    ledger.repeated(40, 64)
    assert [ledger.is_doubtful(position) for position in (0, 32, 64)] == [False, True, False]
    assert ledger.add(of(0, position=32, n_rows=32, sent=5)) == []
    found = ledger.add(of(1, n_rows=96, received=2))
    assert [each.position for each in found] == [0, 64]
    assert ledger.said(0, "sent", 32, 32) is None


@pytest.mark.parametrize(
    "said",
    [
        of(3, sent=1),
        of(2, sent=1, received=1),
        of(1, received=1),
        of(0, sent=1, received=1),
        of(0, position=160, n_rows=41, sent=1),
        of(0, n_rows=32, sent=2),
    ],
    ids=["no such stage", "the last one sends", "no rows sent", "the first one got", "too far", "otherwise"],
)
def test_what_no_honest_stage_says_is_refused(said: RowsCommitment) -> None:
    ledger = Ledger(3, 200)
    ledger.add(of(0, sent=1))
    with pytest.raises(InvalidCommitment):
        ledger.add(said)
    assert ledger.said(0, "sent", 0, 32) == bytes([1]) * 32


def test_rows_are_stretches_and_a_rest() -> None:
    assert list(spans(32, 70)) == [(32, 32), (64, 32), (96, 6)]


def earned(node_id: NodeId) -> bool:
    return True


def test_who_is_contradicted_by_several_who_are_not_is_the_liar() -> None:
    book = Contradictions()
    others = (V, W, X)
    assert len(others) == CERTAIN
    assert [book.add(LIAR, each, earned) for each in others] == [None, None, LIAR]
    assert [book.add(each, LIAR, earned) for each in others] == [None, None, LIAR], "it begins anew"


def test_the_same_neighbour_counts_once() -> None:
    book = Contradictions()
    assert not any(book.add(LIAR, V, earned) for _ in range(10))


def test_who_was_contradicted_by_others_too_does_not_count() -> None:
    book = Contradictions()
    book.add(V, Y, earned)
    assert [book.add(LIAR, each, earned) for each in (V, W, X)] == [None, None, None]
    assert book.add(LIAR, node_id_named("z"), earned) == LIAR


def test_strangers_do_not_count() -> None:
    book = Contradictions()
    liars = [node_id_named(f"new {n}") for n in range(20)]
    assert not any(book.add(V, each, lambda node_id: node_id == V) for each in liars)


def test_so_many_nodes_are_remembered() -> None:
    book = Contradictions()
    for n in range(NODES_MAX + 50):
        book.add(LIAR, node_id_named(f"n{n}"), lambda node_id: False)
    assert len(book._by) == NODES_MAX
