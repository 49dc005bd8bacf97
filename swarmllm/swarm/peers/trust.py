"""Computes this node's trust in others: a number in [0, 1] per node id, from what this node itself has seen.

Everybody starts at NEUTRAL. Work that was verified raises it a little, in ever smaller steps; failures and
lies lower it by a factor. Either way it drifts back to NEUTRAL, by half in HALF_LIFE_S, so that an old fault
is not held against anybody for ever and an old merit does not last either. What others say about a node is
not asked for: a number that strangers can vote on is a number that strangers decide.

A new identity costs nothing, so distrust only keeps a node from getting *worse* than a stranger; that is why
what matters (hashes, digests, exact numbers) is checked whatever the trust.

Pure: time comes in (seconds since the epoch). `trust_keeper.py` stores it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from swarmllm.swarm.membership.peer_lists import NO_LISTS, PeerLists
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId

NEUTRAL: Final = 0.5
HALF_LIFE_S: Final = 7 * 86_400.0
WORK_MIN: Final = 0.25
"""Below it, a node gets no part in pipelines and is not asked for bytes."""
CONNECTION_MIN: Final = 0.05
"""Below it, a node gets no connection. Five breaches of the protocol bring a stranger there; the drift to
NEUTRAL takes it back after about half a day."""
EARNED_MIN: Final = 0.55
"""From it on, a node has shown more than an identity that was made a moment ago: a stranger has it after
eleven answers in which its layers took part."""
KEPT_EVENTS: Final = 20
"""Of each node, for the explanation."""
NODES_MAX: Final = 4096


class TrustEvent(StrEnum):
    """What a node did, as seen from here."""

    SERVED = "served"
    GAVE_BYTES = "gave bytes"
    LOST = "lost"
    FAILED = "failed"
    STALLED = "stalled"
    OVERSTATED = "overstated"
    DAMAGED = "damaged"
    BAD_REQUEST = "bad request"
    BROKE_PROTOCOL = "broke protocol"
    FLOODED = "flooded"
    TOO_SLOW = "too slow"
    BAD_NUMBERS = "bad numbers"
    CHECKED = "checked"
    DISPUTED = "disputed"
    WRONG_RESULT = "wrong result"
    WRONG_BYTES = "wrong bytes"


class Note(Protocol):
    """Notes an event that affects trust."""

    def __call__(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None: ...


class NodeTrust(Protocol):
    """The part of the trust book that pipelines use (see trust_keeper)."""

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None: ...

    def score(self, node_id: NodeId) -> float: ...


class NeutralTrust:
    """Treats every node as a stranger, whatever it does."""

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
        pass

    def score(self, node_id: NodeId) -> float:
        return NEUTRAL


def ignored_event(node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
    """For a node that keeps no book."""


class PeerTrust(Protocol):
    """The part of the trust book that the swarm uses (see trust_keeper)."""

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None: ...

    def has_merit(self, node_id: NodeId) -> bool:
        """Whether it is trusted more than a node that was never met."""
        ...

    def may_connect(self, node_id: NodeId) -> bool:
        """Whether a node may have a connection at all."""
        ...


class NoTrust:
    """Trusts everybody alike, and stores nothing."""

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
        return

    def has_merit(self, node_id: NodeId) -> bool:
        return False

    def may_connect(self, node_id: NodeId) -> bool:
        return True


NO_TRUST: Final = NoTrust()


@dataclass(frozen=True, slots=True)
class Effect:
    meaning: str
    rises: float = 0.0
    """Part of the way to 1."""
    keeps: float = 1.0
    """Factor on what there is."""
    floor: float = 0.0
    """It takes nothing from a score that is not above this: where an honest node may be meant, merit is lost
    and nothing else."""
    once_in_s: float = 0.0
    """Further events of the kind within this time are counted and cost nothing: one burst of damage, which
    may be nobody's fault, counts as one event."""


