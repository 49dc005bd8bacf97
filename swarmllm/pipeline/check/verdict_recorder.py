"""Charges nodes for checked work: trust, doubts of routes, counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.swarm.peers.trust import EARNED_MIN, NodeTrust, TrustEvent
from swarmllm_proto.identifiers import NodeId

CERTAIN: Final = 3
"""Others that contradict a node."""
NODES_MAX: Final = 1024
OTHERS_MAX: Final = 16


class Contradictions:
    """Counts which nodes contradict each other. One of two neighbours lies, and a single contradiction does
    not show which.

    Pure. Routes then separate the two, so an honest node meets the liar once, and the liar meets a new honest
    node each time. The liar is the node that several others contradict, none of which anybody else
    contradicts. Only nodes that have earned trust count as others: identities that cost nothing must not be
    able to outvote a node.
    """

    def __init__(self) -> None:
        self._by: dict[NodeId, list[NodeId]] = {}

    def add(self, one: NodeId, other: NodeId, has_earned: Callable[[NodeId], bool]) -> NodeId | None:
        """The one of the two that lies, if that is certain by now; then it begins anew."""
        counts = {node_id: has_earned(node_id) for node_id in (one, other)}
        for node_id, by in ((one, other), (other, one)):
            known = self._by.pop(node_id, [])
            if counts[by] and by not in known:
                known = [*known, by][-OTHERS_MAX:]
            self._by[node_id] = known
        while len(self._by) > NODES_MAX:
            del self._by[next(iter(self._by))]
        for node_id in (one, other):
            alone = [by for by in self._by[node_id] if set(self._by.get(by, ())) <= {node_id}]
            if len(alone) >= CERTAIN:
                self._forget(node_id)
                return node_id
        return None

    def _forget(self, node_id: NodeId) -> None:
        del self._by[node_id]
        for known in self._by.values():
            if node_id in known:
                known.remove(node_id)


@dataclass(slots=True)
class VerdictRecorder:
    node_id: NodeId
    """This node's."""
    trust: NodeTrust
    suspects: Suspects
    counts: PipelineStatistics
    _contradictions: Contradictions = field(default_factory=Contradictions)

    def wrong(self, node_id: NodeId, detail: str) -> None:
        self.counts.checked += 1
        self.counts.checks_wrong += 1
        self._failed(node_id)
        self.trust.note(node_id, TrustEvent.WRONG_RESULT, detail)

    def dispute(self, node_id: NodeId, other: NodeId) -> None:
        """One of them lies: both lose a little, and routes do without both as far as they can."""
        self.counts.checked += 1
        self.counts.checks_disputed += 1
        pair = {node_id, other} - {self.node_id}
        for each in sorted(pair):
            self.trust.note(each, TrustEvent.DISPUTED, f"with {max(pair - {each}, default=other)}")
        self.suspects.doubt(sorted(pair), trio.current_time())

    def contradict(self, node_id: NodeId, other: NodeId) -> None:
        """The same of neighbours, who say different things of the rows between them. Who is contradicted by
        several is the liar."""
        liar = self._contradictions.add(node_id, other, self._has_earned)
        self.dispute(node_id, other)
        if liar is not None:
            self.wrong(liar, "several others say otherwise")

    def bad_rows(self, node_id: NodeId) -> None:
        """It has signed for rows that no layer computes."""
        self._failed(node_id)
        self.trust.note(node_id, TrustEvent.BAD_NUMBERS, "it committed to rows that were refused")

    def no_evidence(self, node_id: NodeId) -> None:
        """It announces that it commits to its rows, and did not of rows that were refused."""
        self.trust.note(node_id, TrustEvent.FAILED, "no evidence of rows that were refused")
        self.suspects.doubt([node_id], trio.current_time())

    def silent(self, node_id: NodeId) -> None:
        """It announces that it commits to its rows, and committed to none. Its worker may have no room to
        keep them."""
        self.trust.note(node_id, TrustEvent.DISPUTED, "it committed to none of its rows")
        self.suspects.doubt([node_id], trio.current_time())

    def _failed(self, node_id: NodeId) -> None:
        now_s = trio.current_time()
        self.suspects.doubt([node_id], now_s)
        self.suspects.newcomers.failed([node_id], self.trust.score, now_s)

    def _has_earned(self, node_id: NodeId) -> bool:
        return node_id == self.node_id or self.trust.score(node_id) >= EARNED_MIN
