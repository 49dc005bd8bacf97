"""A TCP proxy in user space that hands every byte on after a fixed time: a long way on one machine.

Without a limit, bytes that came together leave together, later. With one, each connection has a line of its
own in each direction that carries so many bytes a second.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio

Endpoint = tuple[str, int]
CHUNK_BYTES = 1 << 16


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def delay_proxy(
    ways: Sequence[tuple[Endpoint, Endpoint]], one_way_s: float, bytes_per_s: float = 0.0
) -> Iterator[None]:
    """Listens on the first of each pair and connects to the second; runs in a thread of its own.
    `bytes_per_s`: of each connection and direction; 0: no limit."""
    ready = threading.Event()
    stop: list[tuple[trio.lowlevel.TrioToken, trio.CancelScope]] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for (host, port), target in ways:
                for listener in await trio.open_tcp_listeners(port, host=host):
                    nursery.start_soon(_serve, listener, target, one_way_s, bytes_per_s)
            stop.append((trio.lowlevel.current_trio_token(), nursery.cancel_scope))
            ready.set()

    thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
    thread.start()
    if not ready.wait(10):
        raise RuntimeError("the proxy does not start")
    try:
        yield
    finally:
        token, scope = stop[0]
        token.run_sync_soon(scope.cancel)
        thread.join()


async def _serve(
    listener: trio.SocketListener, target: Endpoint, one_way_s: float, bytes_per_s: float
) -> None:
    async def connect(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                other = await trio.open_tcp_stream(*target)
            except OSError:
                return
            async with other, trio.open_nursery() as nursery:
                nursery.start_soon(_pump, stream, other, one_way_s, bytes_per_s)
                nursery.start_soon(_pump, other, stream, one_way_s, bytes_per_s)

    await trio.serve_listeners(connect, [listener])


async def _pump(
    source: trio.SocketStream, sink: trio.SocketStream, one_way_s: float, bytes_per_s: float
) -> None:
    # Where there is a limit, a sender is held up by it soon.
    entrance, departure = trio.open_memory_channel[tuple[float, bytes]](16 if bytes_per_s else 4096)
    free_s = 0.0

    async def read() -> None:
        async with entrance:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                nonlocal free_s
                while data := await source.receive_some(CHUNK_BYTES):
                    free_s = max(free_s, trio.current_time())
                    free_s += len(data) / bytes_per_s if bytes_per_s else 0.0
                    await entrance.send((free_s + one_way_s, data))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for due_s, data in departure:
                await trio.sleep_until(due_s)
                await sink.send_all(data)
            await sink.send_eof()
        nursery.cancel_scope.cancel()
