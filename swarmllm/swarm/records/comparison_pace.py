"""Decides when a node compares its records with those of a connected node again, and with which one: pure.

Two nodes compare records when they connect. What the one learns in that way, the other nodes that it is
connected with may lack, and nobody tells them: gossip brings news of each node only from that node itself and
from the first that it met. Where a hundred nodes start together, or two halves of a swarm meet again, most
news comes by comparisons. So a node that has learned something compares again soon, with one connected node
after the other, drawn by lot, and more and more rarely while it learns nothing. Who is asked notices that the
other one knows something else, and asks back.
"""

from __future__ import annotations

import math
import random
from typing import Final

from swarmllm_proto.identifiers import NodeId

FIRST_S: Final = 2.0
MAX_S: Final = 90.0
"""Several times in the time after which a silent node is forgotten (`envelope_book.EXPIRY_S`): a node that
gossip reaches badly learns by comparing who lives."""
BUSY_SHARE: Final = 4.0
BUSY_MAX_S: Final = 8.0
"""At least so many times as long as the last comparison took, BUSY_MAX_S at most: it is slow where others
wait as well. They may be through soon after, and who lacks records has nobody else to tell it."""


class ComparisonPace:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._interval_s = MAX_S
        self._earliest_s = -math.inf
        """Whatever others say."""
        self.due_at_s = math.inf
        self.first: NodeId | None = None
        """Whom to ask, if it is still connected; None: whom the lot falls on."""
        self._is_lots_turn = False
        """Nobody who asks often is to keep this node from comparing with others."""

    def __repr__(self) -> str:
        return f"<ComparisonPace {self._interval_s:g} s>"

    def begin(self, now: float) -> None:
        self.due_at_s = now + self._spread_out(MAX_S)

    def learned(self, now: float) -> None:
        """There is news that did not come by gossip."""
        self._interval_s = FIRST_S
        self._hurry(now + self._spread_out(FIRST_S))

    def differs(self, node_id: NodeId, now: float) -> None:
        """That node has asked, and knows something else."""
        if self.first is None and not self._is_lots_turn:
            self.first = node_id
            self._hurry(now + self._spread_out(FIRST_S / 4))

    def compared(self, n_new: int, took_s: float, now: float) -> None:
        """`n_new`: how many statements of others were new."""
        self._is_lots_turn, self.first = self.first is not None, None
        self._interval_s = FIRST_S if n_new else min(MAX_S, 2 * self._interval_s)
        self._earliest_s = now + self._spread_out(max(FIRST_S, min(BUSY_MAX_S, BUSY_SHARE * took_s)))
        self.due_at_s = max(self._earliest_s, now + self._spread_out(self._interval_s))

    def _hurry(self, at_s: float) -> None:
        self.due_at_s = min(self.due_at_s, max(at_s, self._earliest_s))

    def _spread_out(self, wait_s: float) -> float:
        return wait_s * self._random.uniform(0.75, 1.25)
