"""How long a swarm takes until everybody knows everything: real libp2p hosts, and a thousand in memory.

    python -m bench.convergence --hosts 3 10 50 --in-memory 1000

All hosts run in one process, which is one core: with fifty, the handshakes of 1225 pairs are most of it.
Nodes are told the address of the first one only. Measured are the times until each node is connected to all
others and has all records, and until a new record of one node has reached all.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import trio
from trio.testing import MockClock

from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.memory import InMemoryNetwork
from swarmllm.swarm.memory_link import LinkQuality
from swarmllm.swarm.router import Router
from swarmllm.swarm.settings import SwarmSettings

DEADLINE_S = 300.0
LOOK_EVERY_S = 0.02
LATENCY_S = 0.02


async def everywhere(routers: Sequence[Router], writer: Router, record: bytes) -> None:
    with trio.fail_after(DEADLINE_S):
        for router in routers:
            while router.records().get(writer.node_id) != record:  # noqa: ASYNC110 (one look per node and turn)
                await trio.sleep(LOOK_EVERY_S)


async def complete(routers: Sequence[Router]) -> None:
    with trio.fail_after(DEADLINE_S):
        for router in routers:
            while len(router.connected()) < len(routers) - 1 or len(router.records()) < len(routers):  # noqa: ASYNC110
                await trio.sleep(LOOK_EVERY_S)


async def real_hosts(n_hosts: int, folder: Path) -> tuple[float, float]:
    """(seconds until complete, seconds until news of one reached all)"""
    routers: list[Libp2pRouter] = []

    async def run(index: int, *, task_status: trio.TaskStatus[Libp2pRouter]) -> None:
        bootstrap = routers[0].addresses if routers else ()
        settings = SwarmSettings(folder / str(index), "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False)
        async with open_libp2p_router(settings) as router:
            await router.publish(b"%d" % index)
            task_status.started(router)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        routers.append(await nursery.start(run, 0))
        start_s = time.perf_counter()
        for index in range(1, n_hosts):
            routers.append(await nursery.start(run, index))  # noqa: PERF401 (each reads the list)
        await complete(routers)
        complete_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        await routers[-1].publish(b"news")
        await everywhere(routers, routers[-1], b"news")
        news_s = time.perf_counter() - start_s
        nursery.cancel_scope.cancel()
    return complete_s, news_s


async def in_memory(n_nodes: int) -> tuple[float, float]:
    """The same in simulated seconds."""
    async with InMemoryNetwork(LinkQuality(latency_s=LATENCY_S)) as network:
        start_s = trio.current_time()
        routers = [network.add(f"node-{index}") for index in range(n_nodes)]
        for router in routers:
            await router.publish(router.node_id.encode())
        await complete(routers)
        complete_s = trio.current_time() - start_s
        start_s = trio.current_time()
        await routers[-1].publish(b"news")
        await everywhere(routers, routers[-1], b"news")
        return complete_s, trio.current_time() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[3, 10, 50])
    parser.add_argument("--in-memory", type=int, default=1000)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| nodes | of | all know all, s | news of one known to all, s | wall clock s |")
    print("|---|---|---|---|---|")
    for n_hosts in arguments.hosts:
        start_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            complete_s, news_s = trio.run(real_hosts, n_hosts, Path(folder))
        wall_s = time.perf_counter() - start_s
        print(
            f"| {n_hosts} | real hosts, loopback | {complete_s:.2f} | {news_s:.2f} | {wall_s:.0f} |",
            flush=True,
        )
    if arguments.in_memory:
        start_s = time.perf_counter()
        clock = MockClock(autojump_threshold=0)
        complete_s, news_s = trio.run(in_memory, arguments.in_memory, clock=clock)
        wall_s = time.perf_counter() - start_s
        where = f"in memory, {LATENCY_S * 1e3:.0f} ms links, simulated time"
        print(f"| {arguments.in_memory} | {where} | {complete_s:.2f} | {news_s:.2f} | {wall_s:.0f} |")


if __name__ == "__main__":
    main()
