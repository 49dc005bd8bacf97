"""Peers without a data connection: when they are taken for dead, when not for good, and what that costs."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import RTT_MEASURE_INTERVAL, Yamux
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.data.keepalive import (
    CHECK_S,
    PING_S,
    REST_AFTER_S,
    SILENCE_S,
)
from swarmllm.swarm.discovery.dialler import Dialler
from swarmllm.swarm.libp2p.control_keepalive import (
    REST_LOOK_S,
    ControlKeepalive,
)
from swarmllm.swarm.libp2p.host import PeerWatcher
from swarmllm.swarm.peers.liveness import Liveness

OUT_OF_ROUTES_S = 5.0
NODE_ID = "the other"


class Session:
    """One end of what is below yamux; frozen, nothing goes in or out."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._stream = stream
        self._flows = trio.Event()
        self._flows.set()
        self.n_writes = 0

    def freeze(self) -> None:
        self._flows = trio.Event()

    def thaw(self) -> None:
        self._flows.set()

    async def read(self, n: int | None = None) -> bytes:
        received = bytes(await self._stream.receive_some(n))
        await self._flows.wait()
        return received

    async def write(self, data: bytes) -> None:
        self.n_writes += 1
        await self._flows.wait()
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Yamux, Session, Session]]:
    """One end of a yamux connection, what is below it, and what is below the other end."""
    async with connected_both() as ((muxer, _), here, there):
        yield muxer, here, there


@asynccontextmanager
async def connected_both() -> AsyncIterator[tuple[list[Yamux], Session, Session]]:
    """Both ends of a yamux connection, and what is below each."""
    here, there = (Session(stream) for stream in trio.testing.memory_stream_pair())
    async with trio.open_nursery() as nursery:
        muxers = [
            Yamux(session, ID(b"a peer"), is_initiator=session is here)  # type: ignore[arg-type]
            for session in (here, there)
        ]
        for muxer in muxers:
            nursery.start_soon(muxer.start)
            await muxer.event_started.wait()
        yield muxers, here, there
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[ControlKeepalive, Session, Session]]:
    async with connected() as (muxer, here, there), trio.open_nursery() as nursery:
        yield ControlKeepalive(lambda node_id: [muxer], nursery), here, there
        nursery.cancel_scope.cancel()


class OneConnection:
    """Of the host, what liveness asks."""

    node_id = "this node"

    def __init__(self, muxer: Yamux) -> None:
        self._muxer = muxer
        self.closed: list[str] = []
        self.connected: Callable[[str], None] = self.closed.append

    def muxers(self, node_id: str) -> list[Yamux]:
        return [self._muxer]

    def is_connected(self, node_id: str) -> bool:
        return True

    def n_connections(self) -> dict[str, int]:
        return {NODE_ID: 1}

    def surplus(self, node_id: str) -> list[Any]:
        return []

    def watch_peers(self, watcher: PeerWatcher) -> None:
        self.connected = watcher.libp2p_connected

    async def close_hard(self, node_id: str) -> None:
        self.closed.append(node_id)


class NoDataPlane:
    def has_connection(self, node_id: str) -> bool:
        return False

    def close(self, node_id: str, how: str) -> None: ...

    async def reach(self, node_id: str) -> None:
        raise NodeUnreachable("there is no way")


class NoRequests:
    def lose(self, node_id: str) -> None: ...


@asynccontextmanager
async def counted() -> AsyncIterator[tuple[Callable[[], Any], OneConnection, Session]]:
    """The next change among the connected, of which there is one, its connection, and its end of it."""

    async def greet(node_id: str) -> None: ...

    async with connected() as (muxer, _, there), trio.open_nursery() as nursery:
        host: Any = OneConnection(muxer)
        plane: Any = NoDataPlane()
        requests: Any = NoRequests()
        feed = ChangeFeed()
        dialler = Dialler(host.node_id, random.Random(0))
        liveness = Liveness(host, nursery, feed, dialler, requests, greet)
        liveness.begin(plane)
        async with feed.subscribe() as changes:
            host.connected(NODE_ID)
            assert (await anext(changes)).kind == "connected"
            yield changes.__anext__, host, there
        nursery.cancel_scope.cancel()


