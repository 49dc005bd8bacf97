"""The allow and deny lists of the configuration.

They override a node's trust (see trust.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmllm.errors import ConfigError
from swarmllm_proto.identifiers import NodeId, is_node_id


@dataclass(frozen=True, slots=True)
class PeerLists:
    allow: frozenset[NodeId] = frozenset()
    deny: frozenset[NodeId] = frozenset()
    only_allowed: bool = False
    """Nobody is let in but those allowed."""

    @classmethod
    def of(cls, allow: Iterable[str], deny: Iterable[str], *, only_allowed: bool) -> PeerLists:
        """Raises ConfigError where a node is on both lists, or an entry is not a node id."""
        lists = cls(_node_ids(allow, "network.allow"), _node_ids(deny, "network.deny"), only_allowed)
        if both := lists.allow & lists.deny:
            raise ConfigError(f"{min(both)} is both allowed and denied.", field="network.deny")
        return lists

    def lets_in(self, node_id: NodeId) -> bool:
        return node_id not in self.deny and (not self.only_allowed or node_id in self.allow)


def _node_ids(texts: Iterable[str], field: str) -> frozenset[NodeId]:
    found: set[NodeId] = set()
    for text in texts:
        if not is_node_id(text):
            raise ConfigError(f"{text[:100]!r} is not a node id (see `swarmllm peers`).", field=field)
        found.add(text)
    return frozenset(found)


NO_LISTS = PeerLists()
