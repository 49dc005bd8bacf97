"""A model of a real size, over some daemons on this machine: what every step takes, and what memory.

    python -m bench.real_size --shape 7b --parts 4
    python -m bench.real_size --shape 30b-a3b --layers 8 --nodes 3

A random model in Q4_K_M is written: of Llama-2-7B's shape (3.8 GiB), or of Qwen3-30B-A3B's, a mixture of
experts, with all of its 48 layers or fewer. One daemon adds it and serves its first layers, the others each
fetch some from it and serve them, and two questions are answered over all. After that all is unloaded.

Hashing is timed beside blake3's own hashing of the same bytes, with one thread and with all, and beside a
plain read. On a busy machine the seconds of processors say more than the seconds. It takes some three times
the model's size of disk in --folder and in the folder for temporary files, which are freed at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from bench.common.quantised_models import (
    SEVEN_BILLION,
    THIRTY_BILLION_EXPERTS,
    TINY,
    TINY_EXPERTS,
    write_model,
)
from bench.common.swarm_nodes import Swarm, demo_nodes, is_complete, wait_for
from swarmllm.cli.client import Client
from swarmllm.cli.demo import DemoNode
from swarmllm.operating_system import family

SHAPES = {
    "7b": SEVEN_BILLION,
    "30b-a3b": THIRTY_BILLION_EXPERTS,
    "tiny": TINY,
    "tiny-experts": TINY_EXPERTS,
}
PIECE_BYTES = 2**20
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


def run(shape_name: str, n_layers: int, n_nodes: int, n_parts: int, folder: Path, n_tokens: int) -> None:
    shape = SHAPES[shape_name]
    shape = replace(shape, n_layers=n_layers or shape.n_layers)
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    shown = ("Model name", "CPU(s):", "CPU family", "Model:")
    print("\n".join(line for line in lscpu.splitlines() if line.startswith(shown)))
    print(f"load {os.getloadavg()[0]:.0f}; {shape.n_layers} layers")
    print(HEAD)
    report = Report()
    with report.step("write the file"):
        paths = write_model(shape, folder, stem=f"{NAME}-Q4_K_M", n_parts=n_parts)
    size_bytes = sum(path.stat().st_size for path in paths)
    with report.step("read it plainly (the page cache is warm)", size_bytes):
        read_plainly(paths)
    for name, threads in (("one thread", 1), ("all threads", blake3.AUTO)):
        with report.step(f"blake3 of the same bytes, {name} (the page cache is warm)", size_bytes):
            for path in paths:
                blake3(max_threads=threads).update_mmap(path).digest()
    with demo_nodes() as nodes, ExitStack() as stack:
        report.nodes = nodes.nodes
        inference = {"n_threads": 1, "n_ctx": 512, "n_slots": 1}
        clients: list[Client] = []
        addresses: list[str] = []
        for number in range(1, n_nodes + 1):
            node = nodes.start(f"n{number}", [], addresses, inference)
            announced = wait_for(node.announcement, f"{node.name} to start")
            clients.append(stack.enter_context(Client(announced["api_url"])))
            addresses = addresses or list(announced["addresses"])
        first = clients[0]
        with report.step("add: read, hash", size_bytes):
            for _ in first.post_progress("/api/admin/models", {"path": str(paths[0]), "name": NAME}):
                pass
        bounds = [round(at * shape.n_layers / n_nodes) for at in range(n_nodes + 1)]
        for node, client, start, end in zip(nodes.nodes, clients, bounds, bounds[1:], strict=False):
            way = "map" if client is first else "fetch, check, map"
            if client is not first:
                wait_for(lambda asked=client: knows(asked), f"{node.name} to hear of the model")
            with report.step(f"load {start}:{end} on {node.name}: {way}", size_bytes // n_nodes):
                load(client, f"{start}:{end}")
        wait_for(lambda: is_complete(first, NAME), "a pipeline")
        swarm = Swarm(nodes, first, NAME)
        with report.step("answer the first question"):
            answers = [swarm.ask("What is a pipeline?", n_tokens)]
        with report.step("answer the second question"):
            answers.append(swarm.ask("What is a segment?", n_tokens))
        disk = " + ".join(f"{disk_bytes(node.folder) / GIB:.2f}" for node in nodes.nodes)
        before = memory_now(nodes.nodes)
        with report.step("unload on all"):
            for client in clients:
                for _ in client.post_progress(f"/api/admin/models/{NAME}/unload", {"progress": True}):
                    pass
        after = memory_now(nodes.nodes)
    print(f"The file: {size_bytes / GIB:.2f} GiB. On the disks of the nodes beside it: {disk} GiB.")
    print(f"Private memory before unloading: {before} GiB, after it: {after} GiB.")
    for each in answers:
        print(
            f"{each.n_prompt_tokens} tokens read, first text after {each.first_token_s:.2f} s,"
            f" then {each.tokens_per_s:.2f} tokens/s over {each.n_tokens} tokens"
        )


def read_plainly(paths: list[Path]) -> None:
    buffer = bytearray(PIECE_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def memory_now(nodes: list[DemoNode]) -> str:
    peaks = Peaks()
    peaks.look(nodes)
    return " + ".join(f"{peaks.private.get(node.name, 0) / GIB:.2f}" for node in nodes)


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
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has  [default: all]")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="for the file, deleted at the end  [default: a new one]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        chosen = arguments.shape, arguments.layers, arguments.nodes, arguments.parts
        run(*chosen, Path(name), arguments.tokens)


if __name__ == "__main__":
    main()
