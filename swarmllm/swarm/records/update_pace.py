"""Decides how long what nodes say anew may wait before it is passed on: pure.

It goes on at once, unless many nodes say something at the same time. A hundred nodes that start together have
a hundred things to say, and each packet costs its sender and its receiver more than what is in it: so each
node then holds what it passes on for a moment, and it travels together.

A node that speaks again and again counts once, or it could slow down the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from swarmllm.swarm.peers.peer_table import PassingParts
from swarmllm_proto.identifiers import NodeId

UPDATES_WAIT_S: Final = 1.0
"""At most, at each node that passes it on."""
MANY_WRITERS: Final = 4.0
MANY_WITHIN_S: Final = 2.0
"""Many are more than MANY_WRITERS in about so many seconds: each counts for 1/e after that time."""
COUNTS_AGAIN_S: Final = 10.0
"""A writer counts once in this time."""
WRITERS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class CountedUpdate:
    at_s: float

    def is_over(self, now: float) -> bool:
        """Whether the next update of that node counts."""
        return now >= self.at_s + COUNTS_AGAIN_S


class UpdatePace:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self, counted: PassingParts[CountedUpdate] | None = None) -> None:
        self._n_writers = 0.0
        """As of `_at_s`; it shrinks from there."""
        self._at_s = -math.inf
        self._counted: PassingParts[CountedUpdate] = PassingParts.alone() if counted is None else counted
        """Of each of the latest writers; who was counted first comes first."""

    def __repr__(self) -> str:
        return f"<UpdatePace {self._n_writers:.1f} writers>"

    def may_wait_s(self, writer: NodeId, now: float) -> float:
        """For how long, at most, an update of that node may wait that has come now."""
        n_writers = self._n_writers * math.exp(-max(0.0, now - self._at_s) / MANY_WITHIN_S)
        counted = self._counted.get(writer)
        if counted is None or counted.is_over(now):
            self._counted.put_last(writer, CountedUpdate(now))
            if len(self._counted) > WRITERS_MAX:
                self._counted.drop_first()
            n_writers += 1.0
            self._n_writers, self._at_s = n_writers, now
        return UPDATES_WAIT_S if n_writers > MANY_WRITERS else 0.0
