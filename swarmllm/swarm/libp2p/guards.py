"""Patches for weaknesses of py-libp2p 0.8.1, applied before it listens to strangers.

Each guard is one function with the weakness it closes; a test per guard watches that the weakness is closed,
and so that the private names leant on here are still what they were (the version is pinned exactly). Patching
was preferred to a fork: it is a page, and it can be thrown away piece by piece as the library catches up.
"""

from __future__ import annotations

import contextvars
import logging
import math
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import libp2p.identity.identify.identify as identify
import libp2p.peer.peerstore as peerstore
import libp2p.pubsub.gossipsub as gossipsub
import libp2p.pubsub.pubsub as pubsub
import libp2p.stream_muxer.yamux.yamux as yamux
import libp2p.transport.tcp.tcp as tcp
import trio
from libp2p.connection_types import ConnectionType
from libp2p.network.config import RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.rcmgr import new_resource_manager
from libp2p.rcmgr.manager import ResourceLimits
from libp2p.tools.anyio_service import trio_manager, trio_tasks
from libp2p.tools.anyio_service.exceptions import DaemonTaskExit

from swarmllm.log_filter import provoked_by
from swarmllm.operating_system import limit_silence
from swarmllm.swarm.libp2p.bounded_yamux import STREAMS_OF_EACH
from swarmllm.swarm.libp2p.handshake_turns import HALF_OPEN_MAX, HandshakeTurns
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

DEPARTED_MAX = 64
"""Peers without a connection of which something is kept."""
STREAMS_MAX = 10_000
"""Of all connections, and for many connections more (see bounded_yamux)."""

_RESET_S = 2.0
_USER_TIMEOUT_MS = 8000
_DESCRIBE_AGAIN_S = 10.0


def one_yamux_frame_per_noise_message() -> None:
    """Stock frames are 17 bytes too long for one Noise message, so each costs two encryptions and two system
    calls."""
    yamux.MAX_MESSAGE_SIZE = 65519


def listen_on_one_family() -> None:
    """Stock listeners on "::" take IPv4 as well, so a second one on 0.0.0.0 would depend on the system."""
    tcp._set_reuse_flags = _for_one_family


_original_reuse_flags = tcp._set_reuse_flags


def _for_one_family(sock: Any) -> None:
    _original_reuse_flags(sock)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


def batch_window_updates() -> None:
    """Stock yamux answers every read, however small, with a frame that says so: half of all frames, each
    encrypted and sent on its own. As in other implementations, room is now given back when half of the window
    has been used."""
    yamux.YamuxStream._auto_tune_and_send_window_update = _give_back_half_windows


_original_window_update = yamux.YamuxStream._auto_tune_and_send_window_update


async def _give_back_half_windows(self: Any, *, bytes_read: int = 0) -> None:
    n_buffered = len(self.conn.stream_buffers.get(self.stream_id, b""))
    if self.target_recv_window - (self.recv_window + n_buffered) >= self._grow_threshold():
        await _original_window_update(self, bytes_read=bytes_read)


def describe_oneself_rarely() -> None:
    """Every gossip message carries the sender's signed addresses, put together anew for each and checked anew
    by each receiver, which costs more than all the rest of gossip. Nobody here looks at them: addresses are
    in envelopes. They are still sent, for others, from a copy, with the first message of a connection; what
    others send is not checked."""
    for module in (pubsub, identify):
        module.env_to_send_in_RPC = _recent_description
    gossipsub.env_to_send_in_RPC = lambda _host: (b"", False)
    for module in (pubsub, gossipsub):
        module.maybe_consume_signed_record = lambda *_: True


_describe = peerstore.env_to_send_in_RPC
_descriptions: weakref.WeakKeyDictionary[Any, tuple[float, bytes]] = weakref.WeakKeyDictionary()


def _recent_description(host: Any) -> tuple[bytes, bool]:
    now = trio.current_time()
    made_at_s, description = _descriptions.get(host, (-math.inf, b""))
    if now - made_at_s >= _DESCRIBE_AGAIN_S:
        description, _ = _describe(host)
        _descriptions[host] = now, description
    return description, False


def room_for_connections(connections_max: int) -> Any:
    """A resource manager for so many. The library's default refuses the 1001st connection whatever its
    configuration allows, and from then on lowers its own limits step by step."""
    connections = 2 * (connections_max + HALF_OPEN_MAX)
    limits = ResourceLimits(connections, max_streams=max(STREAMS_MAX, STREAMS_OF_EACH * connections))
    return new_resource_manager(limits=limits)


