"""What a daemon with nothing to do costs: processor time and memory, with none and with nine others alive.

    python -m bench.idle [--nodes 1 10] [--seconds 60] [--by-owner]

Daemons without a model, all connected with all, left alone for a while. The figure is the processor time of a
daemon's process by the kernel's own count, per second of the clock; other programs disturb it little. The
rival is the goal, half a percent of a core.

`--by-owner` counts what wakes the first of the daemons up, and prints a table: each task, function in one of
trio's threads and other thread with its wake-ups and processor time. *Alone* are those in which it was the
only task to run: without them the process would have slept on. Counting costs time itself, so the
percentages of such a run are too high.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.common.counted_daemon import COUNTS, Counts, Owner
from bench.common.figures import Figure, machine
from bench.common.swarm_nodes import demo_nodes, wait_for
from swarmllm.cli.client import Client
from swarmllm.process_use import resident_bytes

GOAL_PERCENT = 0.5
GOAL_MIB = 120
_PROCESS_CLOCK = 2
"""Of a process: all its threads, also those that have ended, in nanoseconds."""


def processor_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)


def thread_processor_s(pid: int) -> dict[int, float]:
    """Of each thread that lives."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return found


def n_connected(api_url: str) -> int:
    with Client(api_url) as client:
        peers: list[Any] = client.get("/api/admin/peers")["peers"]
        return len(peers)


@dataclass(frozen=True)
class Idle:
    percent: Figure
    mib: Figure
    owners: str
    """A table, where it was asked for."""


def measure(n_nodes: int, settle_s: float, measured_s: float, *, by_owner: bool) -> Idle:
    urls: list[str] = []
    with demo_nodes("bench.common.counted_daemon" if by_owner else "swarmllm") as nodes:
        bootstrap: list[str] = []
        for index in range(n_nodes):
            node = nodes.start(f"n{index + 1}", [], bootstrap)
            announced = wait_for(node.announcement, f"{node.name} to start")
            urls.append(announced["api_url"])
            bootstrap = bootstrap or list(announced["addresses"])
        for url in urls:
            wait_for(lambda url=url: n_connected(url) == n_nodes - 1, "all to be connected")
        time.sleep(settle_s)
        pids = [node.process.pid for node in nodes.nodes]
        first = nodes.nodes[0]
        if by_owner:
            os.kill(first.process.pid, signal.SIGUSR2)
        start_s, before = time.monotonic(), [processor_s(pid) for pid in pids]
        threads_before = thread_processor_s(first.process.pid)
        time.sleep(measured_s)
        spent = [processor_s(pid) - was for pid, was in zip(pids, before, strict=True)]
        passed_s = time.monotonic() - start_s
        owners = ""
        if by_owner:
            threads = thread_processor_s(first.process.pid)
            os.kill(first.process.pid, signal.SIGUSR2)
            file = first.folder / COUNTS
            wait_for(lambda: file.exists() and file.stat().st_size > 0, "the counts")
            counts = msgspec.json.decode(file.read_bytes(), type=Counts)
            took = {each: (now - threads_before.get(each, 0.0)) / passed_s for each, now in threads.items()}
            owners = owners_table(counts, took, first.process.pid, spent[0] / passed_s)
        return Idle(
            Figure(f"{n_nodes} alive", "% of a core", [100 * each / passed_s for each in spent]),
            Figure(f"{n_nodes} alive", "MiB", [resident_bytes(pid) / 2**20 for pid in pids]),
            owners,
        )


def owners_table(counts: Counts, threads: dict[int, float], pid: int, process: float) -> str:
    """`threads`: processor time of each, `process`: of all, in seconds per second."""
    lines = [
        "| owner | wakes it, per s | of them alone | steps or calls, per s | CPU ms/s |",
        "|---|---|---|---|---|",
    ]

    def add(name: str, *cells: float | None) -> None:
        lines.append(f"| {name} | {' | '.join('' if each is None else f'{each:.3f}' for each in cells)} |")

    def add_owners(what: str, owners: dict[str, Owner]) -> None:
        for name, each in sorted(owners.items(), key=lambda item: -item[1].cpu_ns):
            figures = each.n_woken, each.n_alone, each.n_steps
            per_s = [n / counts.seconds for n in figures]
            if what != "task":
                per_s[:2] = [None, None]  # type: ignore[list-item]
            add(f"{what} {name.removeprefix('swarmllm.')}", *per_s, each.cpu_ns / 1e6 / counts.seconds)

    add("all", counts.n_wake_ups / counts.seconds, None, None, process * 1e3)
    steps = sum(each.cpu_ns for each in counts.tasks.values()) / 1e9 / counts.seconds
    add("event loop, besides steps", None, None, None, (threads[pid] - steps) * 1e3)
    add_owners("task", counts.tasks)
    add_owners("in a thread:", counts.functions)
    for native_id, name in counts.threads.items():
        if native_id != pid and not name.startswith("Trio thread") and (took := threads.get(native_id)):
            add(f"thread {name}", None, None, None, took * 1e3)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 10])
    parser.add_argument("--settle", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--by-owner", action="store_true")
    arguments = parser.parse_args()
    print(f"on {machine()}\n")
    print("| daemons alive | % of a core each: least | median | most | goal | MiB each, most | goal |")
    print("|---|---|---|---|---|---|---|")
    tables = []
    for n_nodes in arguments.nodes:
        idle = measure(n_nodes, arguments.settle, arguments.seconds, by_owner=arguments.by_owner)
        least, most = min(idle.percent.values), max(idle.percent.values)
        print(
            f"| {n_nodes} | {least:.2f} | {idle.percent.median:.2f} | {most:.2f} | < {GOAL_PERCENT:g} "
            f"| {max(idle.mib.values):.0f} | < {GOAL_MIB} |",
            flush=True,
        )
        tables += [idle.owners] if arguments.by_owner else []
    for table in tables:
        print(f"\n{table}")


if __name__ == "__main__":
    main()
