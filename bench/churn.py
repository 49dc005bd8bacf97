"""Eight daemons, ten minutes, one of them always coming or going: what is left behind in those that stay?

    python -m bench.churn [--minutes 10] [--seed 1]

Two nodes are watched and never touched; clients ask them all the time, and every fifth client leaves in the
middle of its answer. Of the six others one every few seconds is killed (-9, with its worker), stopped, or
frozen for some seconds, and started again. The measure of the end is the beginning: the same two processes,
idle, with all eight connected, before the first change and after the last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from bench.common.figures import RESULTS, machine
from bench.common.swarm_nodes import demo_nodes, wait_for
from swarmllm.cli.client import Client
from swarmllm.cli.demo import DemoNode, DemoNodes
from swarmllm.operating_system import family

HOLDINGS = ("0:4", "8:12", "4:8", "8:12", "0:6", "6:12", "4:8", "0:4")
"""The first two are watched. Whoever is missing, somebody else mostly holds the same layers."""
N_WATCHED = 2
N_CLIENTS = 2
INFERENCE = {"n_threads": 1, "n_ctx": 1024}
SETTLE_S = 60.0
FROZEN_S = 8.0
PAUSE_S = 4.0
N_LOOKS = 12
PROMPTS = ("What is a pipeline?", "What is a shard?", "How does prefill work?")


@dataclass
class Traffic:
    """Clients that ask until they are stopped."""

    urls: list[str]
    stopping: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    left: int = 0
    refused: int = 0
    broken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, random: Random) -> None:
        while not self.stopping.is_set():
            url = random.choice(self.urls)
            outcome = self._ask(url, random.choice(PROMPTS), leaves=random.random() < 0.2)
            with self._lock:
                setattr(self, outcome, getattr(self, outcome) + 1)
            if outcome == "refused":
                self.stopping.wait(0.3)

    def _ask(self, url: str, prompt: str, *, leaves: bool) -> str:
        body: dict[str, Any] = {"model": "guide", "messages": [{"role": "user", "content": prompt}]}
        body |= {"stream": True, "max_tokens": 40}
        n_lines = 0
        try:
            with httpx.stream(
                "POST",
                f"{url}/v1/chat/completions",
                json=body | {"max_tokens": 40},
                timeout=90,
                trust_env=False,
            ) as answer:
                if answer.status_code >= 400:
                    return "refused"
                for line in answer.iter_lines():
                    n_lines += 1
                    if leaves and n_lines == 6:
                        return "left"
                    if line == "data: [DONE]":
                        return "answered"
        except httpx.HTTPError:
            pass
        return "broken"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random = Random(options.seed)
    with eight_nodes() as nodes:
        watched = nodes.nodes[:N_WATCHED]
        urls = [str((node.announcement() or {})["api_url"]) for node in watched]
        # A warm-up, so that what is allocated once is there when the counting starts.
        with running(Traffic(urls), random):
            time.sleep(20)
        before = idle_measures(watched, len(nodes.nodes))
        traffic = Traffic(urls)
        with running(traffic, random):
            changes = change(nodes, options.minutes * 60, random)
        after = idle_measures(watched, len(nodes.nodes))
    text = report(options.minutes, changes, traffic, before, after)
    print(text)
    (RESULTS / "churn.md").write_text(text + "\n")
    (RESULTS / "churn.json").write_text(
        json.dumps({"machine": machine(), "changes": changes, "before": before, "after": after}, indent=1)
        + "\n"
    )


@contextmanager
def eight_nodes() -> Iterator[DemoNodes]:
    with demo_nodes() as nodes:
        bootstrap: list[str] = []
        for index, layers in enumerate(HOLDINGS):
            node = nodes.start(
                f"n{index + 1}", [f"guide:{layers}"], bootstrap, {"n_threads": 1, "n_ctx": 1024}
            )
            found = wait_for(node.announcement, f"{node.name} to start")
            bootstrap = bootstrap or list(found["addresses"])
        yield nodes


@contextmanager
def running(traffic: Traffic, random: Random) -> Iterator[None]:
    threads = [
        threading.Thread(target=traffic.run, args=(Random(random.random()),)) for _ in range(N_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        traffic.stopping.set()
        for thread in threads:
            thread.join()


def change(nodes: DemoNodes, seconds: float, random: Random) -> dict[str, int]:
    """One node after the other goes and comes back. How often what was done."""
    counts = {"killed": 0, "stopped": 0, "frozen": 0}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        node = random.choice(nodes.nodes[N_WATCHED:])
        how = random.choice(list(counts))
        counts[how] += 1
        members = [mark.pid for mark in family(node.process.pid)]
        if how == "frozen":
            signal_all(members, signal.SIGSTOP)
            time.sleep(FROZEN_S)
            signal_all(members, signal.SIGCONT)
        else:
            signal_all(
                members if how == "killed" else members[:1],
                signal.SIGKILL if how == "killed" else signal.SIGTERM,
            )
            node.process.wait()
            nodes.restart(node)
            wait_for(lambda node=node: is_ready(node), f"{node.name} to be back")
        time.sleep(random.uniform(0.5, PAUSE_S))
    return counts


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def idle_measures(watched: list[DemoNode], n_nodes: int) -> list[dict[str, Any]]:
    """Of each watched node, once everybody is connected and nothing runs, and after some rest."""
    for node in watched:
        wait_for(lambda node=node: len(ask(node, "peers")["peers"]) == n_nodes - 1, "all to be connected")
        wait_for(lambda node=node: ask(node, "stats")["requests"]["active"] == 0, "nothing to run")
    time.sleep(SETTLE_S)
    return [measure(node) for node in watched]


def measure(node: DemoNode) -> dict[str, Any]:
    """The moment with the fewest tasks: a gossip message under way is one more."""
    looks = []
    for _ in range(N_LOOKS):
        looks.append(look(node))
        time.sleep(0.5)
    return min(looks, key=lambda found: found["tasks"])


def look(node: DemoNode) -> dict[str, Any]:
    stats = ask(node, "stats")
    pid = node.process.pid
    descriptors = open_descriptors(pid)
    return {
        "tasks": stats["tasks"],
        "connections accepted": accepted_connections(pid, descriptors),
        "file descriptors": len(descriptors),
        "sockets": sum(target.startswith("socket:") for target in descriptors),
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
        "resident MiB": round(resident_mib(pid), 1),
        "workers": len(family(pid)) - 1,
        "workers' MiB": round(sum(resident_mib(mark.pid) for mark in family(pid)[1:]), 1),
        "requests under way": stats["requests"]["active"] + stats["requests"]["queued"],
        "stages for others": stats["pipelines"]["active_stage_requests"],
    }


def open_descriptors(pid: int) -> list[str]:
    """What each leads to; one may be closed while they are read."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


