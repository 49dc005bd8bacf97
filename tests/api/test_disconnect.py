"""Clients that leave, stall or are cut off: the computation stops, and nothing is left running."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from api_fakes import Script, Stand, serve_node
from deadlines import DEADLINE_S

from swarmllm.api.http.limits import HttpLimits

pytestmark = pytest.mark.slow

LONG = [f"word {i} " * 20 for i in range(20_000)]
"""Some megabytes: more than fits into the sockets' buffers."""


@asynccontextmanager
async def asking(stand: Stand, *, stream: bool = True) -> AsyncIterator[trio.SocketStream]:
    """A bare connection on which a chat request has been sent and its generation has started."""
    host, port = stand.url.removeprefix("http://").split(":")
    body = msgspec.json.encode(
        {"model": "guide", "stream": stream, "messages": [{"role": "user", "content": "hello"}]}
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = trio.SocketStream(trio.socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    await connection.socket.connect((host, int(port)))
    async with connection:
        await connection.send_all(head.encode() + body)
        await stand.pipelines.started.wait()
        yield connection


async def receive_until(connection: trio.SocketStream, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        chunk = await connection.receive_some(4096)
        assert chunk, "the server closed the connection"
        data += chunk
    return data


async def is_cancelled(stand: Stand) -> None:
    (call,) = stand.pipelines.calls
    with trio.fail_after(DEADLINE_S):
        await call.ended.wait()
    assert call.outcome == "Cancelled"
    assert stand.node.counts.cancelled == 1
    assert stand.node.admission.n_active == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token(tmp_path: Path, stream: bool) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(hold_after=0)
        async with asking(stand, stream=stream):
            pass
        await is_cancelled(stand)


async def test_a_client_that_leaves_between_two_tokens(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["one", "two"], hold_after=1)
        async with asking(stand) as connection:
            await receive_until(connection, b'"content":"one"')
        await is_cancelled(stand)


async def test_a_client_that_leaves_while_tokens_pour(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:

        async def at_once() -> None:
            await trio.lowlevel.checkpoint()

        stand.pipelines.script = Script(texts=["x"] * 10_000_000, between=at_once)
        async with asking(stand) as connection:
            await receive_until(connection, b'"content":"x')
        await is_cancelled(stand)


async def test_a_client_that_does_not_read_holds_no_slot(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=LONG)
        async with asking(stand):
            (call,) = stand.pipelines.calls
            with trio.fail_after(DEADLINE_S):
                await call.ended.wait()
            assert call.outcome == "completed"
            assert stand.node.admission.n_active == 0


async def test_a_client_that_stalls_and_then_leaves_lets_the_server_stop(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with serve_node(tmp_path) as stand:
            stand.pipelines.script = Script(texts=LONG)
            async with asking(stand):
                await stand.pipelines.calls[0].ended.wait()


async def test_a_client_that_stalls_for_ever_is_cut_off(
    tmp_path: Path,
) -> None:
    with trio.fail_after(DEADLINE_S):
        async with serve_node(tmp_path, limits=HttpLimits(write_s=1.0)) as stand:
            stand.pipelines.script = Script(texts=LONG)
            connection = asking(stand)
            stalled = await connection.__aenter__()
            await stand.pipelines.calls[0].ended.wait()
        # The server has stopped although its client is still connected.
        await stalled.aclose()
        await connection.__aexit__(None, None, None)


async def test_stopping_the_server_cancels_what_runs(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with serve_node(tmp_path) as stand:
            stand.pipelines.script = Script(texts=["one", "two"], hold_after=1)
            connection = asking(stand)
            stream = await connection.__aenter__()
            await receive_until(stream, b'"content":"one"')
        assert stand.pipelines.calls[0].outcome == "Cancelled"
        await stream.aclose()
        await connection.__aexit__(None, None, None)


async def test_a_client_that_is_not_served_yet_leaves_the_queue(tmp_path: Path) -> None:
    async with serve_node(tmp_path, max_concurrent_requests=1) as stand:
        stand.pipelines.script = Script(hold_after=0)
        async with asking(stand):
            async with asking(stand):
                with trio.fail_after(DEADLINE_S):
                    while stand.node.admission.n_queued != 1:
                        await trio.lowlevel.checkpoint()
            with trio.fail_after(DEADLINE_S):
                while stand.node.admission.n_queued:
                    await trio.lowlevel.checkpoint()
            assert len(stand.pipelines.calls) == 1


async def test_a_connection_that_its_client_closes_is_gone_at_once(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        host, port = stand.url.removeprefix("http://").split(":")
        head = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
        await trio.testing.wait_all_tasks_blocked(0.05)
        n_tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(5):
            async with await trio.open_tcp_stream(host, int(port)) as connection:
                await connection.send_all(head)
                await receive_until(connection, b'{"status":"ok"}')
                # Idle: the answer is over, and the timer runs.
                await trio.testing.wait_all_tasks_blocked(0.05)
        with trio.fail_after(DEADLINE_S):
            while trio.lowlevel.current_statistics().tasks_living > n_tasks:  # noqa: ASYNC110 (no event tells)
                await trio.sleep(0.01)
