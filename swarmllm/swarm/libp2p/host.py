"""The libp2p host: one key, TCP + Noise + yamux, hardened, with the few operations that the swarm needs.

Only Noise is offered: the library's default also accepts plaintext, where knowing a public key is enough to
be believed. Only yamux: mplex has no back-pressure. No QUIC (4 MB/s, failing streams), no `bootstrap=` (hangs
when gossip is attached), no automatic connections: whom to dial is `dialler.py`'s business. Everything that
leaves this file is a node id as text or an error of our own tree.

The ports that this node listens on: which they are, and that they are nobody else's.
"""

from __future__ import annotations

import errno
import logging
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import trio
from libp2p import new_host
from libp2p.abc import INotifee
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import Direction
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.yamux import yamux
from multiaddr import Multiaddr

from swarmllm.errors import ConfigError, NodeUnreachable
from swarmllm.swarm.discovery.address_race import first_to_answer
from swarmllm.swarm.discovery.addresses import Address, OwnAddresses, family_of
from swarmllm.swarm.discovery.own_port import connect_from, share_port
from swarmllm.swarm.libp2p import fast_paths
from swarmllm.swarm.libp2p import guards as host_guards
from swarmllm.swarm.libp2p.bounded_yamux import hold_peers_to_their_windows
from swarmllm.swarm.libp2p.handshake_turns import HALF_OPEN_MAX
from swarmllm.swarm.libp2p.negotiation import propose_at_once
from swarmllm.swarm.libp2p.silent_connections import judge_connections_by_what_comes
from swarmllm.swarm.membership.connection_gater import ConnectionGater, GuardedNoise
from swarmllm.swarm.membership.identity import Identity
from swarmllm.swarm.peers.connection_limits import CONNECTIONS_MAX
from swarmllm_proto.identifiers import NodeId, is_node_id


def listening_port(swarm: Any) -> int:
    for listener in swarm.listeners.values():
        for address in listener.get_addrs():
            return int(address.value_for_protocol("tcp"))
    raise ConfigError("libp2p listens on no port", field="libp2p_port")


