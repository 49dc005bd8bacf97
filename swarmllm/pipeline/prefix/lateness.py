"""Remembers how late nodes were with KV that was asked of them, and forgets it soon. Pure.

A node whose worker computes gives rows between two of its steps, and one that many ask says that it is busy.
Neither is a refusal or a lie: such a node is expected to be late again, by a time that halves every few
seconds, so it is asked again as soon as that may pay. Who is late again and again is expected to be so for
longer: its time halves more slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from swarmllm_proto.identifiers import NodeId

HALF_LIFE_S: Final = 2.0
"""In which an expected lateness halves ..."""
HALF_LIFE_MAX_S: Final = 32.0
"""... where it was in vain once; twice as long after each further time, up to this."""
IN_VAIN: Final = 2.0
"""So many times as long as it was waited for in vain it would have taken, for all that is known."""
BUSY_S: Final = 0.5
"""What a node needs at least that says that it is busy."""
FORGOTTEN: Final = 16.0
"""Half-lives after which nothing is left."""
NODES_MAX: Final = 1024
"""Of which that is known."""


@dataclass(frozen=True, slots=True)
class _Lateness:
    late_s: float
    at_s: float
    half_life_s: float = HALF_LIFE_S
    n_in_vain: int = 0
    """In a row."""

    def is_over(self, now_s: float) -> bool:
        return now_s - self.at_s >= FORGOTTEN * self.half_life_s

    def left_s(self, now_s: float) -> float:
        return self.late_s * math.exp2((self.at_s - now_s) / self.half_life_s)


@dataclass(slots=True)
class LateHolders:
    _known: dict[NodeId, _Lateness] = field(default_factory=dict)

    def expected_s(self, node_id: NodeId, now_s: float) -> float:
        """How much later than its path alone takes the first rows will come."""
        known = self._get(node_id, now_s)
        return 0.0 if known is None else known.left_s(now_s)

    def gave(self, node_id: NodeId, late_s: float, now_s: float) -> None:
        """All rows came, and the first ones so much later than its path alone takes."""
        self._put(node_id, _Lateness(max(0.0, late_s), now_s))

    def gave_nothing(
        self, node_id: NodeId, waited_s: float, now_s: float, *, says_busy: bool = False
    ) -> None:
        """Rows that were waited for so long did not come, or not all of them."""
        known = self._get(node_id, now_s)
        late_s, n_in_vain = IN_VAIN * max(waited_s, BUSY_S * says_busy), 1
        if known is not None:
            # What was asked for at the same time is one moment of the node.
            n_in_vain = known.n_in_vain + (now_s - waited_s >= known.at_s or not known.n_in_vain)
            late_s = max(late_s, known.left_s(now_s))
        half_life_s = min(HALF_LIFE_MAX_S, HALF_LIFE_S * math.exp2(n_in_vain - 1))
        self._put(node_id, _Lateness(late_s, now_s, half_life_s, n_in_vain))

    def _get(self, node_id: NodeId, now_s: float) -> _Lateness | None:
        known = self._known.get(node_id)
        return None if known is None or known.is_over(now_s) else known

    def _put(self, node_id: NodeId, lateness: _Lateness) -> None:
        self._known.pop(node_id, None)
        if len(self._known) >= NODES_MAX:
            self._known = {key: each for key, each in self._known.items() if not each.is_over(lateness.at_s)}
        if len(self._known) < NODES_MAX:
            self._known[node_id] = lateness
