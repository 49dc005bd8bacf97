"""Decides which newcomers requests may depend on: nodes that have served this node in few answers, or none.

Identities cost nothing, and a record says what its writer likes. So a newcomer that lets a request fail is
one of many that may follow it. After such a failure, requests do without newcomers for a while where there
are others, for longer each time. When the while is over, a request may depend on one newcomer, drawn by lot,
until one of them has served in a completed answer. Those that were in the fewest failures since they last
served are drawn first, also where nobody knows who let a request fail; of these, those that have served. So
none is kept out for ever by those that look better.

Pure: the clock comes in as `now_s`, and chance as `draw`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarmllm.pipeline.route.untried import UntriedNodes
from swarmllm.swarm.peers.trust import EARNED_MIN, NEUTRAL
from swarmllm_proto.identifiers import NodeId

PAUSE_MAX_S: Final = 600.0
"""A stranger may cost this node one attempt in ten minutes; a hundred newcomers are tried in a day."""

FAILED_MAX: Final = 1024
"""Newcomers whose failures are counted; the one whose last failure is the oldest is forgotten."""

Score = Callable[[NodeId], float]
"""How much a node is trusted, 0 to 1."""


@dataclass(slots=True)
class Newcomers:
    _pause: UntriedNodes = field(default_factory=lambda: UntriedNodes(PAUSE_MAX_S))
    _failures: OrderedDict[NodeId, int] = field(default_factory=OrderedDict)
    """Of newcomers since they last served."""

    def failed(self, node_ids: Iterable[NodeId], score: Score, now_s: float) -> None:
        """One of these let a request fail, after it was connected. `score`: before that."""
        newcomers = [node_id for node_id in node_ids if score(node_id) < EARNED_MIN]
        for node_id in newcomers:
            self._failures[node_id] = self._failures.pop(node_id, 0) + 1
        while len(self._failures) > FAILED_MAX:
            self._failures.popitem(last=False)
        if newcomers:
            self._pause.failed(now_s)

    def served(self, node_ids: Collection[NodeId], score: Score) -> None:
        """These took part in an answer that was completed: one that has done so before says nothing of
        newcomers. `score`: before that."""
        for node_id in node_ids:
            self._failures.pop(node_id, None)
        if any(score(node_id) <= NEUTRAL for node_id in node_ids):
            self._pause.accepted()

    def are_trusted(self, now_s: float) -> bool:
        """Whether requests may depend on any of them."""
        return self._pause.may_be_taken(now_s) and not self._pause.has_failed

    def to_spare(
        self,
        holders: Collection[NodeId],
        score: Score,
        now_s: float,
        draw: Callable[[Sequence[NodeId]], NodeId],
    ) -> Iterator[frozenset[NodeId]]:
        """While they are not trusted: sets of newcomers, the largest first. A request does without the first
        that it can do without."""
        scores = {node_id: score(node_id) for node_id in sorted(holders)}
        spared = frozenset(node_id for node_id, each in scores.items() if each < EARNED_MIN)
        unknown = frozenset(node_id for node_id in spared if scores[node_id] <= NEUTRAL)
        if spared and self._pause.may_be_taken(now_s):
            doubts = {
                node_id: (scores[node_id] < NEUTRAL, self._failures.get(node_id, 0), node_id in unknown)
                for node_id in sorted(spared)
            }
            least = min(doubts.values())
            drawn = draw([node_id for node_id, doubt in doubts.items() if doubt == least])
            spared, unknown = spared - {drawn}, unknown - {drawn}
        yield from dict.fromkeys(each for each in (spared, unknown) if each)
