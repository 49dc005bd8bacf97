"""Pings the libp2p connections over which nothing comes, all of a node at the same moments.

The library gives each connection two loops: one pings, and one clears away streams that have ended. A timer
that ends wakes an idle process up, which costs more than what it then does, and a node of a hundred
connections had five such moments a second. Here one task does it for all of them.

A peer with a data connection is known to live by that (see `data.keepalive`). Then a ping in
BESIDE_DATA_S is enough: routers with NAT forget a connection over which nothing goes for longer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

import libp2p.network.health.monitor as monitor
import libp2p.stream_muxer.yamux.yamux as yamux
import trio
from libp2p.network.health.ping_probe import ConnectionPingResult

from swarmllm.shared_ticks import REST_TICK_S, sleep_until_tick
from swarmllm.supervision import spawn
from swarmllm.swarm.libp2p.control_keepalive import heard_at_s, note_what_comes, write_ping
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

YAMUX_PING_S: Final = 60.0
"""After which a connection over which nothing has come gets a ping, about."""
BESIDE_DATA_S: Final = 240.0
"""The same where there is a data connection with the peer."""
_LATER_S: Final = 5.0
"""So much longer the end waits that was dialled: what a ping and its answer say, both ends hear."""
_FIRST_PING_S: Final = 0.5
"""After the handshake, as the library has it. Its answer tells the round trip."""
ANSWERS_S: Final = 20.0
"""After a ping was due something has come: starved of processor time for some seconds is not frozen."""
SWEEP_S: Final = 30.0
"""Between looks for streams that have ended, as the library has it."""
_PING_AFTER, _JUDGED_SINCE, _PINGED_AT = "_ping_after_s", "_judged_since_s", "_pinged_at_s"


def judge_connections_by_what_comes() -> None:
    """For all libp2p hosts of this process: where nobody else watches a connection, a frozen peer loses it
    after one to two minutes. The library opens a stream on each connection every minute and negotiates what
    it is for, only to ping. Idempotent."""
    note_what_comes()
    yamux.Yamux._measure_rtt_loop = _ping_once
    yamux.Yamux._stale_stream_sweeper = _leave_it_to_the_timer
    monitor.ping_connection = _heard_lately


async def _ping_once(muxer: Any) -> None:
    await trio.sleep(_FIRST_PING_S)
    if not muxer.event_shutting_down.is_set():
        await _ping(muxer)


async def _leave_it_to_the_timer(muxer: Any) -> None:
    await trio.lowlevel.checkpoint()


async def _heard_lately(connection: Any, **_: object) -> ConnectionPingResult:
    await trio.lowlevel.checkpoint()
    muxer = connection.muxed_conn
    since_s = max(heard_at_s(muxer, math.inf), getattr(muxer, _JUDGED_SINCE, -math.inf))
    silent_max_s = getattr(muxer, _PING_AFTER, YAMUX_PING_S) + ANSWERS_S
    is_alive = trio.current_time() < since_s + silent_max_s
    return ConnectionPingResult(success=is_alive, skipped=is_alive)


async def _ping(muxer: Any) -> None:
    try:
        await write_ping(muxer)
    except Exception as error:
        log.debug("no ping to %s: %s", muxer.peer_id, type(error).__name__)


class SilentConnections:
    def __init__(
        self,
        muxers: Callable[[], Iterable[tuple[NodeId, Any]]],
        has_data_connection: Callable[[NodeId], bool],
        nursery: trio.Nursery,
    ) -> None:
        """`muxers`: with whom each connection is that there is, and what carries its streams. `nursery`
        outlives every ping."""
        self._muxers = muxers
        self._has_data_connection = has_data_connection
        self._nursery = nursery
        self._swept_at_s = -math.inf
        self._pinging: set[Any] = set()

    def __repr__(self) -> str:
        return f"<SilentConnections pinging {len(self._pinging)}>"

    async def run(self) -> NoReturn:
        while True:
            await sleep_until_tick(REST_TICK_S)
            self.look(trio.current_time())

    def look(self, now: float) -> None:
        sweeps = now >= self._swept_at_s + SWEEP_S
        if sweeps:
            self._swept_at_s = now
        for node_id, muxer in self._muxers():
            # Whoever holds the lock is looking at the streams.
            if sweeps and not muxer.streams_lock.locked():
                muxer._sweep_stale_streams(now)
            self._ping_when_due(node_id, muxer, now)

    def _ping_when_due(self, node_id: NodeId, muxer: Any, now: float) -> None:
        before_s = getattr(muxer, _PING_AFTER, YAMUX_PING_S)
        after_s = BESIDE_DATA_S if self._has_data_connection(node_id) else YAMUX_PING_S
        if after_s != before_s:
            setattr(muxer, _PING_AFTER, after_s)
            # Less was expected of it until now.
            setattr(muxer, _JUDGED_SINCE, now)
        last_s = max(heard_at_s(muxer), getattr(muxer, _PINGED_AT, -math.inf))
        due_s = last_s + after_s + (0.0 if muxer.is_initiator else _LATER_S)
        if now >= due_s and muxer not in self._pinging:
            setattr(muxer, _PINGED_AT, now)
            self._pinging.add(muxer)
            spawn(self._nursery, "peer", self._ping_it, muxer)

    async def _ping_it(self, muxer: Any) -> None:
        # In a task of its own: the peer may not read, and half a message would break the connection.
        try:
            await _ping(muxer)
        finally:
            self._pinging.discard(muxer)