def silence_expected_failures() -> None:
    """A peer that cannot be dialled, speaks another protocol or leaves in the middle is everyday life in a
    swarm; the library prints it as an error, at length, past the daemon's log. Its own variable LIBP2P_DEBUG
    brings it back."""
    if "LIBP2P_DEBUG" not in os.environ:
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)


_original_run = trio_tasks.FunctionTask.run


async def _run_without_killing_the_host(self: Any) -> None:
    try:
        await _original_run(self)
    except DaemonTaskExit:
        raise
    except Exception as error:
        if self.daemon or self.name == trio_tasks.TaskType.INTERNAL_SERVICE_RUN.value:
            raise
        log.warning(
            "libp2p task %s failed: %s",
            self.name,
            type(error).__name__,
            exc_info=log.isEnabledFor(logging.DEBUG),
        )


def contain_task_failures() -> None:
    """Any exception in the task of one message or one connection ends the whole service: a non-UTF-8 protocol
    name or a gossip message with a junk key, sent by anybody after the handshake, kills the process. Only the
    service's own main tasks may still end it."""
    trio_tasks.FunctionTask.run = _run_without_killing_the_host


def find_parents_of_tasks_at_once() -> None:
    """Each task of a service (one per gossip message and one or two per peer) is looked for among all of them
    when it starts another: in a swarm of n that is n steps for each message."""
    trio_manager.TrioManager._run_and_manage_task = _run_and_remember
    trio_manager.TrioManager._find_parent_task = _remembered_task


_original_run_and_manage = trio_manager.TrioManager._run_and_manage_task


async def _run_and_remember(self: Any, task: Any) -> None:
    tasks = self.__dict__.setdefault("_task_of_trio_task", {})
    trio_task = trio.lowlevel.current_task()
    tasks[trio_task] = task
    try:
        await _original_run_and_manage(self, task)
    finally:
        # Each knows the other: nothing but this lets go of them.
        del tasks[trio_task]


def _remembered_task(self: Any, trio_task: trio.lowlevel.Task) -> Any:
    return self.__dict__.get("_task_of_trio_task", {}).get(trio_task)


def ask_nobody_for_a_description(host: Any) -> None:
    """Identify on every connection, both ways, a quarter of all streams of a swarm that meets: nobody here
    reads the answers (addresses come in signed envelopes, protocols are tried). Who asks is answered."""
    host._schedule_identify = lambda peer_id, *, reason: None


def leave_retrying_to_us(swarm: Any) -> None:
    """A dial that fails is retried three times on the spot and then bans its peer for 60 s: a node that
    restarts would be lost for a minute. The dialler has its own back-off."""
    swarm.retry_config = RetryConfig(max_retries=0)
    swarm._negative_peer_cache = type(swarm._negative_peer_cache)(ttl=0.0)


_from_listener: contextvars.ContextVar[Any] = contextvars.ContextVar("from_listener", default=None)


def return_inbound_slots(swarm: Any) -> None:
    """The handler of an inbound connection waits for the end of the *swarm*, not of the connection, and holds
    its inbound slot meanwhile: after 250 inbound connections in its life a host refuses everybody. Here it
    ends with its connection.

    It also holds it for ten seconds while a peer says nothing, so 300 silent ones keep everybody else out,
    and begins all handshakes at once. Here they have turns (`handshake_turns`)."""
    upgrade, handle = swarm.upgrade_inbound_raw_conn, swarm._do_handle_inbound_connection
    turns = HandshakeTurns()

    async def handle_and_mark(stream: Any, address: Any, event: Any) -> None:
        handshake = await turns.begin(stream.stream)
        if handshake is None:
            return
        _from_listener.set(handshake)
        try:
            await handle(stream, address, event)
        finally:
            handshake.end()

    async def upgrade_and_stay(raw_connection: Any, address: Any) -> Any:
        called_by_listener = _from_listener.get()
        _from_listener.set(None)
        muxed = await upgrade(raw_connection, address)
        if called_by_listener is not None:
            called_by_listener.end()
            await muxed.event_closed.wait()
            # The caller's only way out other than the end of the swarm; it closes the connection, which is
            # closed.
            raise SwarmException("the inbound connection has ended")
        return muxed

    swarm._do_handle_inbound_connection = handle_and_mark
    swarm.upgrade_inbound_raw_conn = upgrade_and_stay


