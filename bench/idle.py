"""What a daemon costs that has nothing to do: processor time, with none and with nine others alive.

    python -m bench.idle [--nodes 1 10] [--seconds 60]

Daemons without a model, all connected with all, left alone for a while. The figure is the processor time of a
daemon's process by the kernel's own count, per second of the clock; other programs disturb it little. The
rival is the goal, half a percent of a core.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from bench.common.figures import Figure
from bench.common.swarm_nodes import demo_nodes, wait_for
from swarmllm.cli.client import Client

GOAL_PERCENT = 0.5


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def n_connected(api_url: str) -> int:
    with Client(api_url) as client:
        peers: list[Any] = client.get("/api/admin/peers")["peers"]
        return len(peers)


def idle_percent(n_nodes: int, settle_s: float, measured_s: float) -> Figure:
    urls: list[str] = []
    with demo_nodes() as nodes:
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
        start_s, before = time.monotonic(), [processor_s(pid) for pid in pids]
        time.sleep(measured_s)
        spent = [processor_s(pid) - was for pid, was in zip(pids, before, strict=True)]
        passed_s = time.monotonic() - start_s
        return Figure(f"{n_nodes} alive", "% of a core", [100 * each / passed_s for each in spent])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 10])
    parser.add_argument("--settle", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    print("| daemons alive | % of a core each: least | median | most | goal |")
    print("|---|---|---|---|---|")
    for n_nodes in arguments.nodes:
        figure = idle_percent(n_nodes, arguments.settle, arguments.seconds)
        least, most = min(figure.values), max(figure.values)
        print(
            f"| {n_nodes} | {least:.2f} | {figure.median:.2f} | {most:.2f} | < {GOAL_PERCENT:g} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
