"""Remembers nodes that routes should avoid for a while.

Pure: the clock comes in as `now_s`.

Three kinds. *Doubts* are this node's own: a pipeline failed, and which of its nodes is to blame cannot be
known. They last until the node takes part in an answer that is completed, or for some minutes, twice as many
with each relapse. *Accusations* are hearsay. And newcomers, all together (see newcomers.py).

A node that loses a pipeline tells everybody at once (PipelineError), so that other nodes' next requests avoid
it. Because this is hearsay, a suspect is only avoided while there are others, for some seconds, and until it
connects anew at most; the accusations of one node are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarmllm.errors import NoPipeline
from swarmllm.pipeline.route.newcomers import Newcomers
from swarmllm_proto.identifiers import NodeId

SUSPECT_S = 15.0
"""By then this node has noticed by itself, if it is true."""
DOUBT_S = 300.0
"""A stage that stays silent costs a request minutes; to do without one that is sound costs little, and only
where there are others."""
REPEATS_MAX = 4
"""So often a doubt lasts twice as long as the one before it: 80 minutes at most."""
REPEAT_S = 24 * 3600.0
"""After a doubt has run out, for so long another one is a relapse."""
DOUBTED_MAX = 256
SPARED_MAX = 16
"""Routes that are looked for to do without some suspects, where there is none without all of them."""
MAX_PER_ACCUSER = 8
MAX_ACCUSERS = 256


Route = TypeVar("Route")


@dataclass(slots=True)
class Suspects:
    _until_s: dict[NodeId, dict[NodeId, float]] = field(default_factory=dict)
    """By accuser and suspect."""
    _doubts: dict[NodeId, tuple[float, int]] = field(default_factory=dict)
    """By node: until when, and how many."""
    _repeats: dict[NodeId, tuple[int, float]] = field(default_factory=dict)
    """By node: how many of its doubts have run out one after the other, and until when that counts."""
    newcomers: Newcomers = field(default_factory=Newcomers)

    def doubt(self, node_ids: Iterable[NodeId], now_s: float) -> None:
        """One of these let a pipeline of this node fail. Who does so again after its last doubt has run out
        is avoided for twice as long."""
        self._forget_old(now_s)
        for node_id in node_ids:
            _, count = self._doubts.pop(node_id, (0.0, 0))
            n_repeats, _ = self._repeats.get(node_id, (0, 0.0))
            self._doubts[node_id] = now_s + DOUBT_S * 2**n_repeats, count + 1
        while len(self._doubts) > DOUBTED_MAX:
            del self._doubts[next(iter(self._doubts))]

    def served(self, node_id: NodeId) -> None:
        """It took part in an answer that was completed: one relapse is made up for."""
        self._doubts.pop(node_id, None)
        n_repeats, until_s = self._repeats.pop(node_id, (0, 0.0))
        if n_repeats > 1:
            self._repeats[node_id] = n_repeats - 1, until_s

    def accuse(self, accuser: NodeId, node_id: NodeId, now_s: float) -> None:
        self._forget_old(now_s)
        if accuser not in self._until_s and len(self._until_s) >= MAX_ACCUSERS:
            return
        said = self._until_s.setdefault(accuser, {})
        if node_id in said or len(said) < MAX_PER_ACCUSER:
            said[node_id] = now_s + SUSPECT_S

    def clear(self, node_id: NodeId) -> None:
        """It has come, or come back."""
        for said in self._until_s.values():
            said.pop(node_id, None)

    def now(self, now_s: float) -> frozenset[NodeId]:
        return frozenset(self.ordered(now_s))

    def ordered(self, now_s: float, trust: Callable[[NodeId], float] = lambda node_id: 0.0) -> list[NodeId]:
        """The same, the most doubtful first: doubts weigh less, the more a node is trusted (`trust`: 0 to 1).
        A node that has served long takes part in many pipelines, and so in many that break; one that breaks
        them may have a new name each time."""
        self._forget_old(now_s)
        heard = {node_id for said in self._until_s.values() for node_id in said}
        doubts = {node_id: count for node_id, (_, count) in self._doubts.items()}
        return by_doubts(dict.fromkeys(heard, 0) | doubts, trust)

    def _forget_old(self, now_s: float) -> None:
        for node_id in [node_id for node_id, (until_s, _) in self._doubts.items() if until_s <= now_s]:
            ended_s, _ = self._doubts.pop(node_id)
            n_before, _ = self._repeats.pop(node_id, (0, 0.0))
            self._repeats[node_id] = min(n_before + 1, REPEATS_MAX), ended_s + REPEAT_S
        old = [node_id for node_id, (_, until_s) in self._repeats.items() if until_s <= now_s]
        for node_id in [*old, *list(self._repeats)[:-DOUBTED_MAX]]:
            self._repeats.pop(node_id, None)
        for accuser, said in list(self._until_s.items()):
            for node_id in [node_id for node_id, until_s in said.items() if until_s <= now_s]:
                del said[node_id]
            if not said:
                del self._until_s[accuser]


def by_doubts(doubts: Mapping[NodeId, int], trust: Callable[[NodeId], float]) -> list[NodeId]:
    """The most doubtful first: `doubts` is how many pipelines broke with a node, `trust` is 0 to 1."""
    weights = {node_id: count * (1 - trust(node_id)) for node_id, count in doubts.items()}
    return sorted(weights, key=lambda node_id: (-weights[node_id], trust(node_id), node_id))


def sparing(
    choose: Callable[[set[NodeId]], Route], avoid: Collection[NodeId], suspects: Sequence[NodeId]
) -> Route:
    """What `choose` gives without the nodes to avoid and without as many suspects as can be spared, the first
    ones above all. `choose` raises NoPipeline where there is no route; so does this where there is none even
    with all suspects."""
    without = set(avoid)
    suspects = [node_id for node_id in suspects if node_id not in without]
    try:
        return choose(without.union(suspects))
    except NoPipeline:
        chosen = choose(without)
    for node_id in suspects[:SPARED_MAX]:
        try:
            chosen = choose(without | {node_id})
        except NoPipeline:
            continue
        without.add(node_id)
    return chosen
