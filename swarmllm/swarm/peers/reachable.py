"""Decides which nodes requests can use, connected or not, and connects with them when there is work.

A node keeps few connections (`network.max_peers`) and knows many nodes. One with which there is none counts
as reachable while its record is fresh (`EnvelopeBook` forgets it otherwise) and nothing says that a dial
would fail: it was not lost since its last sign of life, nor dialled in vain lately
(`Dialler.may_answer_from_s`). It
is dialled when a request, a message or a link is to go there. Such a connection stays while it is used, and
for `IDLE_S` more; then this node ends it, where it has more connections than it looks for.

A reachable node may be dead, or never have been: a record proves its writer's key, and keys cost nothing. A
dial in vain costs the request that makes it, and no other. So what was never connected is `untried`: routes
do without such nodes where that costs little, and at most `UNTRIED_MAX` of them count. Where there are more,
those count first that the routes of this node could need, and the others in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from swarmllm.errors import DeadlineExceeded, NodeUnreachable
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.dialler import Dialler
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable_index import UNTRIED_MAX, ContactState, Look, Needed, ReachableIndex
from swarmllm.swarm.router import Change
from swarmllm_proto.identifiers import NodeId

IDLE_S: Final = 300.0
"""Without a message or request for this long, a connection that was made for work is let go."""
PASSING_S: Final = 10.0
"""The same, of one that was made for a question in the DHT and has had no other use."""


class HeardNodes(Protocol):
    """The part of the envelope book that this module uses."""

    def heard_at_s(self, node_id: NodeId) -> float | None:
        """When a node with a record gave its last sign of life, in seconds of trio's clock; None: it has
        none."""
        ...

    def watch(self, on_change: Callable[[NodeId], None]) -> None:
        """Called with the node when that may be something else."""
        ...


@dataclass(eq=False, slots=True)
class Use:
    """The use of a connection."""

    n_bytes: int
    """Of all messages with that node so far."""
    since_s: float
    """When that number was another one, or a request was made."""
    idle_s: float = IDLE_S
    is_for_gossip: bool = False
    """Neither work nor a question made it."""

    def again(self, now: float) -> None:
        self.since_s, self.idle_s = now, IDLE_S


class ReachableNodes:
    def __init__(
        self,
        book: HeardNodes,
        dialler: Dialler,
        connected: Parts[float],
        feed: ChangeFeed,
        uses: Parts[Use] | None = None,
        untried_max: int = UNTRIED_MAX,
    ) -> None:
        self._book = book
        self._dialler = dialler
        self._connected = connected
        self._feed = feed
        self._uses: Parts[Use] = Parts.alone() if uses is None else uses
        self.needed: Needed = tuple
        self._index = ReachableIndex(self._look, untried_max=untried_max)
        """Told of every change from now on: the three begin empty."""
        for each in (book, dialler, connected):
            each.watch(self._index.changed)
        self._last: frozenset[NodeId] = frozenset()
        self._told_otherwise: set[NodeId] = set()
        """Of which somebody who asked since then was told otherwise than `_last` has it."""

    def __repr__(self) -> str:
        return f"<ReachableNodes {len(self._connected)} connected>"

    def at(self, now: float) -> frozenset[NodeId]:
        """The same object until another node is."""
        was = self._index.reachable
        self._index.settle(now, self.needed)
        reachable = self._index.reachable
        if reachable is not was:
            self._told_otherwise |= reachable ^ self._last
        return reachable

    def untried(self, now: float) -> frozenset[NodeId]:
        """Those of them with which there has been no connection."""
        self.at(now)
        return self._index.untried

    def _look(self, node_id: NodeId) -> Look:
        if node_id in self._connected:
            return Look(ContactState.CONNECTED, -math.inf)
        contact = ContactState.TRIED if self._dialler.is_tried(node_id) else ContactState.UNTRIED
        heard_at_s = self._book.heard_at_s(node_id)
        if heard_at_s is None:
            return Look(contact, math.inf)
        return Look(contact, self._dialler.may_answer_from_s(node_id, heard_at_s))

    async def reach(self, node_id: NodeId, timeout_s: float, *, in_passing: bool = False) -> None:
        """Returns when there is a connection; `in_passing`: for one question. Raises NodeUnreachable,
        DeadlineExceeded."""
        if node_id in self._connected:
            return
        if node_id not in self.at(trio.current_time()):
            raise NodeUnreachable(f"node {node_id} is not connected")
        dialling = self._dialler.want(node_id, trio.current_time())
        try:
            await dialling.within(timeout_s, f"node {node_id} was not reached")
        except DeadlineExceeded:
            self._dialler.doubt(node_id, trio.current_time())
            self._feed.announce(Change("reachable", node_id))
            raise
        except NodeUnreachable:
            self._feed.announce(Change("reachable", node_id))
            raise
        now = trio.current_time()
        self._uses.put(node_id, Use(0, now, PASSING_S) if in_passing else Use(0, now))

    def used(self, node_id: NodeId, now: float) -> None:
        """A request goes there, or has come from there."""
        if (use := self._uses.get(node_id)) is not None:
            use.again(now)

    def met_in_passing(self, node_id: NodeId, now: float) -> None:
        """A connection with it was made for one question, just now."""
        use = self._uses.get(node_id)
        # It may have been looked at already.
        if use is None or use.is_for_gossip:
            self._uses.put(node_id, Use(0, now, PASSING_S))

    def idle(
        self, n_bytes: dict[NodeId, int], n_surplus: int, now: float, kept: Container[NodeId] = ()
    ) -> list[NodeId]:
        """Of at most `n_surplus` nodes that were dialled for work or in passing: those without any for the
        longest time, without those in `kept`. `n_bytes`: of all messages with each connected node so
        far. Others that are connected are taken down as there for gossip."""
        for node_id, use in list(self._uses.items()):
            if node_id not in n_bytes:
                # One that was dialled may have been so lately that records are still being exchanged.
                if use.is_for_gossip or now - use.since_s >= IDLE_S:
                    self._uses.drop(node_id)
            elif n_bytes[node_id] != use.n_bytes:
                use.n_bytes = n_bytes[node_id]
                use.again(now)
        for node_id in n_bytes:
            if node_id not in self._uses:
                self._uses.put(node_id, Use(n_bytes[node_id], now, is_for_gossip=True))
        found = sorted(
            (use.since_s, node_id)
            for node_id, use in self._uses.items()
            if not use.is_for_gossip
            and now - use.since_s >= use.idle_s
            and node_id in n_bytes
            and node_id not in kept
        )
        return [node_id for _, node_id in found[: max(0, n_surplus)]]

    def announce_changes(self, now: float) -> None:
        """Publishes changes of reachability that time alone causes. It includes nodes that were reachable
        only for a moment, because somebody may have asked in that moment."""
        self._last = self.at(now)
        told_otherwise, self._told_otherwise = self._told_otherwise, set()
        for node_id in told_otherwise:
            self._feed.announce(Change("reachable", node_id))