EFFECTS: Final[dict[TrustEvent, Effect]] = {
    TrustEvent.SERVED: Effect("its layers took part in an answer that was completed", rises=0.01),
    TrustEvent.GAVE_BYTES: Effect("it gave a tensor whose hash is right", rises=0.002),
    TrustEvent.LOST: Effect("it disappeared while it had work of ours", keeps=0.97),
    TrustEvent.FAILED: Effect("its part of a request failed", keeps=0.9),
    TrustEvent.STALLED: Effect("it had work of ours, and did none of it", keeps=0.9),
    TrustEvent.OVERSTATED: Effect("it is far slower than it announced", keeps=0.9, floor=NEUTRAL),
    TrustEvent.DAMAGED: Effect("a job arrived from it with a wrong digest", keeps=0.85, once_in_s=3.0),
    TrustEvent.BAD_REQUEST: Effect("it asked for what it should have refused itself", keeps=0.85),
    TrustEvent.BROKE_PROTOCOL: Effect("it sent what the protocol does not allow", keeps=0.6, once_in_s=3.0),
    TrustEvent.FLOODED: Effect("it sent more gossip than an honest node has", keeps=0.6, once_in_s=3.0),
    TrustEvent.TOO_SLOW: Effect("a message came from it too slowly", keeps=0.97, once_in_s=3.0),
    TrustEvent.BAD_NUMBERS: Effect("it sent numbers that are not finite", keeps=0.45),
    TrustEvent.CHECKED: Effect("its results were computed again, and were right", rises=0.01),
    TrustEvent.DISPUTED: Effect(
        "it or another node says what is not so about results", keeps=0.95, floor=NEUTRAL
    ),
    TrustEvent.WRONG_RESULT: Effect("its results were computed again, and were wrong", keeps=0.3),
    TrustEvent.WRONG_BYTES: Effect("it sent bytes of a model whose hash is wrong", keeps=0.45),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One event, to explain a score to people."""

    at: float
    trust_event: TrustEvent
    detail: str
    score: float
    """After it."""


@dataclass(slots=True)
class Reputation:
    score: float = NEUTRAL
    """At `at`; it drifts from there."""
    at: float = 0.0
    counts: dict[TrustEvent, int] = field(default_factory=dict)
    recent: deque[Entry] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    is_unsaved: bool = field(default=False, compare=False)

    def copy(self) -> Reputation:
        return Reputation(self.score, self.at, dict(self.counts), self.recent.copy())


@dataclass(frozen=True, slots=True)
class Explanation:
    score: float
    may_work: bool
    listed: str
    """"allowed", "denied" or empty: then the score was earned."""
    counts: dict[str, int]
    recent: tuple[Entry, ...]
    """Newest first."""


def drifted(score: float, elapsed_s: float) -> float:
    """The score after this long without a event."""
    return float(NEUTRAL + (score - NEUTRAL) * 0.5 ** (max(0.0, elapsed_s) / HALF_LIFE_S))


def after(score: float, event: TrustEvent) -> float:
    effect = EFFECTS[event]
    changed = (score + effect.rises * (1.0 - score)) * effect.keeps
    return min(1.0, max(changed, min(score, effect.floor), 0.0))


def may_work(score: float) -> bool:
    return score >= WORK_MIN


def may_connect(score: float) -> bool:
    return score >= CONNECTION_MIN


def _is_part_of_a_burst(reputation: Reputation, event: TrustEvent, now: float) -> bool:
    once_in_s = EFFECTS[event].once_in_s
    return any(each.trust_event is event and 0 <= now - each.at < once_in_s for each in reputation.recent)


class TrustBook:
    """Every reputation this node has formed; the least recently touched go first when there are too many."""

    def __init__(
        self,
        lists: PeerLists = NO_LISTS,
        peers: Parts[Reputation] | None = None,
        *,
        nodes_max: int = NODES_MAX,
    ) -> None:
        self.lists = lists
        self._nodes_max = nodes_max
        self._known: Parts[Reputation] = Parts.alone() if peers is None else peers

    def __repr__(self) -> str:
        return f"<TrustBook {len(self._known)} nodes>"

    def __len__(self) -> int:
        return len(self._known)

    def restore(self, reputations: Iterable[tuple[NodeId, Reputation]]) -> None:
        """From an earlier run."""
        for node_id, reputation in sorted(reputations, key=lambda known: known[1].at):
            self._put(node_id, reputation)

    def note(self, node_id: NodeId, event: TrustEvent, now: float, detail: str = "") -> float:
        """The score after it."""
        reputation = self._known.get(node_id) or Reputation(at=now)
        if _is_part_of_a_burst(reputation, event, now):
            reputation.counts[event] = reputation.counts.get(event, 0) + 1
            self._put(node_id, reputation)
            return reputation.score
        score = after(drifted(reputation.score, now - reputation.at), event)
        reputation.score, reputation.at = score, max(now, reputation.at)
        reputation.counts[event] = reputation.counts.get(event, 0) + 1
        reputation.recent.append(Entry(now, event, detail[:200], score))
        self._put(node_id, reputation)
        return score

    def score(self, node_id: NodeId, now: float) -> float:
        """0 or 1 for a listed node; else what it has earned."""
        if node_id in self.lists.deny:
            return 0.0
        if node_id in self.lists.allow:
            return 1.0
        known = self._known.get(node_id)
        return NEUTRAL if known is None else drifted(known.score, now - known.at)

    def known(self) -> frozenset[NodeId]:
        """The nodes that have a reputation here."""
        return frozenset(self._known)

    def reputation(self, node_id: NodeId) -> Reputation | None:
        return self._known.get(node_id)

    def explain(self, node_id: NodeId, now: float) -> Explanation:
        known = self._known.get(node_id) or Reputation()
        listed = "denied" if node_id in self.lists.deny else "allowed" if node_id in self.lists.allow else ""
        score = self.score(node_id, now)
        counts = {str(event): n for event, n in known.counts.items()}
        return Explanation(score, may_work(score), listed, counts, tuple(reversed(known.recent)))

    def unsaved(self) -> dict[NodeId, Reputation]:
        return {node_id: each for node_id, each in self._known.items() if each.is_unsaved}

    def _put(self, node_id: NodeId, reputation: Reputation) -> None:
        self._known.put_last(node_id, reputation)
        if len(self._known) > self._nodes_max:
            self._known.drop_first()
