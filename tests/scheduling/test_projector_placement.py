"""Who takes a model's projector, and who lets it go: the same answer everywhere, never all at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B, C, D

from swarmllm.scheduling.projector_placement import ProjectorNode, next_act, takers
from swarmllm_proto.identifiers import NodeId

MIB = 2**20


def node(node_id: NodeId, free: int = 0, *, has: bool = False, part: bool = True) -> ProjectorNode:
    return ProjectorNode(node_id, free * MIB, has, part)


@pytest.mark.parametrize(
    ("nodes", "wanted", "expected"),
    [
        ([node(A, 9, has=True), node(B, 5), node(C, 6)], 2, (C,)),
        ([node(A, 9, has=True), node(B, 6), node(C, 6)], 2, (B,)),
        ([node(A, 9, has=True), node(B, 6), node(C, 7)], 3, (C, B)),
        ([node(A, 9, has=True), node(B, 3), node(C, 3)], 2, ()),
        ([node(A, 9, has=True), node(B, 9, part=False), node(C, 4)], 2, (C,)),
        ([node(A, has=True, part=False), node(B, has=True), node(C, 9)], 2, ()),
        ([node(A, 9), node(B, 9)], 2, ()),
        ([node(A, 9, has=True), node(B, 9)], 1, ()),
    ],
    ids=[
        "most room",
        "then by id",
        "two",
        "no room",
        "takes no part",
        "enough",
        "nobody has it",
        "one will do",
    ],
)
def test_who_takes_it(nodes: list[ProjectorNode], wanted: int, expected: tuple[NodeId, ...]) -> None:
    assert takers(nodes, 4 * MIB, wanted) == expected
    assert takers(nodes[::-1], 4 * MIB, wanted) == expected


def test_only_who_took_it_lets_it_go_and_only_the_last_of_too_many() -> None:
    three = [node(each, 9, has=True) for each in (A, B, C)]
    last = max(A, B, C)
    for each in (A, B, C):
        assert next_act(each, three, MIB, 2, took_it=True) == ("drop" if each == last else "")
        assert next_act(each, three, MIB, 2, took_it=False) == ""
        assert next_act(each, three, MIB, 3, took_it=True) == ""


@given(
    st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_it_settles_with_as_many_holders_as_there_is_room_for(
    facts: list[tuple[int, bool, bool]], wanted: int
) -> None:
    nodes = {
        node_id: node(node_id, free, has=has, part=part)
        for node_id, (free, has, part) in zip((A, B, C, D), facts, strict=False)
    }
    took: set[NodeId] = set()
    for _ in range(6):
        acts = {
            each: next_act(each, list(nodes.values()), 4 * MIB, wanted, took_it=each in took)
            for each in nodes
        }
        for each, act in acts.items():
            if act:
                nodes[each] = ProjectorNode(
                    each, nodes[each].free_bytes, act == "take", nodes[each].takes_part
                )
                (took.add if act == "take" else took.discard)(each)
    n_before = sum(has for _, has, _ in facts)
    n_able = sum(not has and part and free >= 4 for free, has, part in facts)
    n_now = sum(each.has_it for each in nodes.values())
    assert n_now == (max(n_before, min(wanted, n_before + n_able)) if n_before else 0)
