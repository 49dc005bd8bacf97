"""What one hop between two nodes costs: a message there and back, alone and while models travel, and how fast
these do, against bare TCP in the same run.

    python -m bench.swarm_link

Two processes on loopback. Both ways echo each message from the handler, as a stage would pass it on.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.settings import SwarmSettings

SIZES_BYTES = {1: 2000, 14_336: 2000, 1_000_000: 100, 16_000_000: 12, 100_000_000: 4}
"""Repetitions by size; 14 336 bytes is one token's hidden state of a 3584 wide model."""

PIECE = bytes(1024 * 1024)
"""What travels at once of a model."""
ASK_PIECE = b"piece"
BULK_LANES = 4
WINDOW_S = 0.5
N_WINDOWS = 12

RoundTrip = Callable[[bytes], Awaitable[None]]


def settings(folder: Path, *bootstrap: str) -> SwarmSettings:
    return SwarmSettings(folder, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False)


async def echo_with_router(folder: Path) -> None:
    async with open_libp2p_router(settings(folder)) as router:

        async def answer(sender: str, body: bytes) -> bytes:
            return PIECE if body == ASK_PIECE else body

        async def echo(sender: str, header: bytes, payload: memoryview) -> None:
            await router.send(sender, header, payload)

        router.serve(answer, echo)
        print(router.addresses[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)  # type: ignore[call-arg]


async def echo_with_tcp() -> None:
    async def echo(stream: trio.SocketStream) -> None:
        while size := int.from_bytes(await stream.receive_some(8), "little"):
            content = await receive(stream, size)
            await stream.send_all(content)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listeners[0].socket.getsockname()[1], flush=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, echo, listeners)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)  # type: ignore[call-arg]
        nursery.cancel_scope.cancel()


async def receive(stream: trio.SocketStream, size: int) -> bytearray:
    content = bytearray()
    while len(content) < size:
        content += await stream.receive_some(min(1 << 20, size - len(content)))
    return content


async def measure(name: str, round_trip: RoundTrip, sizes_bytes: Mapping[int, int] = SIZES_BYTES) -> None:
    for size, repetitions in sizes_bytes.items():
        content = bytes(size)
        times_s = []
        for _ in range(repetitions):
            start_s = time.perf_counter()
            await round_trip(content)
            times_s.append(time.perf_counter() - start_s)
        p50_s = statistics.median(times_s)
        p99_s = sorted(times_s)[int(0.99 * len(times_s))]
        rate = f"{2 * size / p50_s / 1e6:8.0f}"
        print(f"{name:12} {size:>11,} {p50_s * 1e3:10.3f} {p99_s * 1e3:10.3f} {rate}")


@asynccontextmanager
async def echoing_peer(address: str, folder: Path) -> AsyncIterator[tuple[Libp2pRouter, str, RoundTrip]]:
    """A router of this process, the node that answers at `address`, and the way there and back."""
    async with open_libp2p_router(settings(folder, address)) as router:
        arrived = trio.Event()

        async def answer(sender: str, body: bytes) -> bytes:
            return body

        async def note(sender: str, header: bytes, payload: memoryview) -> None:
            arrived.set()

        router.serve(answer, note)
        peer = await router.connect(address)

        async def send_there_and_back(content: bytes) -> None:
            nonlocal arrived
            arrived = trio.Event()
            await router.send(peer, b"h" * 64, content)
            await arrived.wait()

        yield router, peer, send_there_and_back


async def measure_router(address: str, folder: Path) -> None:
    async with echoing_peer(address, folder) as (router, peer, send_there_and_back):
        await send_there_and_back(b"")
        await measure("data plane", send_there_and_back)
        times_s = []
        for _ in range(100):
            start_s = time.perf_counter()
            await router.request(peer, bytes(1000))
            times_s.append(time.perf_counter() - start_s)
        p50_ms, p99_ms = statistics.median(times_s) * 1e3, sorted(times_s)[98] * 1e3
        print(f"{'request':12} {1000:>11,} {p50_ms:10.3f} {p99_ms:10.3f}")
        await measure_bulk(router, peer, send_there_and_back)


async def measure_bulk(router: Libp2pRouter, peer: str, there_and_back: RoundTrip) -> None:
    """How fast transfers are, and what a token's round trip costs while they run."""
    n_bytes = 0

    async def transfer() -> None:
        nonlocal n_bytes
        while True:
            # Not `n_bytes += len(await ...)`: that reads n_bytes first, and what other lanes add is lost.
            piece = await router.fetch(peer, ASK_PIECE, timeout_s=60)
            n_bytes += len(piece)

    await router.fetch(peer, ASK_PIECE, timeout_s=60)
    async with trio.open_nursery() as nursery:
        for _ in range(BULK_LANES):
            nursery.start_soon(transfer)
        rates = []
        processor_s, n_bytes_before = time.process_time(), n_bytes
        for _ in range(N_WINDOWS):
            start_s, n_bytes_at_start = time.perf_counter(), n_bytes
            await trio.sleep(WINDOW_S)
            rates.append((n_bytes - n_bytes_at_start) / (time.perf_counter() - start_s) / 1e6)
        processor_s = (time.process_time() - processor_s) / (n_bytes - n_bytes_before) * 1e9
        median, best = statistics.median(rates), max(rates)
        print(f"{'bulk':12} {len(PIECE):>11,} {'':10} {'':10} {median:8.0f} (best half second {best:.0f},")
        print(f"{'':34} {processor_s:.2f} s of the receiver's processor per GB)")
        await measure("with bulk", there_and_back, {14_336: 2000})
        nursery.cancel_scope.cancel()


async def measure_tcp(port: int) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", port)

    async def send_there_and_back(content: bytes) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, len(content).to_bytes(8, "little") + content)
            await receive(stream, len(content))

    async with stream:
        await measure("bare TCP", send_there_and_back)


def echo_process(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.swarm_link", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    print(f"{'way':12} {'bytes':>11} {'p50 ms':>10} {'p99 ms':>10} {'MB/s':>8}")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with echo_process("tcp") as other:
            assert other.stdout is not None
            trio.run(measure_tcp, int(other.stdout.readline()))
            other.communicate()
        with echo_process("router", str(folder / "other")) as other:
            assert other.stdout is not None
            trio.run(measure_router, other.stdout.readline().strip(), folder / "here")
            other.communicate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["router"]:
        trio.run(echo_with_router, Path(sys.argv[2]))
    elif sys.argv[1:2] == ["tcp"]:
        trio.run(echo_with_tcp)
    else:
        main()
