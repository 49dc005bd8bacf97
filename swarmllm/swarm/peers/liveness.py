"""Decides which peers are connected, in one place.

A peer counts from the moment its records have been exchanged (so a reader that sees it connected also sees
its record) until the first of
  - its data connection is lost: it died, froze or lost its network, and messages may be missing;
  - it said goodbye;
  - it is the one that gives way where there are too many (see connection_limits);
  - libp2p lost it and did not find it again for some seconds, or at once where there is no data connection;
  - it froze before there was a data connection (see control_keepalive).
Then everything that leads to it is closed together, its pending requests fail, and the dialler starts over.
In the last case the connection is kept for a while: a peer that was only slow counts again when it speaks.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import trio

from swarmllm.errors import DeadlineExceeded, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.supervision import spawn
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.data.data_plane import DataPlane
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import Dialler, NodeUnresponsive
from swarmllm.swarm.libp2p.control_keepalive import ControlKeepalive
from swarmllm.swarm.libp2p.host import Host
from swarmllm.swarm.libp2p.request_protocol import RequestProtocol
from swarmllm.swarm.peers.connection_limits import (
    ADMIT_ALL,
    CONNECTIONS_MAX,
    GAVE_WAY,
    LET_GO,
    Candidate,
    ConnectionAdmission,
    network_of,
    who_gives_way,
)
from swarmllm.swarm.peers.early_connections import EarlyConnections, is_slow
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.records.exchange import KIND_LET_GO
from swarmllm.swarm.router import Change
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

EXCHANGES_MAX = 12
"""At once. A node that everybody finds at the same moment answers them one after the other, instead of all
of them too late."""

_TURN_S = 2.0
"""How long an exchange of records holds up others. A few peers that answer nothing would otherwise have all
the turns."""
_EXCHANGE_RETRY_S = (0.2, 0.5, 1.0, 2.0, 4.0)
_NO_ANSWERS_MAX = 12
"""A peer that does not answer in time is slow, not strange, and asked again this often."""
_DIAL_AND_EXCHANGE_S = 45.0
_LIBP2P_GRACE_S = 30.0
"""How long a healthy data connection carries a peer that libp2p has lost."""
_SILENT_TOO_LONG_S = 15.0
"""For its connection to be kept, after it has ceased to count. A new one would cost two busy nodes more."""
GUESTS_MAX = 16
GUEST_S = 5.0
"""Where all places are taken, so many newcomers stay for so long: time enough to ask this node whom it knows,
and to look for a place elsewhere."""
_FAREWELL_S = 1.0
_SURPLUS_S = 2.0
"""Between looks at a peer with more than one connection."""


@dataclass(eq=False, slots=True)
class PeerLiveness:
    """What is under way with a peer; kept while anything is."""

    exchange: trio.Event | None = None
    """There while records are being exchanged; set afterwards."""
    is_thinning: bool = False
    """A task waits for surplus connections to fall idle."""
    gives_way: bool = False
    """Its connections are being ended for want of places, or it is a guest."""
    lets_go: bool = False
    """It has said that it ends its connections with this node, and lives on."""
    has_work: bool = False
    """There is work with it, for which a data connection is being made, or will be once it counts."""

    @property
    def is_empty(self) -> bool:
        return self.exchange is None and not (
            self.is_thinning or self.gives_way or self.lets_go or self.has_work
        )


@dataclass(frozen=True, slots=True)
class LivenessParts:
    connected_since_s: Parts[float] = field(default_factory=Parts.alone)
    """By trio's clock, of the peers that count as connected, those of longest standing first. The only place
    that says who is."""
    attempts: Parts[PeerLiveness] = field(default_factory=Parts.alone)


class Liveness:
    """`exchange_records(node_id)` raises an error of our tree when the peer does not answer as a node."""

    def __init__(
        self,
        host: Host,
        nursery: trio.Nursery,
        feed: ChangeFeed,
        dialler: Dialler,
        requests: RequestProtocol,
        exchange_records: Callable[[NodeId], Awaitable[None]],
        admission: ConnectionAdmission = ADMIT_ALL,
        parts: LivenessParts | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._host = host
        self._nursery = nursery
        self._feed = feed
        self._dialler = dialler
        self._requests = requests
        self._admission = admission
        self._connections_max = connections_max
        self._exchange_records = exchange_records
        parts = parts or LivenessParts()
        self._peers = parts.attempts
        self.connected = parts.connected_since_s
        self._exchanges = trio.Semaphore(EXCHANGES_MAX)
        self._keepalives = ControlKeepalive(host.muxers, nursery)
        self._data = EarlyConnections(host.node_id, self.connected)
        self._plane: DataPlane | None = None

    def begin(self, plane: DataPlane) -> None:
        self._plane = plane
        self._data.begin(plane)
        self._host.watch_peers(self)

    async def exchanged(self, node_id: NodeId) -> None:
        """Returns when no exchange of records with the peer is under way."""
        if (exchange := self._exchange_of(node_id)) is not None:
            await exchange.wait()

    async def dial(self, node_id: NodeId, addresses: list[Address]) -> None:
        """Returns once the node counts as connected, so that a caller that limits dials limits all that
        follows from them. Raises NodeUnreachable, NodeUnresponsive."""
        await self._host.dial(node_id, addresses)
        with trio.move_on_after(_DIAL_AND_EXCHANGE_S):
            await self.exchanged(node_id)
        if node_id not in self.connected:
            raise NodeUnresponsive(f"node {node_id} takes a connection and does not answer")

    def drop(self, node_id: NodeId, how: str) -> None:
        """The peer is gone, or as good as gone. With LET_GO, or where it has said so, only its connections
        are."""
        peer = self._peers.get(node_id)
        if peer is not None and peer.lets_go:
            how, peer.lets_go = LET_GO, False
            self._settle(node_id)
        self._count_no_more(node_id, how)
        if self._plane is not None:
            self._plane.close(node_id, how)
        if how == LET_GO:
            self._dialler.let_go(node_id, trio.current_time())
        else:
            self._dialler.lost(node_id, trio.current_time(), on_purpose=how in ("goodbye", GAVE_WAY))
        spawn(self._nursery, "peer", self._host.close_hard, node_id)

    def peer_lets_go(self, node_id: NodeId) -> None:
        """It says so; its connections are about to end."""
        if node_id in self.connected:
            self._peer(node_id).lets_go = True

    def staying(self) -> list[NodeId]:
        """The connected peers that have not said that they end their connections."""
        leaving = {node_id for node_id, peer in self._peers.items() if peer.lets_go}
        return [node_id for node_id in self.connected if node_id not in leaving]

    def _peer(self, node_id: NodeId) -> PeerLiveness:
        return self._peers.get(node_id) or self._peers.put(node_id, PeerLiveness())

    def _settle(self, node_id: NodeId) -> None:
        """Nothing is kept of a peer of which there is nothing to say."""
        peer = self._peers.get(node_id)
        if peer is not None and peer.is_empty:
            self._peers.drop(node_id)

    def _exchange_of(self, node_id: NodeId) -> trio.Event | None:
        peer = self._peers.get(node_id)
        return None if peer is None else peer.exchange

    def _count(self, node_id: NodeId) -> None:
        self.connected.put_last(node_id, trio.current_time())
        self._dialler.answered(node_id)
        if (peer := self._peers.get(node_id)) is not None:
            peer.lets_go = False
            self._settle(node_id)
        provoked_by(log, node_id).info("node %s connected", node_id)
        self._feed.announce(Change("connected", node_id))

    def _count_no_more(self, node_id: NodeId, how: str) -> None:
        was_connected = self.connected.drop(node_id) is not None
        if how != LET_GO:
            self._dialler.doubt(node_id, trio.current_time())
        self._requests.lose(node_id)
        if was_connected:
            provoked_by(log, node_id).info("node %s disconnected: %s", node_id, how)
            self._feed.announce(Change("disconnected", node_id))

    def libp2p_connected(self, node_id: NodeId) -> None:
        self._gives_way_no_more(node_id)
        if self._make_room(node_id) == node_id:
            return
        peer = self._peer(node_id)
        if not peer.is_thinning and self._host.surplus(node_id):
            peer.is_thinning = True
            spawn(self._nursery, "peer", self._thin_out, node_id, failed=partial(self._has_failed, node_id))
        if peer.exchange is None and node_id != self._host.node_id:
            peer.exchange = trio.Event()
            spawn(
                self._nursery,
                "peer",
                self._count_when_answered,
                node_id,
                failed=partial(self._has_failed, node_id),
            )
        self._settle(node_id)
        self._dialler.met(node_id)

    def _gives_way_no_more(self, node_id: NodeId) -> None:
        if (peer := self._peers.get(node_id)) is not None:
            peer.gives_way = False
            self._settle(node_id)

    def _make_room(self, newcomer: NodeId) -> NodeId | None:
        """The node that had to give way for the connection that has just been made."""
        counted = self._host.n_connections()
        leaving = {node_id for node_id, peer in self._peers.items() if peer.gives_way}
        staying = {node_id: n for node_id, n in counted.items() if node_id not in leaving}
        if sum(staying.values()) <= self._connections_max:
            return None
        node_id = self._who_gives_way(staying)
        self._peer(node_id).gives_way = True
        if node_id != newcomer:
            self.drop(node_id, GAVE_WAY)
            return node_id
        guests = {each: n for each, n in counted.items() if each in leaving or each == newcomer}
        if len(guests) > GUESTS_MAX:
            self.drop(self._who_gives_way(guests), GAVE_WAY)
        if newcomer in self._peers:
            spawn(self._nursery, "peer", self._see_off, newcomer)
        return newcomer

    def _who_gives_way(self, n_of_each: Mapping[NodeId, int]) -> NodeId:
        standing, remote_ip = self._admission.standing, self._host.remote_ip
        return who_gives_way(
            Candidate(node_id, standing(node_id), network_of(remote_ip(node_id)), n)
            for node_id, n in n_of_each.items()
        )

    async def _see_off(self, guest: NodeId) -> None:
        """It is answered as everybody is, and does not count."""
        await trio.sleep(GUEST_S)
        peer = self._peers.get(guest)
        if peer is None or not peer.gives_way or not self._host.is_connected(guest):
            return
        try:
            # Else it would dial again at once, and be a guest again.
            await self._requests.request(guest, KIND_LET_GO, b"", timeout_s=_FAREWELL_S)
        except SwarmLLMError as error:
            provoked_by(log, guest).debug("guest %s was not told that it is let go: %s", guest, error)
        self.drop(guest, GAVE_WAY)

    async def _thin_out(self, node_id: NodeId) -> None:
        """Two nodes that dial each other at the same moment, or of which one has missed the end of a
        connection, have two. They cost as much as one each, for as long as both live."""
        try:
            while self._host.surplus(node_id):
                await trio.sleep(_SURPLUS_S)
                await self._host.end_idle_surplus(node_id)
        finally:
            self._thinned_out(node_id)

    def _thinned_out(self, node_id: NodeId) -> None:
        if (peer := self._peers.get(node_id)) is not None:
            peer.is_thinning = False
            self._settle(node_id)

    async def _count_when_answered(self, node_id: NodeId) -> None:
        began_s = trio.current_time()
        try:
            is_new = await self._answers_as_a_node(node_id) and (
                self._host.is_connected(node_id) and node_id not in self.connected
            )
            took_s = trio.current_time() - began_s
            if is_new:
                self._count(node_id)
            elif node_id not in self.connected:
                self._lost_early(node_id)
        finally:
            peer = self._peers.get(node_id)
            has_work = peer is not None and peer.has_work
            self._end_exchange(node_id)
        if is_new:
            spawn(
                self._nursery,
                "peer",
                self._watch,
                node_id,
                took_s,
                failed=partial(self._has_failed, node_id),
            )
            if not has_work:
                await self._data.reach_early(node_id, took_s)
        if has_work:
            await self._data.reach(node_id)

    def _lost_early(self, node_id: NodeId) -> None:
        """Its record may be here, and then routes may lead there."""
        if self._dialler.lost_early(node_id, trio.current_time()):
            self._feed.announce(Change("reachable", node_id))

    def _end_exchange(self, node_id: NodeId) -> None:
        if (exchange := self._exchange_of(node_id)) is not None:
            peer = self._peer(node_id)
            peer.exchange, peer.has_work = None, False
            self._settle(node_id)
            exchange.set()

    def _has_failed(self, node_id: NodeId, error: Exception) -> None:
        """By an error in this file: the peer's connections end, and it is dialled anew."""
        # A task that fails where it begins has not done this itself.
        self._end_exchange(node_id)
        self._thinned_out(node_id)
        self.drop(node_id, "an error here")

    async def _answers_as_a_node(self, node_id: NodeId) -> bool:
        waits_s, n_unanswered = list(_EXCHANGE_RETRY_S), 0
        while self._host.is_connected(node_id):
            try:
                await self._exchange_in_turn(node_id)
            except SwarmLLMError as error:
                provoked_by(log, node_id).debug("exchanging records with %s: %s", node_id, error)
                if isinstance(error, DeadlineExceeded):
                    n_unanswered += 1
                    self._lost_early(node_id)
                if n_unanswered == _NO_ANSWERS_MAX or not (waits_s or isinstance(error, DeadlineExceeded)):
                    break
                wait_s = _EXCHANGE_RETRY_S[-1] if isinstance(error, DeadlineExceeded) else waits_s.pop(0)
            else:
                return True
            await trio.sleep(wait_s * random.uniform(0.75, 1.25))
        else:
            return False
        provoked_by(log, node_id).info("peer %s does not answer as a node; letting it go", node_id)
        await self._host.close_hard(node_id)
        return False

    async def _exchange_in_turn(self, node_id: NodeId) -> None:
        await self._exchanges.acquire()
        over = trio.Event()
        spawn(self._nursery, "peer", self._hold_turn, over)
        try:
            await self._exchange_records(node_id)
        finally:
            over.set()

    async def _hold_turn(self, over: trio.Event) -> None:
        try:
            with trio.move_on_after(_TURN_S):
                await over.wait()
        finally:
            self._exchanges.release()

    def warm(self, node_id: NodeId) -> None:
        """There is work with that peer, or there may be soon: have a data connection, as soon as it
        counts."""
        self._keepalives.used(node_id)
        if self._exchange_of(node_id) is not None:
            self._peer(node_id).has_work = True
        elif node_id in self.connected and not (self._data.has(node_id) or self._peer(node_id).has_work):
            self._peer(node_id).has_work = True
            spawn(self._nursery, "peer", self._reach_for_work, node_id)

    async def _reach_for_work(self, node_id: NodeId) -> None:
        try:
            await self._data.reach(node_id)
        finally:
            if (peer := self._peers.get(node_id)) is not None:
                peer.has_work = False
                self._settle(node_id)

    async def _watch(self, node_id: NodeId, exchange_took_s: float) -> None:
        """Until there is a data connection, the end of which is the end of the peer. A slow one is at rest
        until something is asked of it: pings would keep two busy nodes busier."""
        since_s = self.connected.get(node_id)

        def is_over() -> bool:
            return self._data.has(node_id) or self.connected.get(node_id) != since_s

        pings_first = self._host.node_id < node_id
        begins_at_rest = is_slow(exchange_took_s) or self._data.are_enough()
        while since_s is not None and await self._keepalives.falls_silent(
            node_id, is_over, pings_first=pings_first, begins_at_rest=begins_at_rest
        ):
            self._count_no_more(node_id, "silent")
            with trio.move_on_after(_SILENT_TOO_LONG_S) as waiting:
                await self._keepalives.speaks_again(node_id)
            if waiting.cancelled_caught:
                self.drop(node_id, "silent for too long")
                return
            is_exchanging_again = self._exchange_of(node_id) is not None or node_id in self.connected
            if is_exchanging_again or not self._host.is_connected(node_id):
                return
            self._count(node_id)
            spawn(self._nursery, "peer", self._data.reach_early, node_id)
            since_s = self.connected.get(node_id)

    def libp2p_disconnected(self, node_id: NodeId) -> None:
        self._gives_way_no_more(node_id)
        self._dialler.wake()
        if node_id not in self.connected:
            return
        if self._data.has(node_id):
            self._dialler.lost(node_id, trio.current_time(), on_purpose=False)
            spawn(
                self._nursery,
                "peer",
                self._await_libp2p,
                node_id,
                failed=partial(self._has_failed, node_id),
            )
        else:
            self.drop(node_id, "libp2p lost it")

    async def _await_libp2p(self, node_id: NodeId) -> None:
        await trio.sleep(_LIBP2P_GRACE_S)
        if node_id in self.connected and not self._host.is_connected(node_id):
            self.drop(node_id, "libp2p lost it and did not find it again")
