"""Indexes which nodes announced that they encode pictures for which models.

Pure. A node's last word replaces what it said before; what the index holds is bounded by the number of nodes,
whatever they send.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import UNSET

from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import ProjectorAnnounce

NODES_MAX: Final = 4096
"""As many as there are records; who comes after them is not listed."""
REMEMBERED_MAX: Final = 1024
"""Models that some node could once encode pictures for."""
Projectors = dict[ModelId, ProjectorAnnounce]
"""Of one node."""


class ProjectorIndex:
    def __init__(self, nodes_max: int = NODES_MAX, *, peers: Parts[Projectors] | None = None) -> None:
        self._nodes_max = nodes_max
        self._by_node: Parts[Projectors] = Parts.alone() if peers is None else peers
        self._nodes_of: dict[ModelId, set[NodeId]] = {}
        self._remembered: OrderedDict[ModelId, frozenset[str]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_node.values()))

    def put(self, node_id: NodeId, announced: Sequence[ProjectorAnnounce]) -> None:
        """All that the node says now; a model that it names twice counts as it is named first."""
        self.forget(node_id)
        said: Projectors = {}
        for each in announced:
            said.setdefault(each.model_id, each)
        if not said or len(self._by_node) >= self._nodes_max:
            return
        self._by_node.put(node_id, said)
        for model_id in said:
            self._nodes_of.setdefault(model_id, set()).add(node_id)

    def forget(self, node_id: NodeId) -> None:
        for model_id in self._by_node.drop(node_id) or ():
            nodes = self._nodes_of[model_id]
            nodes.remove(node_id)
            if not nodes:
                del self._nodes_of[model_id]

    def holders(self, model_id: ModelId, counts: Callable[[NodeId], bool]) -> dict[NodeId, ProjectorAnnounce]:
        """What the nodes that `counts` say of this model."""
        said = {n: self._by_node.get(n) for n in sorted(self._nodes_of.get(model_id, ())) if counts(n)}
        found = {node_id: each[model_id] for node_id, each in said.items() if each is not None}
        if found:
            said_now = (each for announced in found.values() for each in taken(announced))
            self._remembered[model_id] = self._remembered.get(model_id, frozenset()).union(said_now)
            self._remembered.move_to_end(model_id)
            while len(self._remembered) > REMEMBERED_MAX:
                self._remembered.popitem(last=False)
        return found

    def had_holders(self, model_id: ModelId, medium: str) -> bool:
        """Whether `holders` has found some that take this medium, now or earlier."""
        return medium in self._remembered.get(model_id, ())


def taken(announced: ProjectorAnnounce) -> tuple[str, ...]:
    """What a projector encodes; one that says nothing of it takes pictures."""
    return ("picture",) if announced.takes is UNSET else announced.takes
