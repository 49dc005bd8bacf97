"""One task that pings all libp2p connections over which nothing comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import libp2p.network.health.monitor as monitor
import pytest
import trio
from libp2p.stream_muxer.yamux.yamux import Yamux
from trio.testing import MockClock

from swarmllm.shared_ticks import REST_TICK_S
from swarmllm.swarm.libp2p.fast_paths import take_shortcuts
from swarmllm.swarm.libp2p.silent_connections import (
    ANSWERS_S,
    BESIDE_DATA_S,
    SWEEP_S,
    YAMUX_PING_S,
    SilentConnections,
    judge_connections_by_what_comes,
)
from swarmllm_proto.identifiers import NodeId

from .test_control_keepalive import connected, connected_both

PEER = NodeId("the other")


@pytest.fixture(autouse=True)
def _replaces_the_loops_of_the_library() -> None:
    judge_connections_by_what_comes()


def of(muxer: Yamux, nursery: trio.Nursery, with_data: set[NodeId] | None = None) -> SilentConnections:
    data = with_data or set()
    return SilentConnections(lambda: [(PEER, muxer)], data.__contains__, nursery)


async def is_alive(muxer: Any) -> bool:
    result = await monitor.ping_connection(SimpleNamespace(muxed_conn=muxer), ping_timeout=1.0)  # type: ignore[arg-type]
    assert result.success == result.skipped
    return result.success


async def test_a_connection_that_nobody_watches_costs_a_ping_a_minute_and_ends_with_its_peer(
    autojump_clock: MockClock,
) -> None:
    async with connected_both() as (muxers, here, there), trio.open_nursery() as nursery:
        for muxer in muxers:
            nursery.start_soon(of(muxer, nursery).run)
        for _ in range(10):
            await trio.sleep(60.0)
            assert await is_alive(muxers[0])
        n_pings = 600.0 / (YAMUX_PING_S + REST_TICK_S)
        for end in (here, there):
            assert n_pings <= end.n_writes <= 2 + 600.0 / YAMUX_PING_S, (
                "the other end answers, and has no more"
            )
        there.freeze()
        await trio.sleep(YAMUX_PING_S + REST_TICK_S + ANSWERS_S)
        assert not await is_alive(muxers[0])
        nursery.cancel_scope.cancel()


async def test_beside_a_data_connection_pings_come_more_rarely(autojump_clock: MockClock) -> None:
    async with connected() as (muxer, here, there), trio.open_nursery() as nursery:
        with_data = {PEER}
        nursery.start_soon(of(muxer, nursery, with_data).run)
        for _ in range(20):
            await trio.sleep(60.0)
            assert await is_alive(muxer)
        assert 1200.0 / (BESIDE_DATA_S + REST_TICK_S) <= here.n_writes <= 2 + 1200.0 / BESIDE_DATA_S
        there.freeze()
        await trio.sleep(REST_TICK_S)
        assert await is_alive(muxer), "its data connection tells whether it lives"
        with_data.clear()
        await trio.sleep(2 * REST_TICK_S)
        assert await is_alive(muxer), "it has the time to answer"
        await trio.sleep(YAMUX_PING_S + ANSWERS_S + REST_TICK_S)
        assert not await is_alive(muxer)
        nursery.cancel_scope.cancel()


async def test_when_the_data_connection_ends_a_live_peer_is_pinged_and_stays(
    autojump_clock: MockClock,
) -> None:
    async with connected() as (muxer, _, _), trio.open_nursery() as nursery:
        with_data = {PEER}
        nursery.start_soon(of(muxer, nursery, with_data).run)
        await trio.sleep(0.9 * BESIDE_DATA_S)
        with_data.clear()
        for _ in range(60):
            await trio.sleep(REST_TICK_S)
            assert await is_alive(muxer)
        nursery.cancel_scope.cancel()


async def test_a_peer_that_does_not_read_holds_nobody_up(autojump_clock: MockClock) -> None:
    async with (
        connected() as (stuck, here, _),
        connected() as (other, there, _),
        trio.open_nursery() as nursery,
    ):
        pings = SilentConnections(lambda: [(PEER, stuck), (PEER, other)], lambda _: False, nursery)
        nursery.start_soon(pings.run)
        await trio.sleep(1.0)
        here.freeze()
        n_stuck, n_other = here.n_writes, there.n_writes
        await trio.sleep(10 * YAMUX_PING_S)
        assert here.n_writes <= n_stuck + 1, "one that waits is enough"
        assert len(nursery.child_tasks) <= 2
        assert there.n_writes >= n_other + 8
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("has_shortcuts", [False, True])
async def test_streams_that_have_ended_are_cleared_away(
    autojump_clock: MockClock, has_shortcuts: bool
) -> None:
    if has_shortcuts:
        take_shortcuts()
    async with connected() as (muxer, _, _), trio.open_nursery() as nursery:
        nursery.start_soon(of(muxer, nursery).run)
        stream = await muxer.open_stream()
        await stream.reset()
        muxer.streams[stream.stream_id] = stream
        stream.closed = True
        assert stream.stream_id in muxer.streams
        n_looks, sweep = 0, muxer._sweep_stale_streams

        def counted(now: float) -> int:
            nonlocal n_looks
            n_looks += 1
            return sweep(now)

        muxer._sweep_stale_streams = counted  # type: ignore[method-assign, assignment]
        await trio.sleep(SWEEP_S + 2 * REST_TICK_S)
        assert stream.stream_id not in muxer.streams
        await trio.sleep(10 * SWEEP_S)
        assert n_looks <= 12
        nursery.cancel_scope.cancel()


async def test_who_answers_nothing_is_not_pinged_more_often(autojump_clock: MockClock) -> None:
    async with connected() as (muxer, here, there), trio.open_nursery() as nursery:
        nursery.start_soon(of(muxer, nursery).run)
        await trio.sleep(1.0)
        there.freeze()
        n_writes = here.n_writes
        await trio.sleep(5 * YAMUX_PING_S)
        assert here.n_writes <= n_writes + 6
        nursery.cancel_scope.cancel()
