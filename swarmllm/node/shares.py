"""Which models that other nodes share are placed on this node, and until when.

What is in a record is only a wish of its writer. This node follows it if its configuration accepts that
writer, for a bounded number of models, of which each writer has an equal part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import NodeRecord

ACCEPTED_MAX = 16
"""Shared models that are placed here at the same time."""
GONE_S = 600.0
"""A share of a node that is not connected any more holds for so long."""
SILENT_S = 60.0
"""And one of a node that is connected and says nothing of shares: it has just started, or shares no more."""
MEMBERS = "members"


@dataclass(slots=True)
class AcceptedShares:
    """State over time; `follow` is called with each look. No I/O."""

    accept: Collection[str]
    """Node ids, or `members` for every node that may work."""
    seen_s: dict[ModelId, dict[NodeId, float]] = field(default_factory=dict)
    """Model -> who shares it -> when that was last read in a record."""

    def follow(self, own: NodeId, records: Mapping[NodeId, NodeRecord], now_s: float) -> tuple[ModelId, ...]:
        """The models that count now. `records`: of this node and of those that are connected and trusted."""
        offered = {
            node_id: list(dict.fromkeys(share.model_id for share in record.shares or ()))
            for node_id, record in sorted(records.items())
            if node_id == own or MEMBERS in self.accept or node_id in self.accept
        }
        for model_id, sharers in list(self.seen_s.items()):
            for node_id, at_s in list(sharers.items()):
                said = records[node_id].shares if node_id in records else UNSET
                withdrawn = said is not UNSET and model_id not in offered.get(node_id, ())
                if withdrawn or now_s - at_s > (SILENT_S if node_id in records else GONE_S):
                    del sharers[node_id]
            if not sharers:
                del self.seen_s[model_id]
        # The first of each node, then the second of each: nobody can take all the places at once.
        for nth in range(max(map(len, offered.values()), default=0)):
            for node_id in sorted(offered, key=lambda node_id: (node_id != own, node_id)):
                if nth >= len(offered[node_id]):
                    continue
                model_id = offered[node_id][nth]
                if model_id in self.seen_s or len(self.seen_s) < ACCEPTED_MAX:
                    self.seen_s.setdefault(model_id, {})[node_id] = now_s
        return tuple(self.seen_s)
