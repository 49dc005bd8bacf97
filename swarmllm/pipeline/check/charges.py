"""Charges nodes for checked work: trust, doubts of routes, counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from swarmllm.pipeline.check.contradictions import Contradictions
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.swarm.peers.trust import EARNED_MIN, Deed, NodeTrust
from swarmllm_proto.identifiers import NodeId


@dataclass(slots=True)
class Charges:
    node_id: NodeId
    """This node's."""
    trust: NodeTrust
    suspects: Suspects
    counts: PipelineStatistics
    _contradictions: Contradictions = field(default_factory=Contradictions)

    def wrong(self, node_id: NodeId, detail: str) -> None:
        self.counts.checked += 1
        self.counts.checks_wrong += 1
        self.trust.note(node_id, Deed.WRONG_RESULT, detail)
        self.suspects.doubt([node_id], trio.current_time())

    def dispute(self, node_id: NodeId, other: NodeId) -> None:
        """One of them lies: both lose a little, and routes do without both as far as they can."""
        self.counts.checked += 1
        self.counts.checks_disputed += 1
        pair = {node_id, other} - {self.node_id}
        for each in sorted(pair):
            self.trust.note(each, Deed.DISPUTED, f"with {max(pair - {each}, default=other)}")
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
        self.trust.note(node_id, Deed.BAD_NUMBERS, "it committed to rows that were refused")
        self.suspects.doubt([node_id], trio.current_time())

    def no_evidence(self, node_id: NodeId) -> None:
        """It announces that it commits to its rows, and did not of rows that were refused."""
        self.trust.note(node_id, Deed.FAILED, "no evidence of rows that were refused")
        self.suspects.doubt([node_id], trio.current_time())

    def silent(self, node_id: NodeId) -> None:
        """It announces that it commits to its rows, and committed to none. Its worker may have no room to
        keep them."""
        self.trust.note(node_id, Deed.DISPUTED, "it committed to none of its rows")
        self.suspects.doubt([node_id], trio.current_time())

    def _has_earned(self, node_id: NodeId) -> bool:
        return node_id == self.node_id or self.trust.score(node_id) >= EARNED_MIN
