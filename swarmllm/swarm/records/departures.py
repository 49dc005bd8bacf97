"""Keeps the nodes that have left lately, for the dashboard.

Pure: the clock comes in as `now_s`. A node that has left counts as recent for RECENT_S, because it may have
lost its connection for a moment. It is listed until FORGET_S have passed, then nothing of it is kept. At most
the latest DEPARTED_MAX are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from swarmllm.swarm.peers.peer_table import PassingParts
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import NodeRecord

RECENT_S: Final = 60.0
FORGET_S: Final = 3600.0
DEPARTED_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Departed:
    node_id: NodeId
    nickname: str
    models: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """(name, layer ranges) that it had ready when it left. A node that stops in order tells the swarm before
    that it has none."""
    left_s: float
    left_at: float
    """The same, in seconds since the epoch."""

    def is_recent(self, now_s: float) -> bool:
        return now_s < self.left_s + RECENT_S

    def is_over(self, now: float) -> bool:
        """Whether nothing of it is kept any more."""
        return now >= self.left_s + FORGET_S


class Departures:
    def __init__(self, peers: PassingParts[Departed] | None = None) -> None:
        self._left: PassingParts[Departed] = PassingParts.alone() if peers is None else peers

    def left(self, node_id: NodeId, record: NodeRecord | None, now_s: float, left_at: float) -> None:
        models = tuple((model.name, model.ranges) for model in record.models) if record else ()
        nickname = record.nickname if record else ""
        self._left.put_last(node_id, Departed(node_id, nickname, models, now_s, left_at))
        if len(self._left) > DEPARTED_MAX:
            self._left.drop_first()

    def came(self, node_id: NodeId) -> None:
        self._left.drop(node_id)

    def view(self, now_s: float) -> tuple[Departed, ...]:
        """The latest first."""
        self._left.tidy(now_s)
        return tuple(self._left.values())[::-1]
