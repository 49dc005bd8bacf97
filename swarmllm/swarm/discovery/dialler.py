"""Decides which nodes to dial and when. Keeps a few connections for gossip, and those that callers need.

Addresses come from three places: the settings (bootstrap), mDNS, and the envelopes of nodes heard of. A peer
that is known and not connected is dialled, with a back-off that doubles and jitters, until there are
`peers_max` connections. A lost peer is dialled once soon after, however many there are: a connection may end
between two that live. After that one of them is dialled every few seconds, or, beyond `peers_max`, every
minute: two parts of a swarm that were separated have connections enough each, and would never meet again. A
new address of a node (an envelope, an mDNS answer) starts the back-off afresh. The peers are drawn by lot: a
graph in which each node has drawn a few others is connected, and no node is everybody's neighbour. When two
nodes learn of each other at once, the one with the smaller id dials and the other holds back a moment. A node
that a caller needs is dialled at once, however many connections there are (`want`).

A node that was lost is taken for dead until there is a sign of life, and one that could not be dialled for a
while (`may_answer_from_s`).
`Dialler` decides and `run` acts; the decisions are pure and take the time as an argument.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.supervision import Outcome, spawn
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.peers.connection_limits import ADMIT_ALL, ConnectionAdmission, Standing
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

PEERS_MAX = 16
"""Connections looked for, unless the settings say otherwise; a larger swarm is not a full mesh. Gossip needs
6 to 12."""
WANTED_MAX = 64
"""Nodes that callers wait for at once."""
EAGER_PEERS = 4
"""So many connections are made as fast as can be: gossip and exchanges of records need no more. Those beyond
are made one by one: two hundred nodes that start together have other things to do with their processors."""
EAGER_PEERS_SLOW = 2
"""Where the last dial was slow: others have no connection yet, and wait for the same processors."""
UNHURRIED_S = 2.0
"""Between two of them, on average, at least."""
UNHURRIED_SHARE = 20.0
UNHURRIED_MAX_S = 60.0
"""So many times as long as the last dial took, where that is longer: dials are slow where the nodes have no
processor time, or no network, to spare."""
CANDIDATES_MAX = 4096
ADDRESSES_PER_NODE = 12
DIALS_FIRST = 2
DIALS_MAX = 8
"""At once: so many to begin with, one more after each that was quick, half as many after each that was slow.
Fifty nodes that start together would otherwise all be so busy with each other that every exchange ran into
its deadline and was made again, for ever."""
QUICK_S = 1.0
SLOW_S = 3.0
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
HOLD_BACK_S = 3.0
LET_GO_S = 60.0
GATHER_S = 0.2
GATHER_UNHURRIED_S = 2.0
GATHER_FROM = 32
"""Where so many nodes are known, what becomes known within GATHER_S is looked at together, unless a caller
waits: each look is at all of them, and a newcomer hears of all within seconds. With EAGER_PEERS connections
it is within GATHER_UNHURRIED_S, since no other is looked for sooner."""
REDIAL_S = 3.0
REDIAL_SHARE = 5.0
"""A lost node is dialled so often, on average, or so many times as rarely as the last dial took. Without a
connection the next sign of life of one that lives may be minutes away."""
REDIAL_FULL_S = 60.0
"""The same, for those that were dialled in vain since, while all places are taken."""
DOUBT_FIRST_S = 2.0
DOUBT_MAX_S = 600.0
"""A sign of life that comes so soon after a node was lost may have been under way for as long. After a dial
that failed the node is not counted on for that time, which doubles with each while it gives signs of life:
some nodes live where this one cannot reach them."""


@dataclass(eq=False)
class DialCandidate:
    addresses: list[Address] = field(default_factory=list)
    is_permanent: bool = False
    """From the settings: never given up."""
    max_failures: float = math.inf
    """Failures in a row after which it is given up."""
    n_failures: int = 0
    n_doubts: int = 0
    """Failures in a row, without those of a node that was lost and gave no sign of life: when it comes back,
    they say nothing of whether it can be reached."""
    due_at_s: float = 0.0
    dialling_since_s: float | None = None
    doubted_at_s: float = -math.inf
    """When it was lost, or could not be dialled; before all time where it was connected since."""
    lost_at_s: float = -math.inf
    """When its last connection ended; before all time where there is one."""
    is_tried: bool = False
    """There was a connection with it, and nothing has been wrong since."""
    wanted: Outcome[None] | None = None
    """There while callers wait for it: how the next dial ends."""

    @property
    def was_lost(self) -> bool:
        """It was connected and is no more, whatever was heard of it since."""
        return self.lost_at_s > -math.inf


Dial = Callable[[NodeId, list[Address]], Awaitable[None]]
"""Raises NodeUnreachable, NodeUnresponsive."""


class NodeUnresponsive(NodeUnreachable):
    """The node is connected and did not answer in time."""


class Dialler:
    def __init__(
        self,
        node_id: NodeId,
        randomness: random.Random,
        peers_max: int = PEERS_MAX,
        admission: ConnectionAdmission = ADMIT_ALL,
        peers: Parts[DialCandidate] | None = None,
        heard_at_s: Callable[[NodeId], float | None] = lambda _: None,
    ) -> None:
        """Strangers are no reason not to dial whom this node knows: they give way (see connection_limits).
        `heard_at_s`: when a node gave its last sign of life, if that is known."""
        self._heard_at_s = heard_at_s
        self._admission = admission
        self._node_id = node_id
        self._random = randomness
        self._candidates: Parts[DialCandidate] = Parts.alone() if peers is None else peers
        self._changed = trio.Event()
        self._hurry = trio.Event()
        """Set when a caller waits."""
        self._n_dials_max = DIALS_FIRST
        self._dial_took_s = 0.0
        self._peers_max = peers_max
        self._unhurried_due_s = -math.inf
        """When the next connection beyond EAGER_PEERS may be looked for."""
        self._redial_due_s = -math.inf
        """When a lost node may be dialled next though no place is to be filled."""
        self._redial_full_due_s = -math.inf
        """The same, for one that was dialled in vain since, while all places are taken."""

    def suggest(
        self,
        node_id: NodeId,
        addresses: Iterable[Address],
        now: float,
        *,
        is_permanent: bool = False,
        max_failures: float = math.inf,
    ) -> None:
        """This node may be found there; newest first. Not a reason to hurry if it was known.

        `max_failures`: failures in a row after which this suggestion is given up; the longest one counts.
        """
        if node_id == self._node_id:
            return
        candidate = self._candidates.get(node_id)
        if candidate is None:
            if len(self._candidates) >= CANDIDATES_MAX and not is_permanent:
                return
            hold_back_s = 0.0 if is_permanent or self._node_id < node_id else HOLD_BACK_S
            candidate = DialCandidate(due_at_s=now + hold_back_s, max_failures=max_failures)
            self._candidates.put(node_id, candidate)
        has_changed = is_permanent and not candidate.is_permanent
        candidate.is_permanent |= is_permanent
        candidate.max_failures = max(candidate.max_failures, max_failures)
        fresh = list(dict.fromkeys(Address(a.ip, a.port) for a in addresses))
        old = [a for a in candidate.addresses if a not in fresh]
        if set(fresh) - set(candidate.addresses):
            candidate.n_failures = candidate.n_doubts = 0
            candidate.due_at_s = min(candidate.due_at_s, now + HOLD_BACK_S)
            has_changed = True
        candidate.addresses = [*fresh, *old][:ADDRESSES_PER_NODE]
        # Each record that is heard comes by here, and most say nothing new of where their writers are.
        if has_changed:
            self._candidates.touched(node_id)
            self.wake()

    def lost(self, node_id: NodeId, now: float, *, on_purpose: bool) -> None:
        """A connection ended. A node that said goodbye is not called back at once."""
        if (candidate := self._candidates.get(node_id)) is not None:
            candidate.n_failures = candidate.n_doubts = 3 if on_purpose else 0
            candidate.lost_at_s = now
            self.doubt(node_id, now)
            candidate.due_at_s = now + self._backoff_s(candidate)
            self.wake()

    def let_go(self, node_id: NodeId, now: float) -> None:
        """Its connections ended because nobody used them. It lives, and is not called back at once."""
        if (candidate := self._candidates.get(node_id)) is not None:
            candidate.due_at_s = now + LET_GO_S
            self.wake()

    def doubt(self, node_id: NodeId, now: float) -> None:
        """It does not answer any more, on a connection that is still there."""
        if (candidate := self._candidates.get(node_id)) is not None:
            candidate.doubted_at_s = now
            candidate.is_tried = False
            self._candidates.touched(node_id)

    def lost_early(self, node_id: NodeId, now: float) -> bool:
        """A connection ended before it counted as one, or nothing was answered on it in time. When the node
        is dialled next stays as it was. False where it is not known."""
        candidate = self._candidates.get(node_id)
        if candidate is None:
            return False
        candidate.lost_at_s = now
        self.doubt(node_id, now)
        return True

    def answered(self, node_id: NodeId) -> None:
        """It counts as connected, by either node's dial."""
        if (candidate := self._candidates.get(node_id)) is not None:
            candidate.is_tried = True
            candidate.lost_at_s = -math.inf
            self._candidates.touched(node_id)

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        """Whether its connection has ended, and there was no sign of life since then."""
        candidate = self._candidates.get(node_id)
        return candidate is not None and heard_at_s <= candidate.lost_at_s + DOUBT_FIRST_S

    def is_tried(self, node_id: NodeId) -> bool:
        """Whether it has ever been connected, since it was last lost."""
        candidate = self._candidates.get(node_id)
        return candidate is not None and candidate.is_tried

    def may_answer_from_s(self, node_id: NodeId, heard_at_s: float) -> float:
        """When a dial is worth it, unless something changes: after that time; never where it is infinite.
        `heard_at_s`: its last sign of life."""
        candidate = self._candidates.get(node_id)
        if candidate is None or not candidate.addresses or self.is_lost(node_id, heard_at_s):
            return math.inf
        doubt_s = min(DOUBT_MAX_S, DOUBT_FIRST_S * float(2 ** min(candidate.n_doubts, 16)))
        return candidate.doubted_at_s + doubt_s

    def watch(self, on_change: Callable[[NodeId], None]) -> None:
        """Called with the node when `may_answer_from_s` or `is_tried` may say something else of it."""
        self._candidates.watch(on_change)

    def want(self, node_id: NodeId, now: float) -> Outcome[None]:
        """Dial it now, however many connections there are. How that dial ends: with an error, or it is
        connected, though records may still be exchanged. Raises NodeUnreachable where it is not known where
        that node is, or callers wait for too many."""
        candidate = self._candidates.get(node_id)
        if candidate is None or not candidate.addresses:
            raise NodeUnreachable(f"it is not known where node {node_id} is")
        if candidate.wanted is None:
            if sum(each.wanted is not None for each in self._candidates.values()) >= WANTED_MAX:
                raise NodeUnreachable(f"node {node_id} is not connected, and {WANTED_MAX} are being dialled")
            candidate.wanted = Outcome()
            candidate.due_at_s = now
            self._hurry.set()
            self.wake()
        return candidate.wanted

    def met(self, node_id: NodeId) -> None:
        """There is a connection with it, by either node's dial; records have not been exchanged yet. Callers
        need wait no longer."""
        if (candidate := self._candidates.get(node_id)) is not None:
            self._answer_callers(node_id, candidate, succeeded=True)

    def forget(self, node_id: NodeId) -> None:
        candidate = self._candidates.get(node_id)
        if candidate is not None and not candidate.is_permanent:
            self._candidates.drop(node_id)
            self._answer_callers(node_id, candidate, succeeded=False)

    def due(self, now: float, connected: set[NodeId]) -> tuple[list[tuple[str, list[Address]]], float]:
        """(whom to dial now, when to ask again). The ones returned count as being dialled until `dialled`."""
        dialling = [c for c in self._candidates.values() if c.dialling_since_s is not None]
        n_dialling, is_redialling = len(dialling), any(c.was_lost for c in dialling)
        room = self._n_dials_max - n_dialling
        n_places = self._peers_max - len(connected) - n_dialling
        wanted: list[tuple[NodeId, DialCandidate]] = []
        others: list[tuple[NodeId, DialCandidate]] = []
        next_s = math.inf
        for node_id, candidate in self._candidates.items():
            if candidate.dialling_since_s is not None or not candidate.addresses:
                continue
            if candidate.wanted is not None:
                wanted.append((node_id, candidate))
            elif node_id in connected:
                continue
            elif candidate.due_at_s > now:
                next_s = min(next_s, candidate.due_at_s)
            else:
                others.append((node_id, candidate))
        # Lots are drawn among those only that have a place: strangers are many in a large swarm.
        n_drawn = max(0, min(room, n_places))
        n_eager_max = EAGER_PEERS_SLOW if self._dial_took_s >= SLOW_S else EAGER_PEERS
        n_eager = max(0, n_eager_max - len(connected) - n_dialling)
        if n_drawn > n_eager and others:
            is_due = now >= self._unhurried_due_s
            n_drawn = max(n_eager, int(is_due))
            if is_due:
                pause_s = max(UNHURRIED_S, min(UNHURRIED_MAX_S, UNHURRIED_SHARE * self._dial_took_s))
                self._unhurried_due_s = now + pause_s * self._random.uniform(0.5, 1.5)
            next_s = min(next_s, self._unhurried_due_s)
        if n_drawn:
            others = self._drawn(others)
        picked, others = others[:n_drawn], others[n_drawn:]
        if n_drawn < room and self._has_room_for_known(connected):
            known = [each for each in others if self._is_known(each[0])]
            picked += self._drawn(known)[: room - n_drawn]
        # One at a time: many that answer nothing would otherwise hold all dials up.
        if room > len(picked) and not is_redialling and not any(each[1].was_lost for each in picked):
            again, again_s = self._redialled([each for each in others if each[1].was_lost], n_places, now)
            picked += again
            next_s = min(next_s, again_s)
        chosen = [*wanted, *picked]
        for _, candidate in chosen:
            candidate.dialling_since_s = now
        return [(node_id, list(candidate.addresses)) for node_id, candidate in chosen], next_s

    def _redialled(
        self, lost: list[tuple[NodeId, DialCandidate]], n_places: int, now: float
    ) -> tuple[list[tuple[NodeId, DialCandidate]], float]:
        """(the one of them that is dialled now, when to ask again)"""
        if not lost:
            return [], math.inf
        if n_places <= 0 and now < self._redial_full_due_s:
            lost = [each for each in lost if not each[1].n_failures]
        if not lost:
            return [], self._redial_full_due_s
        if now < self._redial_due_s:
            return [], self._redial_due_s
        node_id, candidate = self._random.choice(lost)
        pause_s = max(REDIAL_S, min(REDIAL_FULL_S, REDIAL_SHARE * self._dial_took_s))
        self._redial_due_s = now + pause_s * self._random.uniform(0.5, 1.5)
        if n_places <= 0 and candidate.n_failures:
            self._redial_full_due_s = now + REDIAL_FULL_S * self._random.uniform(0.5, 1.5)
        return [(node_id, candidate)], self._redial_due_s

    def _drawn(self, candidates: list[tuple[NodeId, DialCandidate]]) -> list[tuple[NodeId, DialCandidate]]:
        """In an order by lot, those of the settings first."""
        if len(candidates) > 1:
            self._random.shuffle(candidates)
            candidates.sort(key=lambda each: not each[1].is_permanent)
        return candidates

    def _has_room_for_known(self, connected: set[NodeId]) -> bool:
        return sum(map(self._is_known, connected)) < self._peers_max

    def _is_known(self, node_id: NodeId) -> bool:
        return self._admission.standing(node_id) > Standing.STRANGER

    def dialled(self, node_id: NodeId, now: float, *, succeeded: bool, unanswered: bool = False) -> None:
        if (candidate := self._candidates.get(node_id)) is not None:
            since_s, candidate.dialling_since_s = candidate.dialling_since_s, None
            if since_s is not None and (succeeded or unanswered):
                self._learn(now - since_s)
            heard_at_s = self._heard_at_s(node_id)
            is_gone = candidate.was_lost and (heard_at_s is None or self.is_lost(node_id, heard_at_s))
            candidate.n_failures = 0 if succeeded else candidate.n_failures + 1
            candidate.n_doubts = 0 if succeeded else candidate.n_doubts + (not is_gone)
            if succeeded:
                candidate.doubted_at_s = -math.inf
                self._candidates.touched(node_id)
            else:
                self.doubt(node_id, now)
            candidate.due_at_s = now + self._backoff_s(candidate)
            self._answer_callers(node_id, candidate, succeeded=succeeded)
            if candidate.n_failures >= candidate.max_failures and not candidate.is_permanent:
                self._candidates.drop(node_id)
        self.wake()

    def _answer_callers(self, node_id: NodeId, candidate: DialCandidate, *, succeeded: bool) -> None:
        wanted, candidate.wanted = candidate.wanted, None
        if wanted is None:
            return
        if succeeded:
            wanted.succeed(None)
        else:
            wanted.fail(NodeUnreachable(f"node {node_id} was dialled and could not be reached"))

    def _learn(self, took_s: float) -> None:
        self._dial_took_s = took_s
        if took_s >= SLOW_S:
            self._n_dials_max = max(1, self._n_dials_max // 2)
        elif took_s <= QUICK_S:
            self._n_dials_max = min(DIALS_MAX, self._n_dials_max + 1)

    async def run(self, dial: Dial, connected: Callable[[], set[NodeId]]) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                self._changed, self._hurry = trio.Event(), trio.Event()
                peers = connected()
                ready, next_s = self.due(trio.current_time(), peers)
                gather_s = GATHER_S if len(peers) < EAGER_PEERS else GATHER_UNHURRIED_S
                for node_id, addresses in ready:
                    spawn(nursery, "peer", self._try, dial, node_id, addresses)
                # Asked again now and then in any case: a connection may end without a word to anybody.
                with trio.move_on_at(min(next_s, trio.current_time() + BACKOFF_MAX_S)):
                    await self._changed.wait()
                    if len(self._candidates) >= GATHER_FROM:
                        with trio.move_on_after(gather_s):
                            await self._hurry.wait()

    async def _try(self, dial: Dial, node_id: NodeId, addresses: list[Address]) -> None:
        succeeded = unanswered = False
        try:
            await dial(node_id, addresses)
            succeeded = True
        except NodeUnreachable as error:
            unanswered = isinstance(error, NodeUnresponsive)
            log.debug("%s", error)
        finally:
            self.dialled(node_id, trio.current_time(), succeeded=succeeded, unanswered=unanswered)

    def _backoff_s(self, candidate: DialCandidate) -> float:
        longest_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * float(2 ** min(candidate.n_failures, 16)))
        return longest_s * self._random.uniform(0.5, 1.0)

    def wake(self) -> None:
        """Who is connected has changed."""
        self._changed.set()
