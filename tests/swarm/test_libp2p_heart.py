"""Peers without a data connection: when they are taken for dead, and what that costs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import RTT_MEASURE_INTERVAL, Yamux
from trio.testing import MockClock

from swarmllm.swarm.heart import CHECK_S, PING_S, SILENCE_S
from swarmllm.swarm.libp2p_heart import Libp2pHearts

OUT_OF_ROUTES_S = 5.0
NODE_ID = "the other"


class Session:
    """One end of what is below yamux; frozen, nothing goes in or out."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._stream = stream
        self.frozen = False
        self.n_writes = 0

    async def read(self, n: int | None = None) -> bytes:
        received = bytes(await self._stream.receive_some(n))
        if self.frozen:
            await trio.sleep_forever()
        return received

    async def write(self, data: bytes) -> None:
        self.n_writes += 1
        if self.frozen:
            await trio.sleep_forever()
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[Libp2pHearts, Session, Session]]:
    """Hearts at one end of a yamux connection, that end, and the other one."""
    here, there = (Session(stream) for stream in trio.testing.memory_stream_pair())
    async with trio.open_nursery() as nursery:
        muxers = [
            Yamux(session, ID(b"a peer"), is_initiator=session is here)  # type: ignore[arg-type]
            for session in (here, there)
        ]
        hearts = Libp2pHearts({NODE_ID: muxers[:1]}.__getitem__, nursery)
        for muxer in muxers:
            nursery.start_soon(muxer.start)
            await muxer.event_started.wait()
        yield hearts, here, there
        nursery.cancel_scope.cancel()


def never() -> bool:
    return False


@pytest.mark.parametrize("frozen_s", [0.0, 0.4, 1.0, 2.9, 10.0, 47.3])
async def test_a_peer_that_freezes_is_given_up_in_time_and_not_before(
    frozen_s: float, autojump_clock: MockClock
) -> None:
    async with joined() as (hearts, _, there), trio.open_nursery() as nursery:
        started_s = trio.current_time()

        async def freeze() -> None:
            await trio.sleep(frozen_s)
            there.frozen = True

        nursery.start_soon(freeze)
        assert await hearts.falls_silent(NODE_ID, never)
        lasted_s = trio.current_time() - started_s
        assert lasted_s >= SILENCE_S
        assert frozen_s < lasted_s < frozen_s + OUT_OF_ROUTES_S - 0.3


async def test_a_peer_that_has_nothing_to_say_lives_for_one_small_message_every_other_second(
    autojump_clock: MockClock,
) -> None:
    watched_s = 600.0
    async with joined() as (hearts, here, _):
        with trio.move_on_after(watched_s) as watch:
            await hearts.falls_silent(NODE_ID, never)
        assert watch.cancelled_caught
        assert here.n_writes <= watched_s / PING_S + 2 * (1 + watched_s / RTT_MEASURE_INTERVAL)


async def test_whoever_gets_a_data_connection_at_once_is_not_pinged(autojump_clock: MockClock) -> None:
    async with joined() as (hearts, here, _):
        for _ in range(10):
            n_writes = here.n_writes
            assert not await hearts.falls_silent(NODE_ID, lambda: True)
            assert here.n_writes <= n_writes + 2 * (1 + CHECK_S / RTT_MEASURE_INTERVAL)
        assert here.n_writes <= 4


async def test_a_writer_that_is_stuck_hides_no_frozen_peer_and_collects_no_pings(
    autojump_clock: MockClock,
) -> None:
    async with joined() as (hearts, here, there):
        await trio.sleep(3.0)
        here.frozen = there.frozen = True
        n_writes = here.n_writes
        assert await hearts.falls_silent(NODE_ID, never)
        assert here.n_writes == n_writes + 1
