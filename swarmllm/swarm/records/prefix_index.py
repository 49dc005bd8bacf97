"""Indexes which nodes announced kept KV of which prompt beginnings.

Pure. A node's last word replaces what it said before, and only so much of it is taken: what the index holds
is bounded by the number of nodes, whatever they send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import PrefixCacheAnnounce

NODE_PREFIXES_MAX: Final = 64
"""Of one node, all its models together."""
NODES_MAX: Final = 4096
"""As many as there are records; who comes after them is not listed."""
Beginning = tuple[ModelId, bytes, int]
"""(model id, hash of the last block, number of blocks)"""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    n_blocks: int = 0
    """0: nobody has any of it."""
    node_ids: frozenset[NodeId] = frozenset()


class PrefixIndex:
    def __init__(
        self, nodes_max: int = NODES_MAX, *, peers: Parts[tuple[Beginning, ...]] | None = None
    ) -> None:
        self._nodes_max = nodes_max
        self._by_node: Parts[tuple[Beginning, ...]] = Parts.alone() if peers is None else peers
        self._nodes_of: dict[Beginning, set[NodeId]] = {}
        self._n_of: Counter[ModelId] = Counter()
        """Announced beginnings by model."""

    def __len__(self) -> int:
        return sum(map(len, self._by_node.values()))

    def put(self, node_id: NodeId, announced: Sequence[PrefixCacheAnnounce]) -> None:
        """All that the node says now."""
        self.forget(node_id)
        said = ((each.model_id, kept.hash, kept.n_blocks) for each in announced for kept in each.prefixes)
        beginnings = tuple(islice(dict.fromkeys(said), NODE_PREFIXES_MAX))
        if not beginnings or len(self._by_node) >= self._nodes_max:
            return
        self._by_node.put(node_id, beginnings)
        for beginning in beginnings:
            self._nodes_of.setdefault(beginning, set()).add(node_id)
            self._n_of[beginning[0]] += 1

    def forget(self, node_id: NodeId) -> None:
        for beginning in self._by_node.drop(node_id) or ():
            nodes = self._nodes_of[beginning]
            nodes.remove(node_id)
            self._n_of[beginning[0]] -= 1
            if not self._n_of[beginning[0]]:
                del self._n_of[beginning[0]]
            if not nodes:
                del self._nodes_of[beginning]

    def count(self, node_id: NodeId) -> int:
        """Beginnings that the node has announced."""
        return len(self._by_node.get(node_id) or ())

    def has(self, model_id: ModelId) -> bool:
        """Whether anybody has announced anything of this model."""
        return self._n_of[model_id] > 0

    def blocks(
        self, model_id: ModelId, hashes: Sequence[bytes], counts: Callable[[NodeId], bool]
    ) -> dict[NodeId, int]:
        """How many of a prompt's first blocks each node has that `counts`; nobody who has none."""
        found: dict[NodeId, int] = {}
        for n_blocks in range(len(hashes), 0, -1):
            for node_id in self._nodes_of.get((model_id, hashes[n_blocks - 1], n_blocks), ()):
                if node_id not in found and counts(node_id):
                    found[node_id] = n_blocks
        return found

    def longest(
        self, model_id: ModelId, hashes: Sequence[bytes], counts: Callable[[NodeId], bool]
    ) -> PrefixMatch:
        """The most of a prompt's complete blocks (`hashes`, see swarmllm_proto.blocks) of which some node
        that `counts` has all, and those nodes."""
        for n_blocks in range(len(hashes), 0, -1):
            nodes = self._nodes_of.get((model_id, hashes[n_blocks - 1], n_blocks), ())
            if found := frozenset(node_id for node_id in nodes if counts(node_id)):
                return PrefixMatch(n_blocks, found)
        return PrefixMatch()
