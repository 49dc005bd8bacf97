"""How long routes do without a node that let pipelines fail."""

from __future__ import annotations

from node_ids import LIAR, A, B

from swarmllm.pipeline.route.suspects import (
    DOUBT_S,
    DOUBTED_MAX,
    REPEAT_S,
    REPEATS_MAX,
    Suspects,
)
from swarmllm_proto.identifiers import NodeId


def avoided_s(suspects: Suspects, now_s: float) -> float:
    """How long the liar is avoided when it is doubted now."""
    suspects.doubt([LIAR], now_s)
    steps = range(1, 2 ** (REPEATS_MAX + 2))
    return next(n * DOUBT_S for n in steps if LIAR not in suspects.now(now_s + n * DOUBT_S))


def test_each_relapse_doubles_the_time_up_to_a_bound() -> None:
    suspects, now_s, found = Suspects(), 0.0, []
    for _ in range(7):
        found.append(avoided_s(suspects, now_s))
        now_s += found[-1] + 1
    assert [each / DOUBT_S for each in found] == [1, 2, 4, 8, 16, 16, 16]


def test_doubts_at_the_same_time_are_no_relapses() -> None:
    suspects = Suspects()
    for second in range(10):
        suspects.doubt([LIAR], float(second))
    assert LIAR in suspects.now(DOUBT_S)
    assert LIAR not in suspects.now(9 + DOUBT_S)


def test_an_answer_makes_up_for_one_relapse_and_a_day_for_all() -> None:
    suspects = Suspects()
    now_s = 0.0
    for _ in range(3):
        now_s += avoided_s(suspects, now_s) + 1
    suspects.served(LIAR)
    assert avoided_s(suspects, now_s) == 4 * DOUBT_S
    assert avoided_s(suspects, now_s + 4 * DOUBT_S + REPEAT_S + 1) == DOUBT_S


def test_nodes_that_nobody_doubted_again_are_forgotten() -> None:
    suspects = Suspects()
    for index in range(3 * DOUBTED_MAX):
        suspects.doubt([NodeId(f"n{index}")], index * 2 * DOUBT_S)
    assert len(suspects._repeats) <= DOUBTED_MAX
    suspects.doubt([A, B], 0.0)
    suspects.now(10 * REPEAT_S)
    suspects.now(12 * REPEAT_S)
    assert not suspects._repeats
