"""What is believed of a node's speed once it has been measured, and when it is held to what it announced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.scheduling.speeds import (
    BELIEVED_S,
    CONTRADICTION,
    CONTRADICTIONS_MIN,
    PEERS_MAX,
    PeerSpeeds,
    StageTime,
    layer_times,
)
from swarmllm_proto.identifiers import NodeId

A, B = NodeId("a"), NodeId("b")


def test_one_node_has_spent_all_of_the_time_whatever_it_says() -> None:
    for reported_s in (0.0, 1e-9, 0.4, 1e9):
        assert layer_times([StageTime(A, 4, reported_s)], 0.8) == pytest.approx({A: 0.2})


def test_of_several_each_has_what_it_says_and_a_share_of_the_rest() -> None:
    times_s = layer_times([StageTime(A, 4, 0.0), StageTime(B, 2, 0.4)], 1.0)
    assert times_s == pytest.approx({A: 0.1, B: 0.3})


@given(
    st.lists(
        st.builds(StageTime, st.sampled_from([A, B]), st.integers(1, 80), st.floats(0, 1e9)), min_size=1
    ),
    st.floats(1e-6, 1e6),
)
def test_all_together_have_spent_the_time_that_was_spent(stages: list[StageTime], spent_s: float) -> None:
    times_s = layer_times(stages, spent_s)
    total_s = sum(times_s[stage.node_id] * stage.n_layers for stage in stages)
    assert total_s == pytest.approx(spent_s, rel=1e-6)
    assert min(times_s.values()) >= 0


def test_no_time_or_no_layers_measure_nothing() -> None:
    assert layer_times([StageTime(A, 4, 0.1)], 0.0) == {}
    assert layer_times([StageTime(A, 4, 0.1)], -1.0) == {}
    assert layer_times([], 1.0) == {}


def observe(speeds: PeerSpeeds, layer_s: float, now_s: float = 0.0, **more: bool) -> bool:
    was_alone = more.get("was_alone", True)
    return speeds.observe("m", A, layer_s, now_s, announced_s=0.001, was_alone=was_alone)


def test_a_measurement_counts_for_a_while_and_is_averaged_with_the_next() -> None:
    speeds = PeerSpeeds()
    assert speeds.layer_s("m", A, 0.0) is None
    observe(speeds, 0.010)
    assert speeds.layer_s("m", A, 1.0) == 0.010
    observe(speeds, 0.020, 1.0)
    assert speeds.layer_s("m", A, 1.0) == pytest.approx(0.015)
    assert speeds.layer_s("other", A, 1.0) is None
    assert speeds.layer_s("m", A, 1.0 + BELIEVED_S) is None
    observe(speeds, 0.001, 1.0 + BELIEVED_S)
    assert speeds.layer_s("m", A, 1.0 + BELIEVED_S) == 0.001


def test_a_node_is_held_to_what_it_announced_after_several_contradictions_in_a_row() -> None:
    speeds, slow_s = PeerSpeeds(), 0.001 * CONTRADICTION * 1.1
    for _ in range(CONTRADICTIONS_MIN - 1):
        assert not observe(speeds, slow_s)
    assert not observe(speeds, 0.001)  # in a row, or not at all
    for _ in range(CONTRADICTIONS_MIN - 1):
        assert not observe(speeds, slow_s)
    assert observe(speeds, slow_s)
    assert not observe(speeds, slow_s)


def test_slower_by_less_than_that_is_no_contradiction_nor_is_it_beside_others() -> None:
    speeds = PeerSpeeds()
    for _ in range(10 * CONTRADICTIONS_MIN):
        assert not observe(speeds, 0.001 * CONTRADICTION * 0.9)
        assert not observe(speeds, 1.0, was_alone=False)
        assert not speeds.observe("m", B, 1.0, 0.0, announced_s=None, was_alone=True)


def test_what_others_may_have_taken_is_never_held_against_a_node() -> None:
    speeds = PeerSpeeds()
    for _ in range(10 * CONTRADICTIONS_MIN):
        assert not observe(speeds, 1.0, was_alone=False)


def test_so_many_nodes_are_remembered() -> None:
    speeds = PeerSpeeds()
    for index in range(PEERS_MAX + 1):
        speeds.observe("m", NodeId(str(index)), 0.1, 0.0, announced_s=None, was_alone=True)
    assert speeds.layer_s("m", NodeId("0"), 0.0) is None
    assert speeds.layer_s("m", NodeId("1"), 0.0) == 0.1
