"""Decides which load a node tells everybody in a large swarm, and when: pure.

A load that changes with every request is worth nothing to nodes that hear of it seconds later and may never
ask this one. They are told what lasts: a load counts once it has been as high, or as low, for LASTS_S. Who
uses this node hears each change on its data connection, and a stage says what it has to do when it accepts.

All nodes together may tell such news LOADS_PER_S times a second, as they share the heartbeats.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import msgspec

from swarmllm_proto.node_load import NodeLoad

LASTS_S: Final = 10.0
LOADS_PER_S: Final = 0.5
"""Of the whole swarm, over time."""
BURST: Final = 4.0
"""News of one node that may follow each other at once. The last one is kept for less load than was told:
others do without a node that they take for busy, and nobody would find out."""


class SustainedLoad:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self) -> None:
        self._told = NodeLoad()
        self._steps: deque[tuple[float, NodeLoad]] = deque()
        """(since when, load): that of LASTS_S ago, if it was known then, and those that followed."""
        self._left = BURST
        self._left_at_s = -math.inf

    def __repr__(self) -> str:
        return f"<SustainedLoad told {self._told}>"

    def note(self, load: NodeLoad, now: float) -> None:
        """The node's load from now on. The first one counts at once, and as told."""
        if not self._steps:
            self._told = load
        self._forget_old(now)
        if not self._steps or load != self._steps[-1][1]:
            self._steps.append((now, load))

    def at(self, now: float) -> NodeLoad:
        """Each number as it was told, or the nearest to that which it has been since LASTS_S ago."""
        self._forget_old(now)
        recent = [msgspec.structs.astuple(load) for _, load in self._steps]
        return NodeLoad(
            *(
                min(max(told, min(numbers, default=told)), max(numbers, default=told))
                for told, *numbers in zip(msgspec.structs.astuple(self._told), *recent, strict=True)
            )
        )

    def _forget_old(self, now: float) -> None:
        while len(self._steps) > 1 and now >= self._steps[1][0] + LASTS_S:
            self._steps.popleft()

    def told(self, load: NodeLoad) -> None:
        """Everybody has been told this."""
        self._told = load

    def is_due(self, now: float, n_nodes: int) -> bool:
        """Whether to tell `at` now, which then counts as told as news. `n_nodes`: of the swarm."""
        needed = self._needed(now)
        if not needed or self._left_at(now, n_nodes) < needed:
            return False
        self._left, self._left_at_s = self._left_at(now, n_nodes) - 1.0, now
        return True

    def look_at_s(self, now: float, n_nodes: int) -> float:
        """When `is_due` may say something else; infinite: not before the next `note`."""
        needed = self._needed(now)
        look_at_s = self._steps[1][0] + LASTS_S if len(self._steps) > 1 else math.inf
        if needed:
            missing = max(1e-3, needed - self._left_at(now, n_nodes))
            look_at_s = min(look_at_s, now + missing * _each_s(n_nodes))
        return look_at_s

    def _needed(self, now: float) -> float:
        """How many of BURST must be left for what is to be told; 0: there is nothing to tell."""
        before, after = _levels(self._told), _levels(self.at(now))
        if before == after:
            return 0.0
        return 1.0 if all(new <= old for old, new in zip(before, after, strict=True)) else 2.0

    def _left_at(self, now: float, n_nodes: int) -> float:
        if self._left_at_s == -math.inf:
            return self._left
        return min(BURST, self._left + (now - self._left_at_s) / _each_s(n_nodes))


def _each_s(n_nodes: int) -> float:
    return max(1, n_nodes) / LOADS_PER_S


def _levels(load: NodeLoad) -> tuple[int, ...]:
    """What routes should know of it: each is higher where there is more to do. 0, 1, 2 and 3, 4 to 7
    and so on are alike, and all that is free but nothing."""
    requests = load.active_requests, load.stage_requests, load.queued_requests
    return (*(number.bit_length() for number in requests), int(not load.free_slots))
