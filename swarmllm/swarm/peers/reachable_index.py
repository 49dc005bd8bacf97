"""Keeps who is reachable up to date as events come: asking costs what has changed since the last time.

Whoever changes what the answer depends on (a record, the outcome of a dial, a connection) says of which node
(`changed`). The index looks at those nodes when it is asked next, and at nodes of which time alone has made
something else: they are in a heap, by when that is.

Pure: the clock comes in as `now`, in seconds, and does not run backwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Final

from swarmllm_proto.identifiers import NodeId

UNTRIED_MAX: Final = 256
TURN_S: Final = 60.0
TURN_NODES: Final = 16
"""While there are more than UNTRIED_MAX, so many make room for others once in TURN_S. So each of a few
thousand has its turn within hours, and few records come or go at once."""


class ContactState(Enum):
    CONNECTED = "connected"
    TRIED = "tried"
    UNTRIED = "untried"


@dataclass(frozen=True, slots=True)
class Look:
    """What there is to know of one node."""

    contact: ContactState
    from_s: float
    """From then on it is reachable, unless something changes; infinite: it is not."""


Needed = Callable[[], Iterable[Collection[NodeId]]]
"""Sets of nodes that routes of this node could lead over, by their records."""


class ReachableIndex:
    def __init__(self, look: Callable[[NodeId], Look], *, untried_max: int = UNTRIED_MAX) -> None:
        self._look = look
        self._untried_max = untried_max
        self._changed: dict[NodeId, None] = {}
        self._due: list[tuple[float, NodeId]] = []
        self._due_s: dict[NodeId, float] = {}
        """When each node is to be looked at again; what the heap says otherwise is out of date."""
        self._of_contact: dict[ContactState, dict[NodeId, None]] = {contact: {} for contact in ContactState}
        """The reachable ones. Of the untried, those that have waited longest for their turn come first."""
        self._first: set[NodeId] = set()
        """Those of them that were needed."""
        self._turn_due_s: float | None = None
        self.reachable: frozenset[NodeId] = frozenset()
        self.untried: frozenset[NodeId] = frozenset()
        """The reachable ones that were never connected, `untried_max` at most."""

    def __repr__(self) -> str:
        counts = (f"{len(nodes)} {contact.value}" for contact, nodes in self._of_contact.items())
        return f"<ReachableIndex {' '.join(counts)}>"

    def changed(self, node_id: NodeId) -> None:
        """Something of it may be different."""
        self._changed[node_id] = None

    def settle(self, now: float, needed: Needed) -> None:
        """Bring `reachable` and `untried` up to date. Where there are more than `untried_max`, the needed
        come first, and then the others, each in turn."""
        self._changed.update(dict.fromkeys(self._take_due(now)))
        changed, self._changed = self._changed, {}
        has_moved = False
        for node_id in changed:
            has_moved |= self._place(node_id, now)
        all_untried = self._of_contact[ContactState.UNTRIED]
        if len(all_untried) <= self._untried_max:
            self._turn_due_s = None
            chosen = frozenset(all_untried) if has_moved else self.untried
        else:
            has_moved |= self._take_turns(now)
            first = {node_id for nodes in needed() for node_id in all_untried.keys() & nodes}
            chosen = self._chosen(first) if has_moved or first != self._first else self.untried
            self._first = first
        if has_moved or chosen != self.untried:
            self.untried = chosen
            connected, tried = self._of_contact[ContactState.CONNECTED], self._of_contact[ContactState.TRIED]
            self.reachable = frozenset((*connected, *tried, *chosen))

    def _take_due(self, now: float) -> list[NodeId]:
        found: list[NodeId] = []
        while self._due and self._due[0][0] < now:
            from_s, node_id = heapq.heappop(self._due)
            if self._due_s.get(node_id) == from_s:
                found.append(node_id)
        return found

    def _place(self, node_id: NodeId, now: float) -> bool:
        """Whether it is reachable in another way than before."""
        look = self._look(node_id)
        is_reachable = now > look.from_s
        if is_reachable or look.from_s == float("inf"):
            self._due_s.pop(node_id, None)
        elif self._due_s.get(node_id) != look.from_s:
            self._due_s[node_id] = look.from_s
            heapq.heappush(self._due, (look.from_s, node_id))
        has_moved = False
        for contact, nodes in self._of_contact.items():
            is_here = is_reachable and contact is look.contact
            if is_here != (node_id in nodes):
                has_moved = True
                if is_here:
                    nodes[node_id] = None
                else:
                    del nodes[node_id]
        return has_moved

    def _take_turns(self, now: float) -> bool:
        if self._turn_due_s is None or now < self._turn_due_s:
            self._turn_due_s = self._turn_due_s or now + TURN_S
            return False
        self._turn_due_s = now + TURN_S
        untried = self._of_contact[ContactState.UNTRIED]
        for node_id in list(islice((each for each in untried if each in self.untried), TURN_NODES)):
            del untried[node_id]
            untried[node_id] = None
        return True

    def _chosen(self, first: set[NodeId]) -> frozenset[NodeId]:
        untried = self._of_contact[ContactState.UNTRIED]
        n_others = self._untried_max - len(first)
        if n_others < 0:
            return frozenset(islice((each for each in untried if each in first), self._untried_max))
        others = islice((each for each in untried if each not in first), n_others)
        return frozenset((*first, *others))