def forget_departed(libp2p_host: Any, staying: Collection[NodeId]) -> None:
    """Whatever a peer says of itself is kept for ever, up to a megabyte of it, and the next one may come
    under a name that costs nothing."""
    store = libp2p_host.get_peerstore()
    if len(store.peer_data_map) <= len(staying) + DEPARTED_MAX:
        return
    for peer_id in store.peer_ids():
        if peer_id != libp2p_host.get_id() and str(peer_id) not in staying:
            store.clear_peerdata(peer_id)
            store.addr_update_channels.pop(peer_id, None)


def contain_handler_failures(host: Any, swarm: Any) -> None:
    """An exception in a stream's handler reaches the connection's nursery and from there the host; an end of
    stream that a handler does not catch leaves a connection that looks alive and is not."""
    handle: Callable[[Any], Awaitable[None]] = host._swarm_stream_handler

    async def guarded(stream: Any) -> None:
        try:
            await handle(stream)
        except Exception as error:
            provoked_by(log, str(stream.muxed_conn.peer_id)).info(
                "stream %s ended by %s", stream.get_protocol(), type(error).__name__
            )
            with trio.CancelScope(shield=True), trio.move_on_after(_RESET_S):
                await stream.reset()

    swarm.set_stream_handler(guarded)


def dial_nobody_unasked(swarm: Any) -> None:
    """The automatic connector aims at half the upper watermark whatever the lower one says, and dials
    everybody it has heard of."""

    async def leave_alone() -> None:
        await trio.lowlevel.checkpoint()

    swarm.auto_connector.maybe_connect = leave_alone


def remember_sockets(swarm: Any, sockets: weakref.WeakSet[trio.SocketStream]) -> None:
    """A connection that is between the accept (or dial) and the end of its handshake is in no list of the
    library's, and its socket leaks when the host ends. All sockets opened from here on that still exist are
    in `sockets`."""
    handle = swarm._handle_inbound_connection

    async def handle_and_remember(stream: Any, address: Any) -> None:
        sockets.add(stream.stream)
        await handle(stream, address)

    swarm._handle_inbound_connection = handle_and_remember
    for transport in swarm.transport_manager.get_transports():
        transport.dial = _remembering(transport.dial, sockets)


def _remembering(
    dial: Callable[[Any], Awaitable[Any]], sockets: weakref.WeakSet[trio.SocketStream]
) -> Callable[[Any], Awaitable[Any]]:
    async def dial_and_remember(address: Any) -> Any:
        raw_connection = await dial(address)
        sockets.add(raw_connection.stream.stream)
        return raw_connection

    return dial_and_remember


def socket_stream(connection: Any) -> trio.SocketStream | None:
    """The TCP stream under a libp2p connection, or None where there is none (a relay) or it is not yet
    there."""
    try:
        stream = connection.muxed_conn.secured_conn.conn.read_writer.read_write_closer.stream.stream
    except AttributeError:
        return None
    return stream if isinstance(stream, trio.SocketStream) else None


def is_relayed(muxed_connection: Any) -> bool:
    """Whether what is under a connection is a stream through a relay (which knows its `relay_id`)."""
    return hasattr(_under(muxed_connection), "relay_id")


def relay_room(muxed_connection: Any) -> float:
    """See `RelayedConnection.room`; 1 where there is no relay."""
    return float(getattr(_under(muxed_connection), "room", 1.0))


def _under(muxed_connection: Any) -> Any:
    try:
        return muxed_connection.secured_conn.conn.read_writer.read_write_closer.stream
    except AttributeError:
        return None


def say_whether_relayed(connection: Any) -> None:
    """libp2p prefers direct connections for new streams, but what a connection is gets lost inside
    its Noise session."""
    kind = ConnectionType.RELAYED if is_relayed(connection.muxed_conn) else ConnectionType.DIRECT
    connection.set_transport_info(connection.get_transport_addresses(), kind)


def remote_ip(connection: Any) -> str:
    """Where a connection comes from; empty where that cannot be said."""
    stream = socket_stream(connection)
    try:
        return str(stream.socket.getpeername()[0]) if stream is not None else ""
    except OSError:
        return ""


def give_up_on_silent_network(connection: Any) -> None:
    """Bytes that nobody acknowledges keep a connection alive for a quarter of an hour; the kernel ends it
    sooner if told."""
    if (stream := socket_stream(connection)) is not None:
        limit_silence(stream.socket, _USER_TIMEOUT_MS)


async def close_hard(connection: Any) -> None:
    """`connection.close()` waits behind a blocked writer, for ever when the peer is frozen; closing the
    socket does not."""
    if (stream := socket_stream(connection)) is not None:
        await trio.aclose_forcefully(stream)
    else:
        with trio.move_on_after(_RESET_S):
            await connection.close()
