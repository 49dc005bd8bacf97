"""How soon a node plans without another one that is gone: killed, frozen, or left.

    python -m bench.forgetting --rounds 10

Real processes on loopback. Each round starts one node per way of going, all of which say that they hold a
model; measured is the time from the signal until the observer's registry, which routes are planned from, has
that node no more among the model's holders. Nodes go at random moments between two pings.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from bench.common.figures import Figure, table, write
from swarmllm.swarm.data.keepalive import PING_S
from swarmllm.swarm.libp2p_router import open_libp2p_router
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce

MODEL_ID = "5" * 64
DEADLINE_S = 60.0
LOOK_EVERY_S = 0.005
COMMAND = "python -m bench.forgetting"


def settings(folder: Path, *bootstrap: str) -> SwarmSettings:
    return SwarmSettings(folder, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False)


async def hold(folder: Path, bootstrap: str) -> None:
    """The node that will go."""
    async with open_libp2p_router(settings(folder, bootstrap)) as router:
        held = ShardAnnounce(model_id=MODEL_ID, name="m", n_layers=4, ranges=((0, 4),))
        await router.publish(encode_record(NodeRecord(node_id=router.node_id, models=(held,))))
        print(router.node_id, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)  # type: ignore[call-arg]


def leave(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


WAYS: dict[str, Callable[[subprocess.Popen[str]], None]] = {
    "killed (SIGKILL)": lambda process: process.send_signal(signal.SIGKILL),
    "frozen (SIGSTOP)": lambda process: process.send_signal(signal.SIGSTOP),
    "left (goodbye)": leave,
}


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (the time is what is measured)
            await trio.sleep(LOOK_EVERY_S)


def counts(registry: Registry, node_id: str) -> bool:
    return any(holder.node_id == node_id for holder in registry.holders(MODEL_ID))


def start_node(folder: Path, bootstrap: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.forgetting", "--node", str(folder), bootstrap]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def one_round(registry: Registry, address: str, folder: Path, figures: dict[str, Figure]) -> None:
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for number, way in enumerate(WAYS):
            processes[way] = start_node(folder / str(number), address)
        for way, process in processes.items():
            assert process.stdout is not None
            node_id = (await trio.to_thread.run_sync(process.stdout.readline)).strip()
            await until(partial(counts, registry, node_id))
            await trio.sleep(random.uniform(0, PING_S))
            start_s = time.perf_counter()
            WAYS[way](process)
            await until(lambda node_id=node_id: not counts(registry, node_id))  # type: ignore[misc]
            figures[way].values.append(time.perf_counter() - start_s)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


async def measure(n_rounds: int) -> list[Figure]:
    figures = {way: Figure(way, "s") for way in WAYS}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        async with (
            open_libp2p_router(settings(folder / "observer")) as router,
            trio.open_nursery() as nursery,
        ):
            registry = Registry(router.node_id)
            await nursery.start(follow_router, registry, router)
            for number in range(n_rounds):
                await one_round(registry, router.addresses[0], folder / str(number), figures)
            nursery.cancel_scope.cancel()
    return list(figures.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--node", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.node:
        trio.run(hold, Path(arguments.node[0]), arguments.node[1])
        return
    rows = [(figure, None) for figure in trio.run(measure, arguments.rounds)]
    print(table(rows))
    if arguments.write:
        write("forgetting", f"{COMMAND} --rounds {arguments.rounds}", rows, table(rows))


if __name__ == "__main__":
    main()
