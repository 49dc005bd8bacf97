"""Adds up who contradicts whom: one of two neighbours lies, and a single time says nothing of which.

Pure. Routes separate the two, so an honest node meets the liar once, and the liar a new honest one each time.
Who was contradicted by several others that were contradicted by nobody else is the liar. Only nodes that
have earned trust count as others: identities that cost nothing must not be able to outvote a node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from swarmllm_proto.identifiers import NodeId

CERTAIN: Final = 3
"""Others that contradict a node."""
NODES_MAX: Final = 1024
OTHERS_MAX: Final = 16


class Contradictions:
    def __init__(self) -> None:
        self._by: dict[NodeId, list[NodeId]] = {}

    def add(self, one: NodeId, other: NodeId, has_earned: Callable[[NodeId], bool]) -> NodeId | None:
        """The one of the two that lies, if that is certain by now; then it begins anew."""
        counts = {node_id: has_earned(node_id) for node_id in (one, other)}
        for node_id, by in ((one, other), (other, one)):
            known = self._by.pop(node_id, [])
            if counts[by] and by not in known:
                known = [*known, by][-OTHERS_MAX:]
            self._by[node_id] = known
        while len(self._by) > NODES_MAX:
            del self._by[next(iter(self._by))]
        for node_id in (one, other):
            alone = [by for by in self._by[node_id] if set(self._by.get(by, ())) <= {node_id}]
            if len(alone) >= CERTAIN:
                self._forget(node_id)
                return node_id
        return None

    def _forget(self, node_id: NodeId) -> None:
        del self._by[node_id]
        for known in self._by.values():
            if node_id in known:
                known.remove(node_id)