def accepted_connections(pid: int, descriptors: list[str]) -> int:
    """Who dialled whom changes, and an accepted connection has not the same tasks as a dialled one."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    own = [(row[1].partition(":")[2], row[3]) for row in rows if f"socket:[{row[9]}]" in descriptors]
    listening = {port for port, state in own if state == "0A"}
    return sum(state == "01" and port in listening for port, state in own)


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def ask(node: DemoNode, what: str) -> dict[str, Any]:
    with Client(str((node.announcement() or {})["api_url"])) as client:
        return dict(client.get(f"/api/admin/{what}"))


def is_ready(node: DemoNode) -> bool:
    found = node.announcement()
    if found is None or found["pid"] != node.process.pid:
        return False
    try:
        with Client(found["api_url"]) as client:
            return bool(client.get("/health/ready"))
    except Exception:
        return False


def report(
    minutes: float,
    changes: dict[str, int],
    traffic: Traffic,
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
) -> str:
    lines = [
        f"`python -m bench.churn --minutes {minutes:g}` on {machine()}",
        "",
        f"Changes: {changes}. Requests: {traffic.answered} answered, {traffic.left} left by their clients, "
        f"{traffic.refused} refused before their first token, {traffic.broken} broken.",
        "",
        "| idle, all connected | first node before | after | second node before | after |",
        "|---|---|---|---|---|",
    ]
    for name in before[0]:
        cells = [f"{when[i][name]}" for i in range(N_WATCHED) for when in (before, after)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
