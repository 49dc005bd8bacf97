"""Nodes of which others say that they have just failed. Pure: the clock comes in as `now_s`.

Whoever loses a pipeline tells everybody at once (PipelineError), so that the next request of another node
does not have to find out by itself. It is hearsay: a suspect is only avoided while there are others, only
for some seconds, never longer than until it connects anew, and what one node may say of others is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SUSPECT_S = 15.0
"""By then this node has noticed by itself, if it is true."""
MAX_PER_ACCUSER = 8
MAX_ACCUSERS = 256


@dataclass(slots=True)
class Suspects:
    _until_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """By accuser and suspect."""

    def accuse(self, accuser: str, node_id: str, now_s: float) -> None:
        self._forget_old(now_s)
        if accuser not in self._until_s and len(self._until_s) >= MAX_ACCUSERS:
            return
        said = self._until_s.setdefault(accuser, {})
        if node_id in said or len(said) < MAX_PER_ACCUSER:
            said[node_id] = now_s + SUSPECT_S

    def clear(self, node_id: str) -> None:
        """It has come, or come back."""
        for said in self._until_s.values():
            said.pop(node_id, None)

    def now(self, now_s: float) -> frozenset[str]:
        self._forget_old(now_s)
        return frozenset(node_id for said in self._until_s.values() for node_id in said)

    def _forget_old(self, now_s: float) -> None:
        for accuser, said in list(self._until_s.items()):
            for node_id in [node_id for node_id, until_s in said.items() if until_s <= now_s]:
                del said[node_id]
            if not said:
                del self._until_s[accuser]
