"""Decides whether a peer without a data connection is alive, from what libp2p receives.

Between the exchange of records and the first data connection a peer counts as connected and has no keepalive;
so does one to which no data connection can be made, or that is there for gossip only. All that comes over a
libp2p connection shows that it lives. As on the data plane each side says so of its own accord (by yamux
pings, which every implementation answers), and silence is judged alike: see keepalive. All of this ends with
the first data connection.

Of a peer that nothing is asked of for REST_AFTER_S nothing is expected: it is there for gossip. A ping after
each minute of silence, which every connection gets, tells within two minutes whether it lives
(`silent_connections`). It is listened to closely again once something is asked of it.

An answer has a longer way than a beat of the peer's own, and before their first data connections many nodes
may meet and keep each other busy. So where this side is late itself, silence counts for less.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Final

import libp2p.stream_muxer.yamux.yamux as yamux
import trio

from swarmllm.shared_ticks import next_tick_s
from swarmllm.supervision import spawn
from swarmllm.swarm.data.keepalive import CHECK_S, LAST_LOOK_S, Keepalive
from swarmllm.swarm.libp2p.fast_paths import read_exactly
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

_ALLOWANCE = 2.0
"""With the peer, for each second that this side is late by more than LAST_LOOK_S: both ends write and read
between other tasks. Every timer is late by milliseconds, and so is the look that would end the allowance."""
_ALLOWANCE_MAX_S = 5.0
_HEADER = Struct(">BBHII")
REST_LOOK_S: Final = 60.0
"""Between looks at a peer at rest: whether it still has to be watched."""
_HEARD_AT = "_heard_at_s"


def note_what_comes() -> None:
    """For all libp2p hosts of this process. Idempotent."""
    yamux.read_exactly = _read_and_note


async def write_ping(muxer: Any) -> None:
    muxer._ping_id += 1
    await muxer._write_frame(_HEADER.pack(0, yamux.TYPE_PING, yamux.FLAG_SYN, 0, muxer._ping_id))
    # The library measures the round trip by whichever answer comes.
    muxer._ping_sent_time = trio.current_time()


def heard_at_s(muxer: Any, never: float = -math.inf) -> float:
    heard_at_s: float = getattr(muxer.secured_conn, _HEARD_AT, never)
    return heard_at_s


async def _read_and_note(session: Any, n_bytes: int) -> bytes:
    # Nor is the peer silent while what came before is worked off.
    setattr(session, _HEARD_AT, trio.current_time())
    received = await read_exactly(session, n_bytes)
    setattr(session, _HEARD_AT, trio.current_time())
    return received


@dataclass(eq=False, slots=True)
class _Watched:
    keepalive: Keepalive
    woken: trio.Event = field(default_factory=trio.Event)
    """Set, and made anew, when it is to be looked at sooner than was thought."""


class ControlKeepalive:
    """`muxers(node_id)` are what carries the streams of its connections; `nursery` outlives every beat."""

    def __init__(self, muxers: Callable[[NodeId], list[Any]], nursery: trio.Nursery) -> None:
        note_what_comes()
        self._muxers = muxers
        self._nursery = nursery
        self._beating: set[Any] = set()
        self._watched: dict[NodeId, _Watched] = {}

    def used(self, node_id: NodeId) -> None:
        """Something is asked of the peer: it does not rest."""
        watched = self._watched.get(node_id)
        if watched is not None and watched.keepalive.used(trio.current_time()):
            watched.woken.set()
            watched.woken = trio.Event()

    async def falls_silent(
        self,
        node_id: NodeId,
        is_over: Callable[[], bool],
        *,
        pings_first: bool = True,
        begins_at_rest: bool = False,
    ) -> bool:
        """Returns True once nothing has come from the peer for too long, False once `is_over`. `pings_first`:
        the peer waits a little longer before it pings; what a ping and its answer say, both ends hear.
        `begins_at_rest`: it is there for gossip."""
        watched = self._watched[node_id] = _Watched(Keepalive(dialled=pings_first))
        watched.keepalive.may_rest(-math.inf if begins_at_rest else trio.current_time())
        try:
            return await self._watch(node_id, watched, is_over)
        finally:
            if self._watched.get(node_id) is watched:
                del self._watched[node_id]

    async def _watch(self, node_id: NodeId, watched: _Watched, is_over: Callable[[], bool]) -> bool:
        keepalive, now = watched.keepalive, trio.current_time()
        heard_at_s, allowance_s = now, 0.0
        while True:
            if keepalive.is_at_rest(now):
                with trio.move_on_at(next_tick_s(now, REST_LOOK_S)):
                    await watched.woken.wait()
                if is_over():
                    return False
                now = trio.current_time()
                heard_at_s, allowance_s = now, 0.0
                continue
            keepalive.heard(heard_at_s + allowance_s)
            look_at_s = keepalive.next_look_s(now)
            await trio.sleep_until(look_at_s)
            if is_over():
                return False
            now = trio.current_time()
            late_s = max(0.0, now - look_at_s - LAST_LOOK_S)
            allowance_s = min(_ALLOWANCE_MAX_S, allowance_s + _ALLOWANCE * late_s)
            if (latest_s := self._heard_at_s(node_id)) > heard_at_s:
                heard_at_s, allowance_s = latest_s, 0.0
                # A ping of the peer has been answered, and what else it says needs no ping.
                keepalive.wrote(latest_s)
            keepalive.heard(heard_at_s + allowance_s)
            state = keepalive.look(now, is_reading=True)
            if state == "silent":
                return True
            if state == "unknown":
                heard_at_s, allowance_s = now, 0.0
            if keepalive.ping_is_due(now):
                keepalive.wrote(now)
                self._beat(node_id)

    async def speaks_again(self, node_id: NodeId) -> None:
        """Returns once something comes from the peer; the pings that it has not answered are on their way."""
        silent_since_s = self._heard_at_s(node_id)
        while self._heard_at_s(node_id) <= silent_since_s:  # noqa: ASYNC110 (the library tells nobody)
            await trio.sleep(CHECK_S / 2)

    def _heard_at_s(self, node_id: NodeId) -> float:
        return max(map(heard_at_s, self._muxers(node_id)), default=-math.inf)

    def _beat(self, node_id: NodeId) -> None:
        for muxer in self._muxers(node_id):
            # One that waits for a peer that does not read is enough.
            if muxer not in self._beating:
                self._beating.add(muxer)
                spawn(self._nursery, "peer", self._ping, muxer)

    async def _ping(self, muxer: Any) -> None:
        # In a task of its own: half a message cancelled would break the connection.
        try:
            await write_ping(muxer)
        except Exception as error:
            log.debug("no ping to %s: %s", muxer.peer_id, type(error).__name__)
        finally:
            self._beating.discard(muxer)
