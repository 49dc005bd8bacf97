"""A model of a real size, over two daemons on this machine: what every step takes, and what memory.

    python -m bench.real_size --shape 7b --parts 4

A random model of Llama-2-7B's shape in Q4_K_M (3.8 GiB) is written in four parts; one daemon adds it and
serves its first half, the other fetches the second half from the first and serves it, and two questions are
answered over both. Hashing is timed beside blake3's own hashing of the same bytes, with one thread and with
all. It takes 12 GB of disk in --folder and in the folder for temporary files, which are freed at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from bench.common.q4_k_m import SEVEN_BILLION, TINY, write_q4_k_m
from bench.common.swarm_nodes import Swarm, demo_nodes, is_complete, wait_for
from swarmllm.cli.client import Client
from swarmllm.cli.demo import DemoNode
from swarmllm.operating_system import family

SHAPES = {"7b": SEVEN_BILLION, "tiny": TINY}
GIB = 2**30
LOOK_EVERY_S = 0.1
NAME = "real-size"


@dataclass
class Peaks:
    """What the processes of each node took at most, in bytes: private memory, and pages of mapped files."""

    private: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)

    def look(self, nodes: list[DemoNode]) -> None:
        for node in nodes:
            private, shared = 0, 0
            for mark in family(node.process.pid):
                try:
                    status = Path(f"/proc/{mark.pid}/status").read_text()
                except OSError:
                    continue
                sizes = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
                private += int(sizes.get("RssAnon", "0 kB").split()[0]) * 1024
                shared += int(sizes.get("RssFile", "0 kB").split()[0]) * 1024
            self.private[node.name] = max(private, self.private.get(node.name, 0))
            self.shared[node.name] = max(shared, self.shared.get(node.name, 0))


class Report:
    def __init__(self) -> None:
        self.nodes: list[DemoNode] = []

    @contextmanager
    def step(self, name: str, n_bytes: int = 0) -> Iterator[None]:
        """`n_bytes`: that were read or moved in it."""
        peaks, over = Peaks(), threading.Event()

        def look() -> None:
            while not over.wait(LOOK_EVERY_S):
                peaks.look(self.nodes)

        looker = threading.Thread(target=look)
        looker.start()
        start_s, before_s = time.perf_counter(), self._processor_s()
        try:
            yield
        finally:
            taken_s, processor_s = time.perf_counter() - start_s, self._processor_s() - before_s
            over.set()
            looker.join()
        peaks.look(self.nodes)
        print(self._line(name, taken_s, processor_s, n_bytes, peaks), flush=True)

    def _processor_s(self) -> float:
        """Of all processes that are there: this one where it works, and the nodes with their workers."""
        pids = [mark.pid for node in self.nodes for mark in family(node.process.pid)]
        ticks = 0
        for pid in pids:
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def _line(self, name: str, taken_s: float, processor_s: float, n_bytes: int, peaks: Peaks) -> str:
        rate = f"{n_bytes / taken_s / 1e9:.2f}" if n_bytes else ""
        private = " + ".join(f"{peaks.private.get(node.name, 0) / GIB:.2f}" for node in self.nodes)
        shared = " + ".join(f"{peaks.shared.get(node.name, 0) / GIB:.2f}" for node in self.nodes)
        # Of workers that ended meanwhile nothing is known.
        used = f"{processor_s:.2f}" if processor_s >= 0 else ""
        return f"| {name} | {taken_s:.2f} | {used} | {rate} | {private} | {shared} |"


HEAD = (
    "| step | s | s of processors | GB/s | private memory at most, GiB | mapped pages at most, GiB |\n"
    "|---|---|---|---|---|---|"
)


def run(shape_name: str, n_parts: int, folder: Path, n_tokens: int) -> None:
    shape = SHAPES[shape_name]
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    shown = ("Model name", "CPU(s):", "CPU family", "Model:")
    print("\n".join(line for line in lscpu.splitlines() if line.startswith(shown)))
    print(HEAD)
    report = Report()
    with report.step("write the file"):
        paths = write_q4_k_m(shape, folder, stem=f"{NAME}-Q4_K_M", n_parts=n_parts)
    size_bytes = sum(path.stat().st_size for path in paths)
    for name, threads in (("one thread", 1), ("all threads", blake3.AUTO)):
        with report.step(f"blake3 of the same bytes, {name} (the page cache is warm)", size_bytes):
            for path in paths:
                blake3(max_threads=threads).update_mmap(path).digest()
    with demo_nodes() as nodes:
        report.nodes = nodes.nodes
        inference = {"n_threads": 1, "n_ctx": 512, "n_slots": 1}
        first = nodes.start("n1", [], [], inference)
        announced = wait_for(first.announcement, "n1 to start")
        second = nodes.start("n2", [], announced["addresses"], inference)
        with (
            Client(announced["api_url"]) as a,
            Client(wait_for(second.announcement, "n2 to start")["api_url"]) as b,
        ):
            with report.step("add: read, hash", size_bytes):
                for _ in a.post_progress("/api/admin/models", {"path": str(paths[0]), "name": NAME}):
                    pass
            half = shape.n_layers // 2
            with report.step(f"load 0:{half} on the first: cut, map", size_bytes // 2):
                load(a, f"0:{half}")
            wait_for(lambda: knows(b), "n2 to hear of the model")
            rest = f"{half}:{shape.n_layers}"
            with report.step(f"load {rest} on the second: fetch, check, cut, map", size_bytes // 2):
                load(b, rest)
            wait_for(lambda: is_complete(a, NAME), "a pipeline")
            swarm = Swarm(nodes, a, NAME)
            with report.step("answer the first question"):
                first = swarm.ask("What is a pipeline?", n_tokens)
            with report.step("answer the second question"):
                answer = swarm.ask("What is a segment?", n_tokens)
            with report.step("unload on both"):
                for client in (a, b):
                    for _ in client.post_progress(f"/api/admin/models/{NAME}/unload", {"progress": True}):
                        pass
    for each in (first, answer):
        print(
            f"{each.n_prompt_tokens} tokens read, first text after {each.first_token_s:.2f} s,"
            f" then {each.tokens_per_s:.2f} tokens/s over {each.n_tokens} tokens"
        )


def load(client: Client, layers: str) -> None:
    for event in client.post_progress(f"/api/admin/models/{NAME}/load", {"layers": layers}):
        if event.get("type") == "result":
            return
    raise RuntimeError(f"{layers} were not loaded")


def knows(client: Client) -> bool:
    models = client.get("/api/admin/models")["models"]
    return any(model["name"] == NAME and model["sources"] for model in models)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="for the file, deleted at the end  [default: a new one]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        run(arguments.shape, arguments.parts, Path(name), arguments.tokens)


if __name__ == "__main__":
    main()
