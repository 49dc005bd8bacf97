"""The data plane: ordered messages between neighbours, each over one persistent connection.

Which connection? A node sends to a peer on the connection it already has with it, no matter which side
dialled it; without one it dials the peer's data addresses, and where none answers it opens a libp2p stream.
It stays with that connection until it dies. Two nodes that dial each other at the same moment end up with
two, and each sends on its own at first: nothing has to be agreed on, and order only ever mattered per
direction; later they turn to one of them (see upgrade). When a sender turns to a new connection, what still
arrives on its old one is dropped, so order holds across a reconnection as well (messages may be missing,
never late).

A dialler may ask for a link instead (see pipeline.stage.links): then the connection and one direction's key
are given away to this node's worker, and the data plane has no more to do with it.

A connection lost unexpectedly is a neighbour lost: messages may be gone, and callers that counted on them
should learn of it now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.log_filter import provoked_by
from swarmllm.supervision import contained, spawn, supervise
from swarmllm.swarm.byte_budget import ByteBudget, PayloadRoom, reserve_or_displace
from swarmllm.swarm.data.bulk import Bulk, BulkPeer
from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.data.connection_timer import ConnectionTimer
from swarmllm.swarm.data.holes import Holes, HoleTurn
from swarmllm.swarm.data.neighbour import LinkStatus, Neighbour
from swarmllm.swarm.data.stream_fallback import BULK_PROTOCOL, PROTOCOL, StreamOpening
from swarmllm.swarm.data.transfer_pacing import TransferPacing
from swarmllm.swarm.data.upgrade import Upgrades, ask_for_link, give_link
from swarmllm.swarm.data.wire import HANDSHAKE_S, HandshakeFailed, NoiseWire, Wire, noise_handshake
from swarmllm.swarm.discovery.address_race import first_to_answer
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p.handshake_turns import HandshakeTurns
from swarmllm.swarm.libp2p.host import Host, Stream, open_listeners
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import Identity
from swarmllm.swarm.peers.connection_limits import GAVE_WAY, Standing, who_makes_room
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import Note, ignored_event
from swarmllm.swarm.router import LinkEnd, LinkHandler
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
"""Unless the node has more of libp2p's: every peer that counts has one of each."""
CONNECTIONS_PER_PEER = 6
DIALS_BACK_MAX = 8
"""At once, of peers that have opened a stream."""
HANDSHAKES_MAX = 64
"""Accepted connections of which the peer is not known yet."""

_DIAL_S = 3.0
_BACKOFF_FIRST_S = 0.25
_BACKOFF_MAX_S = 10.0
_TURN_TRIES, _TURN_AGAIN_S = 8, 1.0


class DataPlaneUser(Protocol):
    """Takes the messages that the data plane delivers."""

    def data_addresses_of(self, node_id: NodeId) -> Sequence[Address]:
        """The addresses of a peer's data port."""
        ...

    def own_data_addresses(self) -> Sequence[Address]:
        """Where this node's data port may be found."""
        ...

    def observers(self) -> Sequence[NodeId]:
        """Peers that may say where they see this node, the best first."""
        ...

    async def deliver(self, sender: NodeId, header: bytes, payload: memoryview) -> None: ...

    def lost(self, node_id: NodeId, how: str) -> None:
        """A peer was lost unexpectedly."""
        ...

    def load_came(self, node_id: NodeId, load: bytes) -> None:
        """What a peer has to do, of which `ask_for_load` was asked; empty: it does not tell any more."""
        ...

    async def answer(self, sender: NodeId, body: bytes) -> bytes:
        """Raises RequestRefused."""
        ...


