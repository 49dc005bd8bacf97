"""The socket of an HTTP connection: what the kernel does not take at once waits, and nothing is lost."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from deadlines import DEADLINE_S

from swarmllm import operating_system
from swarmllm.api.http.limits import CHUNK_BYTES, HttpLimits
from swarmllm.api.http.wire import ClientGone, HttpWire


@asynccontextmanager
async def open_wire(limits: HttpLimits | None = None) -> AsyncIterator[tuple[HttpWire, trio.SocketStream]]:
    """A connection's end at the server, and the client's."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        client = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        stream = await listener.accept()
        async with client, stream:
            yield HttpWire(stream, limits or HttpLimits()), client


@pytest.mark.skipif(not operating_system.IS_LINUX, reason="elsewhere each write waits for its turn")
async def test_a_chunk_that_fits_takes_no_turn_of_the_event_loop() -> None:
    async with open_wire() as (wire, client), trio.open_nursery() as nursery:
        other_ran = trio.Event()

        async def other() -> None:
            other_ran.set()

        nursery.start_soon(other)
        await wire.write(b"data: x\n\n")
        assert not other_ran.is_set()
        with trio.fail_after(DEADLINE_S):
            assert await client.receive_some(64) == b"data: x\n\n"


@pytest.mark.parametrize("at_once", [True, False], ids=["Linux", "elsewhere"])
async def test_what_a_socket_does_not_take_at_once_follows_in_order(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operating_system, "IS_LINUX", at_once)
    sent = bytes(range(256)) * (40 * CHUNK_BYTES // 256)
    received = bytearray()
    async with open_wire() as (wire, client), trio.open_nursery() as nursery:
        wire.stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)  # type: ignore[union-attr]

        async def send() -> None:
            for start in (0, 3, CHUNK_BYTES):
                end = {0: 3, 3: CHUNK_BYTES, CHUNK_BYTES: len(sent)}[start]
                await wire.write(sent[start:end])

        nursery.start_soon(send)
        with trio.fail_after(DEADLINE_S):
            while len(received) < len(sent):
                received += await client.receive_some(CHUNK_BYTES)
    assert received == sent


async def test_a_client_that_reads_nothing_is_given_up() -> None:
    async with open_wire(HttpLimits(write_s=0.05)) as (wire, _client):
        with trio.fail_after(DEADLINE_S), pytest.raises(ClientGone):
            await wire.write(bytes(64 * 2**20))


async def test_a_client_that_has_left_is_noticed() -> None:
    async def write_on(wire: HttpWire) -> None:
        while True:
            await wire.write(b"data: x\n\n")

    async with open_wire() as (wire, client):
        await client.aclose()
        with trio.fail_after(DEADLINE_S), pytest.raises(ClientGone):
            await write_on(wire)


async def test_nothing_is_written_for_a_request_that_is_over() -> None:
    async with open_wire() as (wire, client):
        with trio.CancelScope() as scope:
            scope.cancel()
            await wire.write(b"late")
        await wire.stream.aclose()
        with trio.fail_after(DEADLINE_S):
            assert await client.receive_some(64) == b""
