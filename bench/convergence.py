"""How long a swarm takes until everybody knows everything: real libp2p hosts, and a thousand in memory.

    python -m bench.convergence --hosts 3 10 50 --in-memory 1000

The real hosts share one process per core: with fifty, the handshakes of 1225 pairs are most of what they do.
Nodes are told the address of the first one only. Measured are the times until each node has all records and
reaches all others, and until a new record of one node has reached all, and how many connections a node has
then. `--peers N`: how many each looks for (`network.max_peers`; as many as there are hosts is a full mesh).
`--joining N`: N hosts in one process join one after the other, each when the swarm is complete again; the
time is that of the last one.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from trio.testing import MockClock

from swarmllm.swarm.discovery.dialler import PEERS_MAX
from swarmllm.swarm.in_memory.link import LinkQuality
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.router import Router
from swarmllm.swarm.settings import SwarmSettings

if TYPE_CHECKING:
    from trio_typing import TaskStatus


DEADLINE_S = 300.0
LOOK_EVERY_S = 0.02
LATENCY_S = 0.02
CHANGE = b"news"


async def everywhere(routers: Sequence[Router]) -> None:
    with trio.fail_after(DEADLINE_S):
        for router in routers:
            while CHANGE not in router.records().values():  # noqa: ASYNC110 (one look per node and turn)
                await trio.sleep(LOOK_EVERY_S)


async def complete(routers: Sequence[Router], n_nodes: int) -> None:
    with trio.fail_after(DEADLINE_S):
        for router in routers:
            while len(router.reachable()) < n_nodes - 1 or len(router.records()) < n_nodes:  # noqa: ASYNC110
                await trio.sleep(LOOK_EVERY_S)


async def run_host(
    folder: Path, bootstrap: tuple[str, ...], peers: int, *, task_status: TaskStatus[Libp2pRouter]
) -> None:
    settings = SwarmSettings(folder, "127.0.0.1", 0, 0, bootstrap=bootstrap, max_peers=peers, mdns=False)
    async with open_libp2p_router(settings) as router:
        await router.publish(str(folder).encode())
        task_status.started(router)
        await trio.sleep_forever()


async def some_hosts(n_mine: int, n_nodes: int, peers: int, bootstrap: tuple[str, ...], folder: Path) -> None:
    """One process of several; it and `real_hosts` talk in lines."""
    routers: list[Libp2pRouter] = []

    async with trio.open_nursery() as nursery:
        for index in range(n_mine):
            routers.append(await nursery.start(run_host, folder / str(index), bootstrap, peers))
            if index == 0:
                print(*routers[0].addresses, flush=True)
                bootstrap = bootstrap or routers[0].addresses
        await complete(routers, n_nodes)
        print("complete", flush=True)
        if await trio.to_thread.run_sync(sys.stdin.readline) == "publish\n":
            await routers[-1].publish(CHANGE)
        await everywhere(routers)
        print("known", *(len(router.connected()) for router in routers), flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        nursery.cancel_scope.cancel()


def real_hosts(n_hosts: int, n_processes: int, peers: int, folder: Path) -> tuple[float, float, float]:
    """(seconds until complete, seconds until news of one reached all, connections of a node)"""
    n_processes = min(n_processes, n_hosts)
    processes: list[subprocess.Popen[str]] = []
    bootstrap: list[str] = []

    def answers(expected: str) -> list[int]:
        numbers: list[int] = []
        for process in processes:
            assert process.stdout is not None
            answer, *more = process.stdout.readline().split() or [""]
            if answer != expected:
                raise SystemExit(f"{n_hosts} hosts: not {expected} after {DEADLINE_S:.0f} s")
            numbers += map(int, more)
        return numbers

    def tell(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    try:
        start_s = time.perf_counter()
        for index in range(n_processes):
            n_mine = n_hosts * (index + 1) // n_processes - n_hosts * index // n_processes
            own = folder / str(index)
            command = [
                sys.executable,
                "-m",
                "bench.convergence",
                "--part",
                str(n_mine),
                str(n_hosts),
                str(peers),
                str(own),
            ]
            process = subprocess.Popen(
                [*command, *bootstrap], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(process)
            assert process.stdout is not None
            addresses = process.stdout.readline().split()
            if not bootstrap:
                start_s = time.perf_counter()
                bootstrap = addresses
        answers("complete")
        complete_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        for process in processes:
            tell(process, "publish" if process is processes[-1] else "wait")
        degrees = answers("known")
        change_s = time.perf_counter() - start_s
        for process in processes:
            tell(process, "leave")
        for process in processes:
            process.wait(30)
        return complete_s, change_s, sum(degrees) / len(degrees)
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def joining(n_hosts: int, peers: int, folder: Path) -> tuple[float, float, float]:
    """(seconds until the last of them was complete, seconds until its news reached all)"""
    routers: list[Libp2pRouter] = []

    async with trio.open_nursery() as nursery:
        complete_s = 0.0
        for index in range(n_hosts):
            start_s = time.perf_counter()
            bootstrap = routers[0].addresses if routers else ()
            routers.append(await nursery.start(run_host, folder / str(index), bootstrap, peers))
            await complete(routers, len(routers))
            complete_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        await routers[-1].publish(CHANGE)
        await everywhere(routers)
        change_s = time.perf_counter() - start_s
        degree = sum(len(router.connected()) for router in routers) / n_hosts
        nursery.cancel_scope.cancel()
    return complete_s, change_s, degree


async def in_memory(n_nodes: int) -> tuple[float, float, float]:
    """The same in simulated seconds."""
    async with InMemoryNetwork(LinkQuality(latency_s=LATENCY_S)) as network:
        start_s = trio.current_time()
        routers = [network.add(f"node-{index}") for index in range(n_nodes)]
        for router in routers:
            await router.publish(router.node_id.encode())
        await complete(routers, n_nodes)
        complete_s = trio.current_time() - start_s
        start_s = trio.current_time()
        await routers[-1].publish(CHANGE)
        await everywhere(routers)
        return complete_s, trio.current_time() - start_s, float(n_nodes - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[3, 10, 50])
    parser.add_argument("--in-memory", type=int, default=1000)
    parser.add_argument("--joining", type=int, nargs="*", default=[])
    parser.add_argument("--peers", type=int, default=PEERS_MAX)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.part:
        n_mine, n_nodes, peers, folder, *bootstrap = arguments.part
        trio.run(some_hosts, int(n_mine), int(n_nodes), int(peers), tuple(bootstrap), Path(folder))
        return
    print("| nodes | of | all reach all, s | news of one known to all, s | connections each | wall clock s |")
    print("|---|---|---|---|---|---|")
    for n_hosts in arguments.hosts:
        with tempfile.TemporaryDirectory() as folder, row(n_hosts, "real hosts, loopback") as times:
            times += real_hosts(n_hosts, arguments.processes, arguments.peers, Path(folder))
    for n_hosts in arguments.joining:
        with (
            tempfile.TemporaryDirectory() as folder,
            row(n_hosts, "real hosts, the last of which joins") as times,
        ):
            times += trio.run(joining, n_hosts, arguments.peers, Path(folder))
    if arguments.in_memory:
        where = f"in memory, {LATENCY_S * 1e3:.0f} ms links, simulated time"
        with row(arguments.in_memory, where) as times:
            times += trio.run(in_memory, arguments.in_memory, clock=MockClock(autojump_threshold=0))


@contextmanager
def row(n_nodes: int, what: str) -> Iterator[list[float]]:
    """A row of the table, from the two times and the degree that are put into the list."""
    times: list[float] = []
    start_s = time.perf_counter()
    yield times
    complete_s, change_s, degree = times
    wall_s = time.perf_counter() - start_s
    print(
        f"| {n_nodes} | {what} | {complete_s:.2f} | {change_s:.2f} | {degree:.1f} | {wall_s:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