def never() -> bool:
    return False


@pytest.mark.parametrize("frozen_s", [0.0, 0.4, 1.0, 2.9, 10.0, 47.3])
async def test_a_peer_that_freezes_is_given_up_in_time_and_not_before(
    frozen_s: float, autojump_clock: MockClock
) -> None:
    async with joined() as (keepalive, _, there), trio.open_nursery() as nursery:
        started_s = trio.current_time()

        async def freeze() -> None:
            await trio.sleep(frozen_s)
            there.freeze()

        nursery.start_soon(freeze)
        assert await keepalive.falls_silent(NODE_ID, never)
        lasted_s = trio.current_time() - started_s
        assert lasted_s >= SILENCE_S
        assert frozen_s < lasted_s < frozen_s + OUT_OF_ROUTES_S - 0.3


async def test_a_peer_of_which_nothing_is_asked_costs_no_message_besides_the_librarys(
    autojump_clock: MockClock,
) -> None:
    """In the first minute, and in each after something is asked of it, one every other second."""
    watched_s = 600.0
    async with joined() as (keepalive, here, _), trio.open_nursery() as nursery:
        nursery.start_soon(keepalive.falls_silent, NODE_ID, never)
        await trio.sleep(REST_AFTER_S)
        n_busy = here.n_writes
        assert 0.8 * REST_AFTER_S / PING_S <= n_busy <= REST_AFTER_S / PING_S + 4
        await trio.sleep(watched_s)
        n_resting = here.n_writes - n_busy
        assert n_resting <= 2 * (1 + watched_s / RTT_MEASURE_INTERVAL)
        keepalive.used(NODE_ID)
        await trio.sleep(REST_AFTER_S)
        assert here.n_writes >= n_busy + n_resting + 0.8 * REST_AFTER_S / PING_S
        keepalive.used("nobody")
        nursery.cancel_scope.cancel()


async def test_a_peer_that_is_there_for_gossip_rests_from_the_beginning(autojump_clock: MockClock) -> None:
    async with joined() as (keepalive, here, there), trio.open_nursery() as nursery:
        nursery.start_soon(partial(keepalive.falls_silent, NODE_ID, never, begins_at_rest=True))
        await trio.sleep(REST_AFTER_S)
        assert here.n_writes <= 2 * (1 + REST_AFTER_S / RTT_MEASURE_INTERVAL)
        nursery.cancel_scope.cancel()
    async with joined() as (keepalive, _, there), trio.open_nursery() as nursery:
        there.freeze()

        async def ask() -> None:
            await trio.sleep(20.0)
            keepalive.used(NODE_ID)

        nursery.start_soon(ask)
        began_s = trio.current_time()
        assert await keepalive.falls_silent(NODE_ID, never, begins_at_rest=True)
        assert 20.0 + SILENCE_S <= trio.current_time() - began_s < 20.0 + OUT_OF_ROUTES_S


async def test_of_two_that_listen_closely_one_pings(autojump_clock: MockClock) -> None:
    async with connected_both() as (muxers, here, there), trio.open_nursery() as nursery:
        for muxer in muxers:
            keepalive = ControlKeepalive(lambda node_id, muxer=muxer: [muxer], nursery)  # type: ignore[misc]
            nursery.start_soon(
                partial(keepalive.falls_silent, NODE_ID, never, pings_first=muxer is muxers[0])
            )
        await trio.sleep(REST_AFTER_S)
        # If both did, it would be twice as many.
        for session in (here, there):
            assert 0.8 * REST_AFTER_S / PING_S <= session.n_writes <= 1.5 * REST_AFTER_S / PING_S
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("frozen_s", [100.0, 113.7, 300.0])
async def test_a_peer_that_freezes_at_rest_is_given_up_once_something_is_asked_of_it(
    frozen_s: float, autojump_clock: MockClock
) -> None:
    async with joined() as (keepalive, _, there), trio.open_nursery() as nursery:
        asked_s = trio.current_time() + frozen_s + 50.0

        async def freeze() -> None:
            await trio.sleep(frozen_s)
            there.freeze()
            await trio.sleep_until(asked_s)
            keepalive.used(NODE_ID)

        nursery.start_soon(freeze)
        assert await keepalive.falls_silent(NODE_ID, never)
        assert asked_s + SILENCE_S <= trio.current_time() < asked_s + OUT_OF_ROUTES_S


