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
