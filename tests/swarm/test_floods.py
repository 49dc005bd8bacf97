"""More than anybody needs, from one peer: it loses its connection, and nobody else loses anything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from struct import pack
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    FLAG_SYN,
    TYPE_DATA,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
)

from swarmllm.swarm.libp2p import bounded_yamux
from swarmllm.swarm.libp2p.host import Stream
from swarmllm.swarm.libp2p_router import Libp2pRouter

from .conftest import DEADLINE_S, Libp2pSwarm
from .hostile import connection_with, stranger, works_before_and_after

pytestmark = pytest.mark.slow

UNREAD = "/test/unread/1.0.0"
LOOK_EVERY_S = 0.02


@asynccontextmanager
async def victim_that_reads_nothing(swarm: Libp2pSwarm) -> AsyncIterator[Libp2pRouter]:
    async with works_before_and_after(swarm) as victim:

        async def sleep(_sender: str, _stream: Stream) -> None:
            await trio.sleep_forever()

        victim.host.serve(UNREAD, sleep)
        yield victim


async def comes_true(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_S):
        # The library's own state, which it tells nobody.
        while not condition():  # noqa: ASYNC110
            await trio.sleep(LOOK_EVERY_S)


def is_cut_off(host: Any, victim: Libp2pRouter) -> Callable[[], bool]:
    node_id = host.get_id().to_base58()
    return lambda: not victim.host.is_connected(node_id)


def frame(kind: int, flags: int, stream: int, length: int) -> bytes:
    header: bytes = pack(YAMUX_HEADER_FORMAT, 0, kind, flags, stream, length)
    return header


async def open_unread(host: Any, victim: Libp2pRouter) -> Any:
    return await host.new_stream(ID.from_base58(victim.node_id), [TProtocol(UNREAD)])


async def open_until_cut_off(host: Any, victim: Libp2pRouter) -> None:
    with trio.fail_after(DEADLINE_S):
        while not is_cut_off(host, victim)():
            try:
                await open_unread(host, victim)
            except StreamFailure:
                await trio.sleep(LOOK_EVERY_S)


async def push(stream: Any, n_bytes: int) -> None:
    """Into a stream, whatever its window says, until all is sent or the connection ends."""
    muxed, number = stream.muxed_stream.conn, stream.muxed_stream.stream_id
    piece = bytes(32_768)
    for _ in range(0, n_bytes, len(piece)):
        try:
            await muxed._write_frame(frame(TYPE_DATA, 0, number, len(piece)) + piece)
        except (IOException, RawConnError):
            return


async def test_who_sends_more_than_its_window_is_cut_off(libp2p_swarm: Libp2pSwarm) -> None:
    async with victim_that_reads_nothing(libp2p_swarm) as victim, stranger(victim) as host:
        stream = await open_unread(host, victim)
        await push(stream, DEFAULT_WINDOW_SIZE)
        assert victim.host.is_connected(host.get_id().to_base58())
        await push(stream, 32_768)
        await comes_true(is_cut_off(host, victim))


async def test_a_frame_that_no_window_has_room_for_is_not_waited_for(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        muxed = connection_with(host, victim).muxed_conn
        await muxed._write_frame(frame(TYPE_DATA, 0, 7777, bounded_yamux.FRAME_MAX_BYTES + 1))
        await comes_true(is_cut_off(host, victim))


async def test_a_connection_has_so_many_streams_and_no_more(libp2p_swarm: Libp2pSwarm) -> None:
    async with works_before_and_after(libp2p_swarm) as victim, stranger(victim) as host:
        muxed = connection_with(host, victim).muxed_conn
        for number in range(bounded_yamux.STREAMS_PER_CONNECTION + 1):
            try:
                await muxed._write_frame(frame(TYPE_WINDOW_UPDATE, FLAG_SYN, 10_001 + 2 * number, 0))
            except (IOException, RawConnError):
                break
        await comes_true(is_cut_off(host, victim))


async def test_of_too_many_streams_in_all_the_peer_with_the_most_loses_its_own(
    libp2p_swarm: Libp2pSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        victim_that_reads_nothing(libp2p_swarm) as victim,
        stranger(victim) as greedy,
        stranger(victim) as modest,
    ):
        ours = {each for each in bounded_yamux._allowance._connections if each.streams}
        n_ours = sum(len(each.streams) for each in ours)
        monkeypatch.setattr(bounded_yamux._allowance, "streams_max", n_ours + 60)
        monkeypatch.setattr(bounded_yamux._allowance, "_n_may_come", 0)
        for _ in range(25):
            await open_unread(greedy, victim)
        await open_unread(modest, victim)
        assert victim.host.is_connected(greedy.get_id().to_base58())
        await open_until_cut_off(greedy, victim)
        assert victim.host.is_connected(modest.get_id().to_base58())


async def test_of_too_much_unread_in_all_the_peer_with_the_most_is_cut_off(
    libp2p_swarm: Libp2pSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_yamux, "UNREAD_MAX_BYTES", 4 * DEFAULT_WINDOW_SIZE)
    monkeypatch.setattr(bounded_yamux, "_COUNT_AGAIN_BYTES", DEFAULT_WINDOW_SIZE // 2)
    async with (
        victim_that_reads_nothing(libp2p_swarm) as victim,
        stranger(victim) as greedy,
        stranger(victim) as modest,
    ):
        await push(await open_unread(modest, victim), DEFAULT_WINDOW_SIZE)
        async with trio.open_nursery() as nursery:
            streams = [await open_unread(greedy, victim) for _ in range(4)]
            for stream in streams:
                nursery.start_soon(push, stream, DEFAULT_WINDOW_SIZE)
            await comes_true(is_cut_off(greedy, victim))
            nursery.cancel_scope.cancel()
        assert victim.host.is_connected(modest.get_id().to_base58())