async def test_a_watch_at_rest_ends_soon_after_it_is_over(autojump_clock: MockClock) -> None:
    async with joined() as (keepalive, _, _):
        began_s = trio.current_time()
        assert not await keepalive.falls_silent(NODE_ID, lambda: trio.current_time() > began_s + 200.0)
        assert trio.current_time() - began_s <= 200.0 + 1.2 * REST_LOOK_S


async def test_whoever_gets_a_data_connection_at_once_is_not_pinged(autojump_clock: MockClock) -> None:
    async with joined() as (keepalive, here, _):
        for _ in range(10):
            n_writes = here.n_writes
            assert not await keepalive.falls_silent(NODE_ID, lambda: True)
            assert here.n_writes <= n_writes + 2 * (1 + CHECK_S / RTT_MEASURE_INTERVAL)
        assert here.n_writes <= 4


async def test_a_writer_that_is_stuck_hides_no_frozen_peer_and_collects_no_pings(
    autojump_clock: MockClock,
) -> None:
    async with joined() as (keepalive, here, there):
        await trio.sleep(3.0)
        here.freeze()
        there.freeze()
        n_writes = here.n_writes
        assert await keepalive.falls_silent(NODE_ID, never)
        assert here.n_writes == n_writes + 1


async def test_timers_that_are_late_as_ever_are_no_reason_for_patience(autojump_clock: MockClock) -> None:
    async with joined() as (keepalive, _, there), trio.open_nursery() as nursery:

        async def be_late() -> None:
            while True:
                await trio.sleep(1e-6)
                autojump_clock.jump(0.03)

        there.freeze()
        started_s = trio.current_time()
        nursery.start_soon(be_late)
        assert await keepalive.falls_silent(NODE_ID, never)
        assert trio.current_time() - started_s < OUT_OF_ROUTES_S
        nursery.cancel_scope.cancel()


async def test_who_is_late_itself_has_patience_but_not_for_ever(autojump_clock: MockClock) -> None:
    async with joined() as (keepalive, _, there), trio.open_nursery() as nursery:

        async def keep_from_looking() -> None:
            while True:
                await trio.sleep(CHECK_S * 0.9)
                autojump_clock.jump(CHECK_S * 0.6)

        there.freeze()
        started_s = trio.current_time()
        nursery.start_soon(keep_from_looking)
        assert await keepalive.falls_silent(NODE_ID, never)
        lasted_s = trio.current_time() - started_s
        assert 1.5 * SILENCE_S < lasted_s < 3 * SILENCE_S
        nursery.cancel_scope.cancel()


async def test_a_slow_peer_counts_again_when_it_speaks_and_keeps_its_connection(
    autojump_clock: MockClock,
) -> None:
    async with counted() as (next_change, host, there):
        for _ in range(3):
            await trio.sleep(33.3)
            there.freeze()
            frozen_at_s = trio.current_time()
            assert (await next_change()).kind == "disconnected"
            assert trio.current_time() - frozen_at_s < OUT_OF_ROUTES_S - 0.3
            await trio.sleep(5.0)
            there.thaw()
            assert (await next_change()).kind == "connected"
        assert not host.closed


async def test_a_peer_that_stays_silent_loses_its_connection(autojump_clock: MockClock) -> None:
    async with counted() as (next_change, host, there):
        there.freeze()
        assert (await next_change()).kind == "disconnected"
        assert not host.closed
        with trio.move_on_after(60.0):
            pytest.fail(f"{await next_change()}")
        assert host.closed == [NODE_ID]
