"""Decides which models that other nodes share are placed on this node, and until when.

A share in a record is only a wish of the record's writer. This node follows it if its configuration accepts
that writer, for a bounded number of models, divided equally among writers. Each model that a writer shares
for the first time, or again after it could not be fetched, is charged to that writer's allowance.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import NodeCapability, NodeRecord

ACCEPTED_MAX = 16
"""Shared models that are placed here at the same time."""
GONE_S = 600.0
"""A share of a node that is not connected any more holds for so long."""
SILENT_S = 60.0
"""And one of a node that is connected and says nothing of shares: it has just started, or shares no more."""
MEMBERS = "members"
PRIVATE = "private"
ALLOWANCE = 8.0
"""Models that a writer may bring at once; `ALLOWANCE_PER_S` come back."""
ALLOWANCE_PER_S = 1 / 600
REFUSED_S = 600.0
"""For so long a model that could not be fetched is not tried again; twice as long after each further time."""
REFUSED_MAX_S = 86400.0
REFUSED_MAX = 256
"""Models of which it is known that they could not be fetched; the oldest are forgotten."""


def accepted_writers(accept: Collection[str], *, is_private: bool) -> tuple[str, ...]:
    """What a configuration means on this node: node ids, or `members`. `is_private`: the swarm is."""
    said = [each for each in accept if each != PRIVATE]
    if PRIVATE in accept and is_private:
        said.append(MEMBERS)
    return tuple(dict.fromkeys(said))


def accepts(said: NodeCapability, writer: NodeId) -> bool:
    """Whether a node says that it takes part in what `writer` shares."""
    writers = said.accepts_shares_of or ()
    return MEMBERS in writers or writer in writers


@dataclass(slots=True)
class _Refused:
    until_s: float
    n_times: int


@dataclass(slots=True)
class _Allowance:
    left: float
    at_s: float


@dataclass(slots=True)
class AcceptedShares:
    """State over time; `follow` is called with each look. No I/O."""

    accept: Collection[str]
    """Node ids, or `members` for every node that may work."""
    places: int = ACCEPTED_MAX
    seen_s: dict[ModelId, dict[NodeId, float]] = field(default_factory=dict)
    """Model -> who shares it -> when that was last read in a record."""
    _refused: dict[ModelId, _Refused] = field(default_factory=dict)
    _allowances: dict[NodeId, _Allowance] = field(default_factory=dict)

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
                if model_id in self.seen_s or self._may_begin(model_id, node_id, own, now_s):
                    self.seen_s.setdefault(model_id, {})[node_id] = now_s
        self._forget_full_allowances(now_s)
        return tuple(self.seen_s)

    def cannot_be_fetched(self, model_id: ModelId, now_s: float) -> None:
        """Its place is for another model until it may be tried again."""
        before = self._refused.pop(model_id, _Refused(0.0, 0))
        pause_s = min(REFUSED_S * 2**before.n_times, REFUSED_MAX_S)
        self._refused[model_id] = _Refused(now_s + pause_s, min(before.n_times + 1, 16))
        self.seen_s.pop(model_id, None)
        while len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def was_fetched(self, model_id: ModelId) -> None:
        self._refused.pop(model_id, None)

    def _may_begin(self, model_id: ModelId, writer: NodeId, own: NodeId, now_s: float) -> bool:
        if len(self.seen_s) >= self.places:
            return False
        if writer == own:
            return True
        refused = self._refused.get(model_id)
        if refused is not None and now_s < refused.until_s:
            return False
        allowance = self._allowances.get(writer) or _Allowance(ALLOWANCE, now_s)
        left = _left(allowance, now_s)
        if left < 1:
            return False
        self._allowances[writer] = _Allowance(left - 1, now_s)
        return True

    def _forget_full_allowances(self, now_s: float) -> None:
        full = [node_id for node_id, each in self._allowances.items() if _left(each, now_s) >= ALLOWANCE]
        for node_id in full:
            del self._allowances[node_id]


def _left(allowance: _Allowance, now_s: float) -> float:
    return min(ALLOWANCE, allowance.left + (now_s - allowance.at_s) * ALLOWANCE_PER_S)
