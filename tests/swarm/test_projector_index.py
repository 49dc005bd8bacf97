"""What the index of projectors counts, and that it is bounded by the number of nodes."""

from __future__ import annotations

from node_ids import A, B

from swarmllm.swarm.records.projector_index import ProjectorIndex
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.swarm import ProjectorAnnounce


def projector(n: int) -> ProjectorAnnounce:
    return ProjectorAnnounce(model_id=ModelId(f"{n:064x}"), projector="ab" * 32, n_embd=8)


def test_it_counts_each_model_of_each_node_once() -> None:
    index = ProjectorIndex()
    assert len(index) == 0
    index.put(A, [projector(1), projector(2), projector(1)])
    index.put(B, [projector(1)])
    assert len(index) == 3
    index.put(A, [projector(2)])
    assert len(index) == 2
    index.forget(B)
    index.forget(A)
    assert len(index) == 0


def test_a_node_too_many_is_not_listed() -> None:
    index = ProjectorIndex(nodes_max=1)
    index.put(A, [projector(1)])
    index.put(B, [projector(2)])
    assert len(index) == 1
    index.put(A, [projector(3), projector(4)])
    assert len(index) == 2


def test_holders_are_the_nodes_that_count_with_what_each_says_now() -> None:
    index = ProjectorIndex()
    other = ProjectorAnnounce(model_id=ModelId(f"{1:064x}"), projector="cd" * 32, n_embd=8)
    index.put(A, [projector(1)])
    index.put(B, [other, projector(2)])
    model_id = projector(1).model_id
    assert index.holders(model_id, lambda node_id: True) == {A: projector(1), B: other}
    assert index.holders(model_id, lambda node_id: node_id == B) == {B: other}
    index.put(B, [projector(2)])
    assert index.holders(model_id, lambda node_id: True) == {A: projector(1)}
    index.forget(A)
    assert index.holders(model_id, lambda node_id: True) == {}
    assert set(index._nodes_of) == {projector(2).model_id}, "nothing is kept of a model without holders"