class DataPlane:
    def __init__(
        self,
        identity: Identity,
        gater: ConnectionGater,
        host: Host,
        nursery: trio.Nursery,
        user: DataPlaneUser,
        *,
        note: Note = ignored_event,
        budget: ByteBudget | None = None,
        neighbours: Parts[Neighbour] | None = None,
        bulk_peers: Parts[BulkPeer] | None = None,
        connections_max: int = CONNECTIONS_MAX,
        hole_turns: Parts[HoleTurn] | None = None,
        hole_punching: bool = True,
    ) -> None:
        self.connections_max = max(CONNECTIONS_MAX, connections_max)
        """For twice as many peers, those are forgotten that could not be reached."""
        self._identity = identity
        self._dialling_back: set[NodeId] = set()
        self._budget = budget or ByteBudget()
        self._gater = gater
        self._host = host
        self._nursery = nursery
        self._streams = StreamOpening(host, nursery)
        self._user = user
        self._note = note
        self.bulk = Bulk(
            identity.node_id,
            nursery,
            self,
            self._budget,
            note,
            bulk_peers,
        )
        self._neighbours: Parts[Neighbour] = Parts.alone() if neighbours is None else neighbours
        self.upgrades = Upgrades(self._neighbours, self, identity.node_id)
        self._pacing = TransferPacing()
        self._timer = ConnectionTimer()
        self._handshakes = HandshakeTurns(half_open_max=HANDSHAKES_MAX, stale_s=HANDSHAKE_S / 2)
        self._own_load = b""
        self.port = 0
        self.listening: list[str] = []
        """The IPs it listens on."""
        self._holes = Holes(identity, gater, host, self, hole_turns) if hole_punching else None
        self.on_link: LinkHandler | None = None
        """Takes what peers open; without it links are refused."""

    def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Take connections from now on."""
        self.listening = [each.socket.getsockname()[0] for each in listeners]
        self.port = listeners[0].socket.getsockname()[1]
        supervise(self._nursery, "data port", self._serve_port, list(listeners))
        for protocol in (PROTOCOL, BULK_PROTOCOL):
            self._host.serve(protocol, self._accept_stream)
        supervise(self._nursery, "connection timer", self._timer.run)
        supervise(self._nursery, "connection upgrades", self.upgrades.run)

    async def _serve_port(self, listeners: list[trio.SocketListener]) -> None:
        if not listeners:
            # An earlier life has closed them.
            listeners += await open_listeners(self.listening, self.port)
        life, listeners[:] = list(listeners), []
        await trio.serve_listeners(self._accept, life)

    async def send(self, node_id: NodeId, header: bytes, payload: bytes | memoryview) -> None:
        """Raises NodeUnreachable."""
        neighbour = self._neighbours.get(node_id)
        while neighbour is not None and neighbour.turning is not None:
            await neighbour.turning.wait()
        connection = neighbour.sending if neighbour else None
        if connection is None or not connection.alive:
            connection = await self.reach(node_id)
        self._pacing.message(trio.current_time())
        await connection.send(header, payload)

    def send_now(self, node_id: NodeId, header: bytes, payload: bytes | memoryview) -> bool:
        """`send` where nothing need be waited for. False: it was not sent."""
        neighbour = self._neighbours.get(node_id)
        connection = neighbour.sending if neighbour is not None and neighbour.turning is None else None
        if connection is None or not connection.send_now(header, payload):
            return False
        self._pacing.message(trio.current_time())
        return True

    async def yield_to_messages(self) -> None:
        since_s = trio.current_time()
        # In the first turn it is noticed which messages can be read, in the second they have been.
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        while (wait_s := self._pacing.wait_s(since_s, trio.current_time())) > 0:  # noqa: ASYNC110
            await trio.sleep(wait_s)

    async def reach(self, node_id: NodeId) -> Connection:
        """The connection to send on, established if need be. Raises NodeUnreachable."""
        if len(self._neighbours) >= 2 * self.connections_max:
            self._forget_unreachable()
        neighbour = self._neighbour(node_id)
        async with neighbour.establishing:
            if neighbour.sending is not None and neighbour.sending.alive:
                return neighbour.sending
            live = self._to_send_on(node_id)
            neighbour.sending = live[0] if live else await self._establish(node_id, neighbour)
            return neighbour.sending

    def _to_send_on(self, node_id: NodeId) -> list[Connection]:
        return [c for c in self.connections(node_id) if not c.retired and not c.has_left]

    def dial_beside(self, node_id: NodeId) -> None:
        """Have a direct connection, if there is such a way, while libp2p's is being made. Where there is
        none, `send` looks for another way."""
        if not self.has_connection(node_id) and self.addresses_of(node_id):
            spawn(self._nursery, "connection", self._dial_beside, node_id)

    async def _dial_beside(self, node_id: NodeId) -> None:
        neighbour = self._neighbour(node_id)
        async with neighbour.establishing:
            if neighbour.connections or trio.current_time() < neighbour.retry_at_s:
                return
            connection = await self.dial(node_id)
            if connection is not None and await connection.says_hello():
                neighbour.sending = connection

    def _forget_unreachable(self) -> None:
        for node_id, each in list(self._neighbours.items()):
            if not each.is_in_use:
                self._neighbours.drop(node_id)

    def _neighbour(self, node_id: NodeId) -> Neighbour:
        return self._neighbours.get(node_id) or self._neighbours.put(node_id, Neighbour())

    async def open_link(self, node_id: NodeId, purpose: str) -> LinkEnd:
        """Raises NodeUnreachable."""
        wire = await self._handshake(node_id)
        if wire is None:
            raise NodeUnreachable(f"node {node_id} has no data port that answers")
        return await ask_for_link(node_id, wire, purpose)

    def connections(self, node_id: NodeId) -> list[Connection]:
        """The ones over which messages can pass now."""
        return [c for c in self.all_connections(node_id) if c.alive and c.ready.is_set() and not c.bulk]

    def all_connections(self, node_id: NodeId) -> list[Connection]:
        """Whatever they are for, and whether ready or not."""
        neighbour = self._neighbours.get(node_id)
        return list(neighbour.connections) if neighbour else []

    def used(self, node_id: NodeId) -> None:
        """Something is asked of the node on another way: its data connections do not rest, so that it is
        known soon if it is gone."""
        for connection in self.connections(node_id):
            connection.used()

    def tell_load(self, load: bytes) -> None:
        """What this node has to do: to the peers that have asked for it, and to those that will."""
        self._own_load = load
        for connection in self._receivers():
            if connection.loads.is_asked:
                connection.loads.tell(load)

    def ask_for_load(self, node_id: NodeId) -> None:
        """Where there is a data connection with that node, it tells its load on it, until it ends."""
        live = self.connections(node_id)
        if live and not any(each.loads.has_asked for each in live):
            live[0].loads.ask()

    def _take_load(self, connection: Connection, load: bytes) -> None:
        if load:
            self._user.load_came(connection.node_id, load)
        elif self._own_load:
            connection.loads.tell(self._own_load)

    def watch_while(self, is_working: Callable[[], bool]) -> None:
        """No data connection rests while that is so."""
        self._timer.is_working = is_working

    def has_connection(self, node_id: NodeId) -> bool:
        return bool(self.connections(node_id))

    def status(self, node_id: NodeId) -> LinkStatus:
        neighbour = self._neighbours.get(node_id)
        if neighbour is None:
            return LinkStatus("none", None, 0, 0)
        live = self.connections(node_id)
        used = neighbour.sending if neighbour.sending in live else live[0] if live else None
        return LinkStatus(
            used.wire_kind if used else "none",
            used.rtt_s if used else None,
            neighbour.n_bytes_sent + sum(c.n_bytes_sent for c in neighbour.connections),
            neighbour.n_bytes_received + sum(c.n_bytes_received for c in neighbour.connections),
            # Which connection large messages come over is the peer's choice.
            max((c.throughput.bytes_per_s or 0.0 for c in neighbour.connections), default=0.0) or None,
            used.least_rtt_s if used else None,
        )

    async def turn_to_direct(self, node_id: NodeId) -> None:
        if self._holes is not None:
            self._holes.forgive(node_id)
        self.try_hole(node_id)
        for _ in range(_TURN_TRIES):
            # The first data connection may still be on its way, through the relay.
            if await self.upgrades.upgrade(node_id) or self.status(node_id).kind == "libp2p":
                return
            await trio.sleep(_TURN_AGAIN_S)

    def try_hole(self, node_id: NodeId) -> None:
        """Where messages take a stream, have both ends dial at the same moment, and turn to what comes."""
        is_needed = self.has_connection(node_id) and not self.has_direct(node_id)
        if self._holes is not None and is_needed:
            spawn(self._nursery, "connection", self._try_hole, node_id, self._holes)

    async def _try_hole(self, node_id: NodeId, holes: Holes) -> None:
        wire = await holes.punch(node_id)
        if wire is not None:
            await self._turn_to(node_id, self._start(node_id, wire, dialled=True))

    def came_through_hole(self, node_id: NodeId, wire: NoiseWire, *, dialled: bool) -> None:
        if not self._may_come(node_id):
            wire.abort()
            return
        connection = self._start(node_id, wire, dialled=dialled)
        spawn(self._nursery, "connection", self._turn_to, node_id, connection)

    async def _turn_to(self, node_id: NodeId, connection: Connection) -> None:
        if await connection.says_hello():
            await self.upgrades.upgrade(node_id)

    def has_direct(self, node_id: NodeId) -> bool:
        return any(connection.wire_kind == "direct" for connection in self.connections(node_id))

    def seen_by(self, node_id: NodeId) -> str:
        own = [c for c in self.all_connections(node_id) if c.alive and c.wire.port == self.port]
        return next((connection.seen for connection in own if connection.seen), "")

    def own_addresses(self) -> Sequence[Address]:
        return self._user.own_data_addresses()

    def observers(self) -> Sequence[NodeId]:
        return self._user.observers()

    def forgive(self, node_id: NodeId) -> None:
        """Something has been heard of this peer: the next send may dial at once."""
        if (neighbour := self._neighbours.get(node_id)) is not None:
            neighbour.n_failures, neighbour.retry_at_s = 0, 0.0

    def close(self, node_id: NodeId, how: str) -> None:
        """End every connection with a peer; not reported as a loss."""
        neighbour = self._neighbours.get(node_id)
        if neighbour is not None:
            connections, neighbour.connections = neighbour.connections, set()
            for connection in connections:
                connection.end(how)
            if not neighbour.establishing.locked():
                self._neighbours.drop(node_id)

    async def send_goodbye(self) -> None:
        """To every neighbour that will hear it."""
        async with trio.open_nursery() as nursery:
            for neighbour in self._neighbours.values():
                for connection in neighbour.connections:
                    nursery.start_soon(connection.send_goodbye)

    async def _establish(self, node_id: NodeId, neighbour: Neighbour) -> Connection:
        if trio.current_time() < neighbour.retry_at_s:
            raise NodeUnreachable(f"node {node_id} could not be reached a moment ago")
        try:
            connection = await self.dial(node_id)
            if connection is None:
                # The peer may have dialled this node meanwhile.
                live = self._to_send_on(node_id)
                connection = live[0] if live else await self._open_stream(node_id)
            if not await connection.says_hello():
                raise NodeUnreachable(f"node {node_id} said no hello on the data plane: {connection.ending}")
        except NodeUnreachable:
            wait_s = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2**neighbour.n_failures)
            neighbour.n_failures += 1
            neighbour.retry_at_s = trio.current_time() + wait_s
            raise
        neighbour.n_failures = 0
        self.try_hole(node_id)
        return connection

    async def dial(self, node_id: NodeId, *, bulk: bool = False) -> Connection | None:
        """A direct connection; None where there is no such way."""
        wire = await self._handshake(node_id)
        return None if wire is None else self._start(node_id, wire, dialled=True, bulk=bulk)

    async def dial_bulk(self, node_id: NodeId) -> Connection | None:
        return await self.dial(node_id, bulk=True)

    async def answer(self, sender: NodeId, body: bytes) -> bytes:
        return await self._user.answer(sender, body)

    def addresses_of(self, node_id: NodeId) -> Sequence[Address]:
        return self._user.data_addresses_of(node_id)

    async def _handshake(self, node_id: NodeId) -> NoiseWire | None:
        """An address can be somebody else's by now: then the others have their turn."""
        left = list(self.addresses_of(node_id))
        while left:
            try:
                with trio.fail_after(_DIAL_S):
                    address, stream = await first_to_answer(left)
            except (NodeUnreachable, trio.TooSlowError) as error:
                provoked_by(log, node_id).debug("data port of %s: %s", node_id, error)
                return None
            left.remove(address)
            try:
                _, wire = await noise_handshake(stream, self._identity, node_id, self._gater)
            except (OSError, HandshakeFailed) as error:
                provoked_by(log, node_id).debug("data port of %s at %s: %s", node_id, address, error)
                continue
            return wire
        return None

    async def _open_stream(self, node_id: NodeId, protocol: str = PROTOCOL) -> Connection:
        wire = await self._streams.open(node_id, protocol)
        return self._start(node_id, wire, dialled=True, bulk=protocol == BULK_PROTOCOL)

    async def open_bulk_stream(self, node_id: NodeId, old: Connection | None) -> Connection | None:
        """One that goes a better way than `old`, where there is an old one."""
        if old is not None and (old.wire_kind != "relay" or not self._host.is_direct(node_id)):
            return None
        try:
            return await self._open_stream(node_id, BULK_PROTOCOL)
        except NodeUnreachable:
            return None

    async def reopen(self, node_id: NodeId, old: Connection) -> Connection | None:
        """A stream that goes through no relay, where `old` does."""
        if old.wire_kind != "relay" or not self._host.is_direct(node_id):
            return None
        try:
            return await self._open_stream(node_id)
        except NodeUnreachable:
            return None

    def _start(self, node_id: NodeId, wire: Wire, *, dialled: bool, bulk: bool = False) -> Connection:
        connection = self._connection(node_id, wire, dialled=dialled, bulk=bulk)
        spawn(
            self._nursery,
            "connection",
            self._run,
            connection,
            failed=lambda error: self._has_ended(connection, error),
        )
        return connection

    def _connection(self, node_id: NodeId, wire: Wire, *, dialled: bool, bulk: bool = False) -> Connection:
        connection = Connection(
            node_id,
            wire,
            self,
            self._timer,
            dialled=dialled,
            bulk=bulk,
        )
        connection.loads.on_load = partial(self._take_load, connection)
        self._neighbour(node_id).connections.add(connection)
        return connection

    def payload_room(self, node_id: NodeId) -> PayloadRoom:
        return PayloadRoom(partial(reserve_or_displace, self._budget, self._receivers, node_id))

    def _receivers(self) -> Iterator[Connection]:
        return (each for neighbour in self._neighbours.values() for each in neighbour.connections)

    async def _run(self, connection: Connection) -> None:
        provoked_by(log, connection.node_id).debug("%r begins", connection)
        with contained("connection", "its reader", lambda _: connection.end("an error here; see its log")):
            await connection.run()
        self._has_ended(connection)

    def _has_ended(self, connection: Connection, error: Exception | None = None) -> None:
        connection.end("an error here; see its log")  # Where it has not said yet how it ended.
        provoked_by(log, connection.node_id).info(
            "data connection (%s) with node %s has ended: %s",
            connection.wire_kind,
            connection.node_id,
            connection.ending,
        )
        self.bulk.lost(connection)
        others = self.connections(connection.node_id)
        if connection.loads.has_asked and not any(each.loads.has_asked for each in others):
            self._user.load_came(connection.node_id, b"")
        if connection.trust_event is not None:
            self._note(connection.node_id, connection.trust_event, connection.ending)
        if connection.link_asked:
            spawn(
                self._nursery, "link", self._become_link, connection, failed=lambda _: connection.wire.abort()
            )
        neighbour = self._neighbours.get(connection.node_id)
        if neighbour is None or connection not in neighbour.connections:
            return
        neighbour.connections.discard(connection)
        neighbour.n_bytes_sent += connection.n_bytes_sent
        neighbour.n_bytes_received += connection.n_bytes_received
        is_loss = neighbour.needs(connection) or not self.has_connection(connection.node_id)
        if connection.ready.is_set() and not connection.bulk and is_loss:
            self._user.lost(connection.node_id, connection.ending)
        elif not neighbour.connections and not neighbour.n_failures and not neighbour.establishing.locked():
            self._neighbours.drop(connection.node_id)

    async def _become_link(self, connection: Connection) -> None:
        wire = connection.wire
        if isinstance(wire, NoiseWire) and self.on_link is not None:
            await give_link(connection.node_id, wire, connection.link_asked, self.on_link)
        else:
            wire.abort()

    async def _accept(self, stream: trio.SocketStream) -> None:
        with contained("connection", "its handshake"):
            await self._take_in(stream)

    async def _take_in(self, stream: trio.SocketStream) -> None:
        handshake = await self._handshakes.begin(stream)
        if handshake is None:
            return
        try:
            node_id, wire = await noise_handshake(stream, self._identity, None, self._gater)
        except HandshakeFailed as error:
            provoked_by(log, "unknown").debug("a connection was refused: %s", error)
            return
        finally:
            handshake.end()
        if self._may_come(node_id):
            connection = self._start(node_id, wire, dialled=False)
            if not self._neighbour(node_id).sends_directly:
                spawn(self._nursery, "connection", self._turn_to, node_id, connection)
        else:
            wire.abort()

    async def _accept_stream(self, sender: NodeId, stream: Stream) -> None:
        if not self._may_come(sender):
            await stream.reset()
            return
        is_new = self._neighbours.get(sender) is None and sender not in self._dialling_back
        if is_new and len(self._dialling_back) < DIALS_BACK_MAX:
            self._dialling_back.add(sender)
            spawn(self._nursery, "connection", self._dial_back, sender)
        await self._run(self._connection(sender, self._streams.wire(stream), dialled=False))

    async def _dial_back(self, node_id: NodeId) -> None:
        """A peer that cannot dial this node's data port may have one that this node can dial. It says where,
        so after a dial in vain further streams of its bring none for FAILURES_COUNT_S, unless it is heard
        of meanwhile (`forgive`)."""
        try:
            connection = None if self.has_direct(node_id) else await self.dial(node_id)
        finally:
            self._dialling_back.discard(node_id)
        if connection is not None:
            await self._turn_to(node_id, connection)
        elif not self.has_direct(node_id):
            if len(self._neighbours) >= 2 * self.connections_max:
                self._forget_unreachable()
            neighbour = self._neighbour(node_id)
            neighbour.n_failures += 1
            neighbour.retry_at_s = max(neighbour.retry_at_s, trio.current_time())

    def _may_come(self, node_id: NodeId) -> bool:
        n_of_each = {n: len(each.connections) for n, each in self._neighbours.items()}
        if node_id == self._identity.node_id or n_of_each.get(node_id, 0) >= CONNECTIONS_PER_PEER:
            return False
        leaving = who_makes_room(n_of_each, node_id, self.connections_max, self._standing)
        if leaving not in (None, node_id):
            self._user.lost(leaving, GAVE_WAY)
        return leaving != node_id

    def _standing(self, node_id: NodeId) -> Standing:
        standing = self._gater.standing(node_id)
        is_passing = standing is Standing.STRANGER and not self._host.is_connected(node_id)
        return Standing.PASSING if is_passing else standing

    async def receive(self, connection: Connection, header: bytes, payload: memoryview) -> None:
        if connection.bulk:
            await self.bulk.take(connection, header, payload)
            return
        self._pacing.message(trio.current_time())
        neighbour = self._neighbours.get(connection.node_id)
        if neighbour is None or connection.retired:
            return
        if neighbour.receiving is not connection:
            if neighbour.receiving is not None:
                neighbour.receiving.retired = True
            neighbour.receiving = connection
        try:
            neighbour.delivering.acquire_nowait()
        except trio.WouldBlock:
            await neighbour.delivering.acquire()
        try:
            await self._user.deliver(connection.node_id, header, payload)
        finally:
            neighbour.delivering.release()