def refuse_taken_port(listen_host: str, port: int) -> None:
    """libp2p listens with SO_REUSEPORT and would share a taken port without a word; a plain bind is
    refused."""
    with socket.socket(family_of(listen_host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            # "::" would mean IPv4 as well, where this node may listen itself.
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((listen_host, port))
        except OSError as error:
            raise _cannot_listen(listen_host, port, error, "libp2p_port") from error


async def open_listeners(ips: Sequence[str], port: int) -> Sequence[trio.SocketListener]:
    """All on the same port, if it is 0 one that is free; this process may dial from it. Raises ConfigError
    when the port is taken."""
    listeners: list[trio.SocketListener] = []
    try:
        for ip in ips:
            listeners += await trio.open_tcp_listeners(port, host=ip)
            port = listeners[0].socket.getsockname()[1]
        for each in listeners:
            share_port(each.socket)
    except BaseException as error:
        for each in listeners:
            each.socket.close()
        if isinstance(error, OSError):
            raise _cannot_listen(ip, port, error, "data_port") from error
        raise
    return listeners


def _cannot_listen(ip: str, port: int, error: OSError, field: str) -> ConfigError:
    remedy = ""
    if error.errno == errno.EADDRINUSE:
        remedy = f". Another daemon may run there; choose another network.{field} (0 takes any free port)"
    return ConfigError(f"cannot listen on {ip} port {port}: {error.strerror}{remedy}", field=field)


log = logging.getLogger(__name__)

_CLOSE_S = 3.0
_HANDSHAKE_S = 30.0
"""Of both ends. Two nodes that are short of processor time would begin anew after each ten seconds, and so
would all that want to meet the same one."""


class Stream(Protocol):
    """The part of libp2p's NetStream that is used."""

    muxed_conn: Any
    muxed_stream: Any

    async def read(self, n: int | None = None) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def close(self) -> None: ...
    async def reset(self) -> None: ...


def _proven(connection_or_stream: Any) -> NodeId:
    """Whose it is. The connection gater let in nobody whose peer id is not a node id."""
    return NodeId(str(connection_or_stream.muxed_conn.peer_id))


class PeerWatcher(Protocol):
    def libp2p_connected(self, node_id: NodeId) -> None:
        """For each connection."""
        ...

    def libp2p_disconnected(self, node_id: NodeId) -> None:
        """A peer's last connection has ended."""
        ...


class _Watcher(INotifee):  # type: ignore[misc]
    def __init__(self, host: Host, watcher: PeerWatcher) -> None:
        self._host = host
        self._watcher = watcher

    async def connected(self, network: Any, conn: Any) -> None:
        host_guards.give_up_on_silent_network(conn)
        host_guards.say_whether_relayed(conn)
        self._watcher.libp2p_connected(_proven(conn))

    async def disconnected(self, network: Any, conn: Any) -> None:
        node_id = _proven(conn)
        if not self._host.is_connected(node_id):
            self._watcher.libp2p_disconnected(node_id)
            self._host.forget_departed()

    def report_lost(self, node_id: NodeId) -> None:
        self._watcher.libp2p_disconnected(node_id)

    async def opened_stream(self, network: Any, stream: Any) -> None: ...
    async def closed_stream(self, network: Any, stream: Any) -> None: ...
    async def listen(self, network: Any, multiaddr: Any) -> None: ...
    async def listen_close(self, network: Any, multiaddr: Any) -> None: ...


class Host:
    """Outlives crashes of libp2p: `run_libp2p` attaches a libp2p host to it, and after a crash the next one.
    In between nobody is connected and nobody can be reached."""

    def __init__(self, identity: Identity, gater: ConnectionGater) -> None:
        self.node_id = identity.node_id
        self.port = 0
        """The TCP port it listens on, once it does; the same in every life."""
        self.libp2p_host: Any = None
        self.listening: Sequence[str] = ()
        """The IPs it listens on."""
        self.sockets: weakref.WeakSet[trio.SocketStream] = weakref.WeakSet()
        """All that its connections have; closed when it ends."""
        self._identity = identity
        self._gater = gater
        self._swarm: Any = None
        self._watcher: _Watcher | None = None
        self._handlers: dict[str, Callable[[Stream], Awaitable[None]]] = {}
        self._dialling: list[NodeId] = []
        self.detour: Callable[[NodeId], Awaitable[None]] | None = None
        """Another way to a node none of whose addresses answers; raises NodeUnreachable."""

    @property
    def key_pair(self) -> Any:
        return self._identity.key_pair

    def security(self) -> GuardedNoise:
        return GuardedNoise(self._identity, self._gater)

    def attach(self, libp2p_host: Any) -> None:
        self.libp2p_host, self._swarm = libp2p_host, libp2p_host.get_network()
        self.port = listening_port(self._swarm)
        for protocol, handler in self._handlers.items():
            libp2p_host.set_stream_handler(TProtocol(protocol), handler)
        if self._watcher is not None:
            self._swarm.register_notifee(self._watcher)

    def detach(self) -> None:
        """It is down. A connected peer is reported as disconnected."""
        gone, watcher = self.connected(), self._watcher
        self.libp2p_host = self._swarm = None
        if watcher is not None:
            for node_id in gone:
                watcher.report_lost(node_id)

    def watch_peers(self, watcher: PeerWatcher) -> None:
        self._watcher = _Watcher(self, watcher)
        if self._swarm is not None:
            self._swarm.register_notifee(self._watcher)

    def ignore_peers(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and self._swarm is not None:
            self._swarm.remove_notifee(watcher)

    def is_connected(self, node_id: NodeId) -> bool:
        return bool(self._connections(node_id))

    def connected(self) -> set[NodeId]:
        return set(self.n_connections())

    def n_connections(self) -> dict[NodeId, int]:
        """Of each node that has any; in the order in which the nodes came."""
        everybody = self._swarm.connections if self._swarm is not None else {}
        counted = {
            NodeId(str(p)): sum(not c.event_closed.is_set() for c in each) for p, each in everybody.items()
        }
        return {node_id: n for node_id, n in counted.items() if n}

    def serve(self, protocol: str, handler: Callable[[NodeId, Stream], Awaitable[None]]) -> None:
        """The handler gets the sender's proven node id. The stream is closed when it returns, reset when it
        raises."""

        async def handle(stream: Stream) -> None:
            await handler(_proven(stream), stream)

        self._handlers[protocol] = handle
        if self.libp2p_host is not None:
            self.libp2p_host.set_stream_handler(TProtocol(protocol), handle)

    async def dial(self, node_id: NodeId, addresses: list[Address], *, may_detour: bool = True) -> None:
        """Raises NodeUnreachable. Not to be cancelled: run it in a task of its own."""
        self._dialling.append(node_id)
        try:
            await self._dial(node_id, addresses)
        except NodeUnreachable:
            if self.detour is None or not may_detour:
                raise
            await self.detour(node_id)
        finally:
            self._dialling.remove(node_id)
            self.forget_departed()

    async def _dial(self, node_id: NodeId, addresses: list[Address]) -> None:
        if self.libp2p_host is None:
            raise NodeUnreachable("libp2p is being started again")
        if not self.is_connected(node_id):
            await self._dial_whichever_answers(node_id, addresses)

    async def _dial_whichever_answers(self, node_id: NodeId, addresses: list[Address]) -> None:
        """An address can be somebody else's by now: then the others have their turn."""
        left = [Address(a.ip, a.port) for a in addresses]
        while True:
            address, stream = await first_to_answer(left)
            self.sockets.add(stream)
            raw = RawConnection(TrioTCPStream(stream), True)
            try:
                await self._upgrade(raw, Multiaddr(str(address)), node_id, dialled=True)
                return
            except NodeUnreachable:
                left.remove(address)
                if not left:
                    raise

    async def open_stream(self, node_id: NodeId, protocol: str, first: bytes = b"") -> Stream:
        """On an existing connection only; `first` is what it begins with. Raises NodeUnreachable. Not to be
        cancelled."""
        if not self.is_connected(node_id):
            raise NodeUnreachable(f"node {node_id} is not connected")
        try:
            stream: Stream = await self.libp2p_host.new_stream(
                ID.from_base58(node_id), [TProtocol(protocol)], first
            )
        except Exception as error:
            raise NodeUnreachable(f"node {node_id} takes no stream: {type(error).__name__}") from error
        return stream

    async def adopt(self, transport: Any, node_id: NodeId, *, dialled: bool) -> None:
        """Make a connection with that node out of what carries its bytes, by the same handshake as over TCP.
        On failure the transport is closed. Raises NodeUnreachable. Not to be cancelled."""
        where = transport.address()
        raw = RawConnection(transport, dialled, ConnectionType.RELAYED, [where])
        await self._upgrade(raw, where, node_id, dialled=dialled)

    async def dial_from_listening_port(self, node_id: NodeId, address: Address, *, as_listener: bool) -> None:
        """So that a firewall takes one end's first packet for an answer to the other's; `as_listener`
        takes the other part of the handshake. Raises NodeUnreachable. Not to be cancelled."""
        stream = await connect_from(self.listening, self.port, address)
        self.sockets.add(stream)
        where = Multiaddr(str(Address(address.ip, address.port)))
        raw = RawConnection(TrioTCPStream(stream), not as_listener)
        await self._upgrade(raw, where, node_id, dialled=not as_listener)

    async def _upgrade(self, raw: RawConnection, where: Multiaddr, node_id: NodeId, *, dialled: bool) -> None:
        if self._swarm is None:
            await raw.close()
            raise NodeUnreachable("libp2p is being started again")
        try:
            with trio.fail_after(_HANDSHAKE_S):
                if dialled:
                    made = await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(node_id))
                    muxed = made.muxed_conn
                else:
                    muxed = await self._swarm.upgrade_inbound_raw_conn(raw, where)
        except BaseException as error:
            # Of a handshake that is cancelled, as at this host's end, the library leaves the socket to the
            # garbage collector.
            with trio.CancelScope(deadline=trio.current_time() + _CLOSE_S, shield=True):
                await raw.close()
            if not isinstance(error, Exception):
                raise
            raise NodeUnreachable(f"node {node_id} cannot be reached: {type(error).__name__}") from error
        if str(muxed.peer_id) != node_id:
            await muxed.close()
            raise NodeUnreachable(f"{muxed.peer_id} answers in the place of node {node_id}")

    def is_relayed(self, stream: Stream) -> bool:
        return host_guards.is_relayed(stream.muxed_conn)

    def relay_room(self, stream: Stream) -> float:
        """The share of what its relay carries for this connection that is left; 1 without a relay."""
        return host_guards.relay_room(stream.muxed_conn)

    def is_direct(self, node_id: NodeId) -> bool:
        """Whether there is a connection that goes through no relay."""
        return any(not host_guards.is_relayed(c.muxed_conn) for c in self._connections(node_id))

    def has_dialled(self, node_id: NodeId) -> bool:
        """Whether there is a connection that this node made."""
        return any(each.direction == Direction.OUTBOUND for each in self._connections(node_id))

    def remote_ip(self, node_id: NodeId) -> str:
        """Where a node's connection comes from; empty where that cannot be said."""
        for connection in self._connections(node_id):
            if ip := host_guards.remote_ip(connection):
                return ip
        return ""

    def muxers(self, node_id: NodeId) -> list[Any]:
        """What carries the streams of each connection to a node."""
        return [connection.muxed_conn for connection in self._connections(node_id)]

    def all_muxers(self) -> Iterator[tuple[NodeId, Any]]:
        """With whom each connection is, and what carries its streams."""
        for node_id in self.connected():
            for muxer in self.muxers(node_id):
                yield node_id, muxer

    def forget_departed(self) -> None:
        if self.libp2p_host is not None:
            host_guards.forget_departed(self.libp2p_host, {*self.connected(), *self._dialling})

    async def close_hard(self, node_id: NodeId) -> None:
        """End every connection to a node now, whatever is under way on it."""
        for connection in self._connections(node_id):
            await host_guards.close_hard(connection)

    def surplus(self, node_id: NodeId) -> list[Any]:
        """Connections to a node that are one too many, for this end to close: of two nodes the one with the
        smaller id decides. What goes through no relay stays, of that what it dialled itself, of that the
        latest, because the dialling node knew of no other."""
        if self.node_id > node_id:
            return []
        # In the order in which they were made.
        connections = self._connections(node_id)
        direct = [c for c in connections if not host_guards.is_relayed(c.muxed_conn)]
        own = [c for c in direct or connections if c.direction == Direction.OUTBOUND]
        kept = (own or direct or connections)[-1:]
        return [c for c in connections if c not in kept]

    async def end_idle_surplus(self, node_id: NodeId) -> None:
        """Close those that carry nothing of ours."""
        for connection in self.surplus(node_id):
            if not any(stream.get_protocol() in self._handlers for stream in connection.get_streams()):
                await host_guards.close_hard(connection)

    def _connections(self, node_id: NodeId) -> list[Any]:
        # libp2p raises for what is no id, and this is asked outside every except.
        if self._swarm is None or not is_node_id(node_id):
            return []
        connections = self._swarm.connections.get(ID.from_base58(node_id), [])
        return [c for c in connections if not c.event_closed.is_set()]


@asynccontextmanager
async def run_libp2p(
    host: Host, own: OwnAddresses, port: int, connections_max: int = CONNECTIONS_MAX
) -> AsyncIterator[None]:
    """Listen and run until the context is left. Raises ConfigError when the port is taken."""
    host_guards.one_yamux_frame_per_noise_message()
    hold_peers_to_their_windows(connections_max)
    host_guards.batch_window_updates()
    host_guards.describe_oneself_rarely()
    host_guards.contain_task_failures()
    host_guards.find_parents_of_tasks_at_once()
    host_guards.silence_expected_failures()
    fast_paths.take_shortcuts()
    host_guards.listen_on_one_family()
    judge_connections_by_what_comes()
    for ip in own.listening:
        refuse_taken_port(ip, port)
    first, *others = own.listening
    listen = Multiaddr(str(Address(first, port)))
    libp2p_host = new_host(
        key_pair=host.key_pair,
        listen_addrs=[listen],
        # Otherwise 0.0.0.0 is told to everybody. The port is only known once it listens.
        addrs_factory=lambda _: [Multiaddr(str(Address(ip, host.port))) for ip in own.announced if host.port],
        sec_opt={NOISE: host.security()},
        resource_manager=host_guards.room_for_connections(connections_max),
        muxer_opt={TProtocol(yamux.PROTOCOL_ID): yamux.Yamux},
        connection_config=ConnectionConfig(
            # Who is one too many is decided when it is known who it is (`liveness`), and not before.
            max_connections=connections_max + HALF_OPEN_MAX,
            inbound_upgrade_timeout=_HANDSHAKE_S,
            outbound_upgrade_timeout=_HANDSHAKE_S,
            min_connections=0,
            low_watermark=0,
            high_watermark=connections_max + HALF_OPEN_MAX,
            # A frozen peer is never noticed otherwise.
            enable_health_monitoring=True,
            health_initial_delay=5,
            health_warmup_window=0,
            health_check_interval=60,
            # A node that counts as connected is watched more closely (keepalive.py, control_keepalive.py).
            abort_connection_on_ping_failure=True,
            # Otherwise a slow connection is replaced, by a dial of the library's own.
            min_health_threshold=0.0,
            max_ping_latency=1e9,
            min_ping_success_rate=0.0,
            max_failed_streams=2**31,
        ),
    )
    swarm = libp2p_host.get_network()
    host_guards.leave_retrying_to_us(swarm)
    host_guards.return_inbound_slots(swarm)
    host_guards.contain_handler_failures(libp2p_host, swarm)
    host_guards.dial_nobody_unasked(swarm)
    host_guards.ask_nobody_for_a_description(libp2p_host)
    propose_at_once(libp2p_host)
    host_guards.remember_sockets(swarm, host.sockets)
    host.listening = own.listening
    async with libp2p_host.run(listen_addrs=[listen]):
        try:
            host.attach(libp2p_host)
            for ip in others:
                # Port 0 would be another one for each.
                if not await swarm.listen(Multiaddr(str(Address(ip, host.port)))):
                    raise ConfigError(f"cannot listen on {ip} port {host.port}", field="libp2p_port")
            yield
        finally:
            host.detach()
            # Leaving run() alone leaks the sockets. A frozen peer must not hold up the end either.
            with trio.CancelScope(shield=True):
                for stream in list(host.sockets):
                    await trio.aclose_forcefully(stream)
                with trio.move_on_after(_CLOSE_S):
                    await libp2p_host.close()
