"""What a person has said about nodes: who is always trusted, and with whom nothing is to be had.

These win over whatever a node has earned (see trust.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PeerLists:
    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    only_allowed: bool = False
    """Nobody is let in but those allowed."""

    @classmethod
    def of(cls, allow: Iterable[str], deny: Iterable[str], *, only_allowed: bool) -> PeerLists:
        """Raises ConfigError where a node is on both lists."""
        lists = cls(frozenset(allow), frozenset(deny), only_allowed)
        if both := lists.allow & lists.deny:
            raise ConfigError(f"{min(both)} is both allowed and denied.", field="network.deny")
        return lists

    def lets_in(self, node_id: str) -> bool:
        return node_id not in self.deny and (not self.only_allowed or node_id in self.allow)


NO_LISTS = PeerLists()
