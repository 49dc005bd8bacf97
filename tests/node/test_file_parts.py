"""Who fetches which layers of a file that nobody has whole, and who does when one cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B, C, D
from placing_members import ENTRY

from swarmllm.models import LayerRange, covers, merge
from swarmllm.node.sharing.file_parts import first_parts, hand_over, layers_of
from swarmllm.node.sharing.share_plan import SharePart, SharePlan
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import FilePart

LAYOUT = ENTRY.manifest


def plan(*parts: tuple[NodeId, str], complete: bool = True) -> SharePlan:
    taken = tuple(
        SharePart(node_id, (LayerRange.parse(layers),) if layers else (), 1, 1, 1)
        for node_id, layers in parts
    )
    return SharePlan(LAYOUT.model_id, 1, complete, taken, None, 0.0, False, ())


def part(node_id: NodeId, layers: str) -> FilePart:
    wanted = LayerRange.parse(layers)
    return FilePart(node_id=node_id, start=wanted.start, end=wanted.end)


def test_everybody_fetches_what_it_is_going_to_hold() -> None:
    parts = first_parts(plan((A, "0:5"), (B, "5:12")), LAYOUT, A)
    assert parts == (part(A, "0:5"), part(B, "5:12"))


@pytest.mark.parametrize(
    "given_plan", [plan((A, "0:12"), (B, "")), plan((A, "0:5"), (B, "5:9"), complete=False)]
)
def test_one_node_for_all_layers_or_none_for_some_is_no_case_for_it(given_plan: SharePlan) -> None:
    assert first_parts(given_plan, LAYOUT, A) == ()


def test_the_node_that_shares_fetches_something_even_where_it_holds_nothing() -> None:
    parts = first_parts(plan((B, "0:5"), (C, "5:12"), (A, "")), LAYOUT, A)
    assert parts == (part(B, "0:5"), part(C, "5:12"), part(A, "6:7"))


def test_what_a_failed_node_does_not_fetch_goes_to_the_first_that_can() -> None:
    parts = (part(A, "0:4"), part(B, "4:8"), part(C, "8:12"))
    assert hand_over(parts, 12, {B}, [A, C]) == (part(C, "8:12"), part(A, "0:8"))
    assert hand_over(parts, 12, {A, B}, [A, C]) == (part(C, "0:12"),)
    assert hand_over(parts, 12, {A, B, C}, [A, C]) is None


def test_layers_that_another_node_fetches_too_are_not_handed_over() -> None:
    parts = (part(A, "0:8"), part(B, "4:12"), part(C, "4:8"))
    assert hand_over(parts, 12, {C}, [A, B]) == (part(A, "0:8"), part(B, "4:12"))
    assert hand_over(parts, 12, {A, B, C}, []) is None


@given(
    st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.integers(0, 11), st.integers(1, 12)), max_size=8),
    st.sets(st.sampled_from([A, B, C, D])),
    st.permutations([A, B, C, D]),
)
def test_what_is_left_covers_every_layer_without_the_nodes_that_are_gone(
    said: list[tuple[NodeId, int, int]], gone: set[NodeId], takers: list[NodeId]
) -> None:
    parts = [FilePart(node_id=n, start=s, end=min(12, s + length)) for n, s, length in said]
    left = hand_over(parts, 12, gone, takers)
    if left is None:
        assert gone == {A, B, C, D}
        return
    assert covers(map(layers_of, left), LayerRange(0, 12))
    assert not {each.node_id for each in left} & gone
    for node_id in {A, B, C, D} - gone:
        before = merge(layers_of(each) for each in parts if each.node_id == node_id)
        now = [layers_of(each) for each in left if each.node_id == node_id]
        assert all(covers(now, layers) for layers in before)
