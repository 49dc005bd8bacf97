"""What distance does to the swarm: two nodes over an emulated wide-area network.

    python -m bench.wan

For round trips of 0, 20, 80 and 200 ms, with 1 % of packets lost and without: how long two nodes take to
count each other as connected, a token's way there and back, a request, and the speed of a transfer. The rival
of each figure is the network's own round trip.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from bench.common.wan_proxy import Wan, relayed
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.settings import SwarmSettings

BYTES_PER_S = 12.5e6
"""100 Mbit/s."""
TOKEN_BYTES = 14_336
PIECE = bytes(1024 * 1024)
N_TOKENS, N_REQUESTS, N_PIECES = 40, 8, 8
ROUND_TRIPS_S = (0.0, 0.02, 0.08, 0.2)
LOSSES = (0.0, 0.01)


@asynccontextmanager
async def node(folder: Path, name: str, ip: str, wan: Wan, *bootstrap: str) -> AsyncIterator[Libp2pRouter]:
    """A router that others reach at `ip`, through the network."""
    settings = SwarmSettings(
        folder / name, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False, announce=(ip,)
    )
    async with open_libp2p_router(settings) as router:
        ports = [router.host.port, router.plane.port]
        async with relayed(ports, ip, wan):
            yield router


async def median_s(repetitions: int, act: Callable[[], Awaitable[object]]) -> float:
    times_s = []
    for _ in range(repetitions):
        start_s = time.perf_counter()
        await act()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


async def measure(wan: Wan, folder: Path) -> list[float]:
    """Seconds to connect, token p50, request p50, and MB/s of a transfer."""
    # Away from the listening address and from each other, whatever is run at the same time.
    async with node(folder, "b", "127.0.7.2", wan) as b:
        started_s = time.perf_counter()
        async with node(folder, "a", "127.0.7.1", wan, *b.addresses) as a:
            with trio.fail_after(60):
                async with a.changes() as changes:
                    while b.node_id not in a.connected():
                        await anext(changes)
            connected_s = time.perf_counter() - started_s
            arrived = trio.Event()

            async def note(sender: str, header: bytes, payload: memoryview) -> None:
                arrived.set()

            async def echo(sender: str, header: bytes, payload: memoryview) -> None:
                await b.send(sender, header, payload)

            async def serve(sender: str, body: bytes) -> bytes:
                return PIECE if body == b"piece" else body

            a.serve(serve, note)
            b.serve(serve, echo)

            async def token() -> None:
                nonlocal arrived
                arrived = trio.Event()
                await a.send(b.node_id, b"h" * 64, bytes(TOKEN_BYTES))
                await arrived.wait()

            with trio.fail_after(120):
                await token()
                token_s = await median_s(N_TOKENS, token)
                request_s = await median_s(N_REQUESTS, lambda: a.request(b.node_id, b"hello", timeout_s=60))
                await a.fetch(b.node_id, b"", timeout_s=60)
                start_s = time.perf_counter()
                async with trio.open_nursery() as nursery:
                    for _ in range(N_PIECES):
                        nursery.start_soon(lambda: a.fetch(b.node_id, b"piece", timeout_s=60))
                rate = N_PIECES * len(PIECE) / (time.perf_counter() - start_s) / 1e6
            return [connected_s, token_s * 1e3, request_s * 1e3, rate]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| round trip | loss | connected after s | token ms | request ms | transfer MB/s of 12.5 |")
    print("|---|---|---|---|---|---|")
    for rtt_s in ROUND_TRIPS_S:
        for loss in LOSSES:
            with tempfile.TemporaryDirectory() as folder:
                wan = Wan(rtt_s, BYTES_PER_S, loss)
                connected_s, token_ms, request_ms, rate = trio.run(measure, wan, Path(folder))
            figures = (f"{connected_s:.2f}", f"{token_ms:.1f}", f"{request_ms:.1f}", f"{rate:.1f}")
            print(f"| {rtt_s * 1e3:.0f} ms | {loss:.0%} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
