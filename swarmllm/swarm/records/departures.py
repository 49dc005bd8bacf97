"""Keeps the nodes that have left lately, for the dashboard.

Pure: the clock comes in as `now_s`. A node that has left counts as recent for RECENT_S, because it may have
lost its connection for a moment. It is listed until FORGET_S have passed, then nothing of it is kept. At most
the latest DEPARTED_MAX are kept.

A node that stops in order tells the swarm that it has nothing ready, and then finishes what runs. So what a
node had before its last record counts as held, if that record came less than GAVE_UP_S before the node left.
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
GAVE_UP_S: Final = 600.0
"""The longest `node.drain_timeout_s`."""
GAVE_UP_MAX: Final = 1024

NamedRanges = tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
"""(name, layer ranges) for each model."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """What a node had ready before it said that it has nothing."""

    models: NamedRanges
    at_s: float

    def is_over(self, now: float) -> bool:
        return now >= self.at_s + GAVE_UP_S


@dataclass(frozen=True, slots=True)
class Departed:
    node_id: NodeId
    nickname: str
    models: NamedRanges
    """That it had ready when it left, or when it began to stop."""
    left_s: float
    left_at: float
    """The same, in seconds since the epoch."""

    def is_recent(self, now_s: float) -> bool:
        return now_s < self.left_s + RECENT_S

    def is_over(self, now: float) -> bool:
        """Whether nothing of it is kept any more."""
        return now >= self.left_s + FORGET_S


class Departures:
    def __init__(
        self, peers: PassingParts[Departed] | None = None, gave_up: PassingParts[GaveUp] | None = None
    ) -> None:
        self._left: PassingParts[Departed] = PassingParts.alone() if peers is None else peers
        self._gave_up: PassingParts[GaveUp] = PassingParts.alone() if gave_up is None else gave_up

    def record_replaced(
        self, node_id: NodeId, before: NodeRecord | None, record: NodeRecord | None, now_s: float
    ) -> None:
        """A node has published another record."""
        if _ready(record):
            self._gave_up.drop(node_id)
        elif models := _ready(before):
            self._gave_up.put_last(node_id, GaveUp(models, now_s))
            if len(self._gave_up) > GAVE_UP_MAX:
                self._gave_up.drop_first()

    def left(self, node_id: NodeId, record: NodeRecord | None, now_s: float, left_at: float) -> None:
        given_up = self._gave_up.drop(node_id)
        models = _ready(record)
        if not models and given_up is not None and not given_up.is_over(now_s):
            models = given_up.models
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


def _ready(record: NodeRecord | None) -> NamedRanges:
    models = record.models if record else ()
    return tuple((model.name, model.ranges) for model in models if model.ranges)
