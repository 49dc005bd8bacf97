"""Counts the rows of a prompt that each node has in its cache, by its announcements and this node's cache.

A route through a node that keeps the beginning of a prompt takes less time than the node's speed suggests.
Another node's announcement counts for that node, and for this one, which fetches the KV before it computes.
Where a fetch is declined or breaks off, the prompt is computed as on any other route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.prefix.choice import whole_blocks
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes, kept_root
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import DIGEST_SIZE, NAMES_MAX, KeptPrefix
from swarmllm_proto.tensors import Tensor


class KeepsPrefixes(Protocol):
    def kept_prefixes(self) -> Mapping[ModelId, tuple[KeptPrefix, ...]]:
        """By model."""
        ...


@dataclass(frozen=True, slots=True)
class CachedRows:
    node_id: NodeId
    registry: Registry
    kept: KeepsPrefixes
    """Here."""
    _: KW_ONLY
    sends_tokens: bool
    """Where another node runs the whole model it gets the prompt's tokens, and names it as it announced.
    False: it gets rows, under names that mean something to this node only, and computes all of them."""
    key: str = field(default="", repr=False)
    """What names are keyed with."""

    def of(self, entry: CatalogueEntry, tokens: Tensor) -> dict[NodeId, int]:
        """By node id, for nodes that run the whole model; nobody who has nothing of it."""
        model_id = entry.model_id
        here = {(each.hash, each.n_blocks) for each in self.kept.kept_prefixes().get(model_id, ())}
        if not here and not self.registry.has_prefixes(model_id):
            return {}
        n_blocks = min(whole_blocks(len(tokens)), NAMES_MAX // DIGEST_SIZE)
        root = kept_root(self.key, model_id, entry.manifest.n_layers)
        hashes = extend_block_hashes(root, tokens[: n_blocks * BLOCK_TOKENS])
        found = self.registry.blocks_of_prefix(model_id, hashes)
        n_here = next((n for n in range(len(hashes), 0, -1) if (hashes[n - 1], n) in here), 0)
        if most := max(n_here, *found.values(), 0):
            found = (found if self.sends_tokens else {}) | {self.node_id: most}
        return {node_id: n * BLOCK_TOKENS for node_id, n in found.items()}
