"""What a message costs while transfers run between the same two nodes, and what they still carry meanwhile.

    python -m bench.beside_transfers

Two processes on loopback, rounds of messages alone and of messages beside four lanes of 1 MiB pieces, taking
turns: the drift of a noisy machine hits both alike. Messages come back to back (nothing but the network in
between, the hardest case), and at a decoder's pace, one every PACE_S.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from bench.common.figures import Figure, ratios, table, write
from bench.swarm_link import ASK_PIECE, BULK_LANES, echo_process, echoing_peer
from swarmllm.swarm.libp2p_router import Libp2pRouter

MESSAGE = bytes(14_336)
"""One token's hidden state of a 3584 wide model."""
PACE_S = 0.005
WINDOW_S = 0.25
COMMAND = "python -m bench.beside_transfers"

RoundTrip = Callable[[], Awaitable[None]]


class Lanes:
    """Transfers that can be halted."""

    def __init__(self, router: Libp2pRouter, node_id: str) -> None:
        self._router = router
        self._node_id = node_id
        self._open = trio.Event()
        self._n_busy = 0
        self._quiet = trio.Event()
        self.n_bytes = 0

    async def carry(self) -> None:
        while True:
            await self._open.wait()
            self._n_busy += 1
            piece = await self._router.fetch(self._node_id, ASK_PIECE, timeout_s=60)
            self.n_bytes += len(piece)
            self._n_busy -= 1
            if not self._n_busy:
                self._quiet.set()

    def go(self) -> None:
        self._open.set()

    async def halt(self) -> None:
        self._open, self._quiet = trio.Event(), trio.Event()
        if self._n_busy:
            await self._quiet.wait()


async def times_ms(there_and_back: RoundTrip, n_messages: int, pace_s: float) -> list[float]:
    times = []
    for _ in range(n_messages):
        start_s = time.perf_counter()
        await there_and_back()
        times.append((time.perf_counter() - start_s) * 1e3)
        if pace_s:
            await trio.sleep(pace_s)
    return times


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


class Comparison:
    """Messages of one kind, alone and beside transfers, round after round."""

    def __init__(self, what: str, n_messages: int, pace_s: float) -> None:
        self.n_messages, self.pace_s = n_messages, pace_s
        self.p50_alone = Figure(f"{what}, alone, p50", "ms")
        self.p99_alone = Figure(f"{what}, alone, p99", "ms")
        self.p50_beside = Figure(f"{what}, beside transfers, p50", "ms")
        self.p99_beside = Figure(f"{what}, beside transfers, p99", "ms")
        self.rate = Figure(f"transfers beside {what}", "MB/s")

    async def round(self, there_and_back: RoundTrip, lanes: Lanes) -> None:
        alone = await times_ms(there_and_back, self.n_messages, self.pace_s)
        lanes.go()
        n_bytes, start_s = lanes.n_bytes, time.perf_counter()
        beside = await times_ms(there_and_back, self.n_messages, self.pace_s)
        self.rate.values.append((lanes.n_bytes - n_bytes) / (time.perf_counter() - start_s) / 1e6)
        await lanes.halt()
        self.p50_alone.values.append(statistics.median(alone))
        self.p50_beside.values.append(statistics.median(beside))
        self.p99_alone.values.append(p99(alone))
        self.p99_beside.values.append(p99(beside))

    def rows(self) -> list[tuple[Figure, Figure | None]]:
        return [
            (self.p50_alone, None),
            (self.p50_beside, ratios(self.p50_beside, self.p50_alone)),
            (self.p99_alone, None),
            (self.p99_beside, ratios(self.p99_beside, self.p99_alone)),
            (self.rate, None),
        ]


async def compare(address: str, folder: Path, n_rounds: int) -> list[tuple[Figure, Figure | None]]:
    async with (
        echoing_peer(address, folder) as (router, peer, send_there_and_back),
        trio.open_nursery() as nursery,
    ):
        there_and_back = partial(send_there_and_back, MESSAGE)
        lanes = Lanes(router, peer)
        for _ in range(BULK_LANES):
            nursery.start_soon(lanes.carry)
        await times_ms(there_and_back, 200, 0.0)
        rate = Figure("transfers with nothing beside them", "MB/s")
        kinds = [
            Comparison("messages back to back", 1000, 0.0),
            Comparison(f"a message every {PACE_S * 1e3:g} ms", 200, PACE_S),
        ]
        for _ in range(n_rounds):
            lanes.go()
            await trio.sleep(WINDOW_S)
            n_bytes, start_s = lanes.n_bytes, time.perf_counter()
            await trio.sleep(WINDOW_S)
            rate.values.append((lanes.n_bytes - n_bytes) / (time.perf_counter() - start_s) / 1e6)
            await lanes.halt()
            for kind in kinds:
                await kind.round(there_and_back, lanes)
        nursery.cancel_scope.cancel()
        return [(rate, None), *(row for kind in kinds for row in kind.rows())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as text,
        echo_process("router", str(Path(text) / "other")) as other,
    ):
        assert other.stdout is not None
        rows = trio.run(compare, other.stdout.readline().strip(), Path(text) / "here", arguments.rounds)
        other.communicate()
    print(table(rows))
    if arguments.write:
        write("beside_transfers", COMMAND, rows, table(rows))


if __name__ == "__main__":
    main()
