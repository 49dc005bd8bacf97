"""Whom to dial, when, and which address answers first: the full mesh of a swarm, grown from one address.

Addresses come from three places: the settings (bootstrap), mDNS, and the envelopes of nodes heard of.
A peer that is known and not connected is dialled, with a back-off that doubles and jitters; news of a node
(an envelope, an mDNS answer) starts it afresh. Of two nodes that learn of each other at once, the one with
the smaller id dials and the other holds back a moment. `Dialler` decides and `run` acts; the decisions are
pure and take the time as an argument.

A node has several addresses: of every network it is in, of bridges that nobody else reaches, of yesterday.
py-libp2p dials one of them, and never one of the loopback if there are others. So those are raced here as
in RFC 8305 (`first_to_answer`): the next one is tried as soon as the one before has failed, or has not
answered for a moment.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.supervision import spawn
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.peers.connection_limits import EVERYBODY, ConnectionAdmission, Standing
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

PEERS_MAX = 256
"""Connections looked for, unless the settings say otherwise; a larger swarm is not a full mesh."""
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


@dataclass(eq=False)
class DialCandidate:
    addresses: list[Address] = field(default_factory=list)
    lasting: bool = False
    """From the settings: never given up."""
    patience: float = math.inf
    """Failures in a row after which it is given up."""
    n_failures: int = 0
    due_at_s: float = 0.0
    dialling_since_s: float | None = None


Dial = Callable[[NodeId, list[Address]], Awaitable[None]]
"""Raises NodeUnreachable, Unanswering."""


class Unanswering(NodeUnreachable):
    """There is a connection, and no answer in time."""


class Dialler:
    def __init__(
        self,
        node_id: NodeId,
        randomness: random.Random,
        peers_max: int = PEERS_MAX,
        admission: ConnectionAdmission = EVERYBODY,
        peers: Parts[DialCandidate] | None = None,
    ) -> None:
        """Strangers are no reason not to dial whom this node knows: they give way (see connection_limits)."""
        self._admission = admission
        self._node_id = node_id
        self._random = randomness
        self._candidates: Parts[DialCandidate] = Parts.alone() if peers is None else peers
        self._news = trio.Event()
        self._n_dials_max = DIALS_FIRST
        self._peers_max = peers_max

    def suggest(
        self,
        node_id: NodeId,
        addresses: Iterable[Address],
        now: float,
        *,
        lasting: bool = False,
        patience: float = math.inf,
    ) -> None:
        """This node may be found there; newest first. Not a reason to hurry if it was known.

        `patience`: failures in a row after which this suggestion is given up; the longest one counts.
        """
        if node_id == self._node_id:
            return
        candidate = self._candidates.get(node_id)
        if candidate is None:
            if len(self._candidates) >= CANDIDATES_MAX and not lasting:
                return
            hold_back_s = 0.0 if lasting or self._node_id < node_id else HOLD_BACK_S
            candidate = DialCandidate(due_at_s=now + hold_back_s, patience=patience)
            self._candidates.put(node_id, candidate)
        candidate.lasting |= lasting
        candidate.patience = max(candidate.patience, patience)
        fresh = list(dict.fromkeys(Address(a.ip, a.port) for a in addresses))
        old = [a for a in candidate.addresses if a not in fresh]
        if set(fresh) - set(candidate.addresses):
            candidate.n_failures = 0
            candidate.due_at_s = min(candidate.due_at_s, now + HOLD_BACK_S)
        candidate.addresses = [*fresh, *old][:ADDRESSES_PER_NODE]
        self.wake()

    def lost(self, node_id: NodeId, now: float, *, on_purpose: bool) -> None:
        """A connection ended. A node that said goodbye is not called back at once."""
        if (candidate := self._candidates.get(node_id)) is not None:
            candidate.n_failures = 3 if on_purpose else 0
            candidate.due_at_s = now + self._backoff_s(candidate)
            self.wake()

    def forget(self, node_id: NodeId) -> None:
        candidate = self._candidates.get(node_id)
        if candidate is not None and not candidate.lasting:
            self._candidates.drop(node_id)

    def due(self, now: float, connected: set[NodeId]) -> tuple[list[tuple[str, list[Address]]], float]:
        """(whom to dial now, when to ask again). The ones returned count as being dialled until `dialled`."""
        n_dialling = sum(c.dialling_since_s is not None for c in self._candidates.values())
        room = self._n_dials_max - n_dialling
        n_places = self._peers_max - len(connected)
        ready: list[tuple[str, list[Address]]] = []
        next_s = math.inf
        for node_id, candidate in self._candidates.items():
            if node_id in connected or candidate.dialling_since_s is not None or not candidate.addresses:
                continue
            if candidate.due_at_s > now:
                next_s = min(next_s, candidate.due_at_s)
            elif len(ready) < room and (len(ready) < n_places or self._may_push_in(node_id, connected)):
                candidate.dialling_since_s = now
                ready.append((node_id, list(candidate.addresses)))
        return ready, next_s

    def _may_push_in(self, node_id: NodeId, connected: set[NodeId]) -> bool:
        n_known = sum(self._admission.standing(each) > Standing.STRANGER for each in connected)
        return n_known < self._peers_max and self._admission.standing(node_id) > Standing.STRANGER

    def dialled(self, node_id: NodeId, now: float, *, succeeded: bool, unanswered: bool = False) -> None:
        if (candidate := self._candidates.get(node_id)) is not None:
            since_s, candidate.dialling_since_s = candidate.dialling_since_s, None
            if since_s is not None and (succeeded or unanswered):
                self._learn(now - since_s)
            candidate.n_failures = 0 if succeeded else candidate.n_failures + 1
            candidate.due_at_s = now + self._backoff_s(candidate)
            if candidate.n_failures >= candidate.patience and not candidate.lasting:
                self._candidates.drop(node_id)
        self.wake()

    def _learn(self, took_s: float) -> None:
        if took_s >= SLOW_S:
            self._n_dials_max = max(1, self._n_dials_max // 2)
        elif took_s <= QUICK_S:
            self._n_dials_max = min(DIALS_MAX, self._n_dials_max + 1)

    async def run(self, dial: Dial, connected: Callable[[], set[NodeId]]) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                self._news = trio.Event()
                ready, next_s = self.due(trio.current_time(), connected())
                for node_id, addresses in ready:
                    spawn(nursery, "peer", self._try, dial, node_id, addresses)
                # Asked again now and then in any case: a connection may end without a word to anybody.
                with trio.move_on_at(min(next_s, trio.current_time() + BACKOFF_MAX_S)):
                    await self._news.wait()

    async def _try(self, dial: Dial, node_id: NodeId, addresses: list[Address]) -> None:
        succeeded = unanswered = False
        try:
            await dial(node_id, addresses)
            succeeded = True
        except NodeUnreachable as error:
            unanswered = isinstance(error, Unanswering)
            log.debug("%s", error)
        finally:
            self.dialled(node_id, trio.current_time(), succeeded=succeeded, unanswered=unanswered)

    def _backoff_s(self, candidate: DialCandidate) -> float:
        longest_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * float(2 ** min(candidate.n_failures, 16)))
        return longest_s * self._random.uniform(0.5, 1.0)

    def wake(self) -> None:
        """Who is connected has changed."""
        self._news.set()


HEAD_START_S = 0.25
CONNECT_S = 8.0


async def first_to_answer(addresses: Sequence[Address]) -> tuple[Address, trio.SocketStream]:
    """Raises NodeUnreachable where none does."""
    answered: list[tuple[Address, trio.SocketStream]] = []

    async def connect(address: Address, failed: trio.Event) -> None:
        try:
            stream = await trio.open_tcp_stream(address.ip, address.port)
        except OSError:
            failed.set()
            return
        answered.append((address, stream))
        racing.cancel()

    with trio.move_on_after(CONNECT_S) as racing:
        async with trio.open_nursery() as nursery:
            for address in addresses:
                failed = trio.Event()
                nursery.start_soon(connect, address, failed)
                with trio.move_on_after(HEAD_START_S):
                    await failed.wait()
    if not answered:
        raise NodeUnreachable(f"none of {', '.join(map(str, addresses))} answers")
    for _, late in answered[1:]:
        await trio.aclose_forcefully(late)
    return answered[0]
