"""Trust in tests: scores from a function, and what was noted."""

from __future__ import annotations

from collections.abc import Callable

from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm_proto.identifiers import NodeId


class FakeTrust:
    def __init__(
        self, likes: Callable[[NodeId], bool] = lambda node_id: True, otherwise: float = 0.0
    ) -> None:
        """A node that `likes` names has the score 1, others have `otherwise`."""
        self._likes = likes
        self._otherwise = otherwise
        self.noted: list[tuple[NodeId, TrustEvent, str]] = []

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
        self.noted.append((node_id, event, detail))

    def score(self, node_id: NodeId) -> float:
        return 1.0 if self._likes(node_id) else self._otherwise
