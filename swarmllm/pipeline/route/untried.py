"""Decides when a route leads over nodes with which there has been no connection yet.

Pure: the clock comes in as `now_s`.

A record proves only that somebody has a key, and keys cost nothing. So a request does without such nodes
where that costs it little. Where its route would take much longer without them, it takes the better one: a
node with few connections would otherwise use the few nodes that it happens to be connected with until it has
dialled the right ones. A node that is not there costs that request one dial in vain. After it, requests do
without untried nodes for a while, for longer each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from swarmllm.pipeline.route.assembly import Assembly
from swarmllm_proto.identifiers import NodeId

GAIN: Final = 1.1
"""So many times longer must the route without untried nodes take."""
DIAL_S: Final = 0.12
"""What a new connection costs a request: two round trips, between nodes that are neither near nor far."""
PAUSE_S: Final = 60.0
PAUSE_MAX_S: Final = 3600.0
"""After a dial in vain; twice as long after each that follows."""


@dataclass(slots=True)
class UntriedNodes:
    """Whether requests of this node may depend on them now."""

    pause_max_s: float = PAUSE_MAX_S
    _n_failures: int = 0
    _until_s: float = -math.inf

    @property
    def has_failed(self) -> bool:
        """More of them have failed than others have made up for."""
        return self._n_failures > 0

    def may_be_taken(self, now_s: float) -> bool:
        return now_s >= self._until_s

    def failed(self, now_s: float) -> None:
        """A request was to go over one, and it could not be reached."""
        if self.may_be_taken(now_s):
            self._until_s = now_s + min(self.pause_max_s, PAUSE_S * 2.0 ** min(self._n_failures, 16))
            self._n_failures += 1

    def accepted(self) -> None:
        """One that a request was to go over has taken it."""
        self._n_failures = max(0, self._n_failures - 1)


def unless_much_longer(
    find: Callable[[Sequence[NodeId]], Assembly], suspects: Sequence[NodeId], untried: Collection[NodeId]
) -> Assembly:
    """What `find` gives without as many untried nodes as can be spared, or with them where that takes much
    less time. `find` is given nodes to do without where there are others, the most doubtful first, and says
    what its route takes (`cost_s`). Raises what it raises."""
    best = find(suspects)
    if best.node_ids.isdisjoint(untried):
        return best
    # Where it cannot do without all of them, neither may it go a long way round to do without some.
    spared = find((*suspects, *(node_id for node_id in untried if node_id not in suspects)))
    return best if spared.cost_s > GAIN * best.cost_s + DIAL_S else spared
