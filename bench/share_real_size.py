"""One `share` and one question with a model of a real size, over three machines: what every step takes.

    python -m bench.share_real_size --shape 7b

The machines are network namespaces on this one. A random model of Llama-2-7B's shape in Q4_K_M (3.8 GiB)
lies in four parts on a hub (`bench.common.local_hub`) that the first of them reaches, or each of them.
What is typed is what the quickstart says: a private swarm, three daemons with a part of the memory each,
one `swarmllm share hf:...`, one question. A second question is timed. The table says how long each step
took, what every process had in memory at most, what every node had on its disk, and the limits of this
machine beside them: reading the disk, reading memory, a connection between two namespaces.

Needs root and `ip`, and about 16 GB of disk in --folder, which are freed at the end.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.figures import RESULTS, machine
from bench.common.local_hub import REPOSITORY
from bench.common.namespaces import cabled_namespaces, inside
from bench.common.quantised_models import SEVEN_BILLION, TINY, write_model
from swarmllm.cli.client import Client, CommandFailed
from swarmllm.operating_system import family

SHAPES = {"7b": SEVEN_BILLION, "tiny": TINY}
NAMES = ("kitchen", "attic", "garage")
STEM = "random-Q4_K_M"
MODEL = "big"
N_PARTS = 4
ROOM = 1.25
"""Memory of all machines together, of what the weights take: two of three do not hold them."""
LOOK_EVERY_S = 0.2
START_TIMEOUT_S = 120.0
TIMEOUT_S = 3600.0
GIB = 2**30


@dataclass
class Peak:
    """Of one process, in bytes: private memory, and mapped pages of files."""

    private: int = 0
    mapped: int = 0


@dataclass
class Seen:
    """What was seen of one machine."""

    peaks: dict[str, Peak] = field(default_factory=dict)
    """Daemon and worker."""
    disk_bytes: int = 0
    disk_peak_bytes: int = 0
    spans: dict[str, list[float]] = field(default_factory=dict)
    """Step -> when it was first and last seen."""
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    """Step -> what arrived in it."""


class NamedMachine:
    """A home folder and a network of its own."""

    def __init__(self, home: Path, namespace: str, hub: str = "") -> None:
        self.home, self.namespace = home, namespace
        programs = home / "bin"
        programs.mkdir(parents=True)
        program = programs / "swarmllm"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m swarmllm "$@"\n')
        program.chmod(0o755)
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("SWARMLLM_", "XDG_", "HF_"))}
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = kept | {"HOME": str(home), "PATH": path, **({"HF_ENDPOINT": hub} if hub else {})}
        self.seen = Seen()
        self.daemon: subprocess.Popen[bytes] | None = None

    @property
    def data_dir(self) -> Path:
        return self.home / ".local" / "share" / "swarmllm"

    def type(self, command: str) -> str:
        """What a command prints. Raises RuntimeError where it fails."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "sh", "-ec", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.home,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, command: str) -> None:
        with (self.home / "daemon.log").open("wb") as log:
            self.daemon = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "sh", "-c", f"exec {command}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.home,
            )
        wait_until(self.api_url, f"the daemon of {self.namespace}")

    def stop(self) -> None:
        if self.daemon is not None:
            self.daemon.terminate()
            try:
                self.daemon.wait(30)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()

    def api_url(self) -> str:
        assert self.daemon is not None
        assert self.daemon.poll() is None, (self.home / "daemon.log").read_text()
        try:
            return str(json.loads((self.data_dir / "daemon.json").read_text())["api_url"])
        except (FileNotFoundError, ValueError):
            return ""

    def watch(self, over: threading.Event) -> None:
        """Look at everything now and then, in a thread of its own."""
        with inside(self.namespace), Client(self.api_url()) as client:
            n_looks = 0
            while not over.wait(LOOK_EVERY_S):
                self._look_at_memory()
                with suppress(CommandFailed):
                    self._look_at_steps(client)
                if n_looks % 10 == 0:
                    self.look_at_disk()
                n_looks += 1

    def _look_at_memory(self) -> None:
        assert self.daemon is not None
        for mark in family(self.daemon.pid):
            try:
                status = Path(f"/proc/{mark.pid}/status").read_text()
            except OSError:
                continue
            sizes = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
            peak = self.seen.peaks.setdefault("daemon" if mark.pid == self.daemon.pid else "worker", Peak())
            peak.private = max(peak.private, _kib(sizes, "RssAnon"))
            peak.mapped = max(peak.mapped, _kib(sizes, "RssFile"))

    def look_at_disk(self) -> None:
        n_bytes = 0
        for path in self.data_dir.rglob("*"):
            with suppress(OSError):
                n_bytes += path.lstat().st_blocks * 512
        self.seen.disk_bytes = n_bytes
        self.seen.disk_peak_bytes = max(self.seen.disk_peak_bytes, n_bytes)

    def _look_at_steps(self, client: Client) -> None:
        now_s = time.perf_counter()
        for download in client.get("/api/admin/downloads")["downloads"]:
            self._note(f"{download['state']} from the hub", now_s, download["done_bytes"])
        for share in client.get("/api/admin/shares")["shares"]:
            if share["model"] == MODEL:
                self._note(share["state"], now_s, share["arrived_bytes"])

    def _note(self, step: str, now_s: float, n_bytes: int) -> None:
        self.seen.spans.setdefault(step, [now_s, now_s])[1] = now_s
        self.seen.fetched_bytes[step] = max(n_bytes, self.seen.fetched_bytes.get(step, 0))


def _kib(sizes: dict[str, str], name: str) -> int:
    return int(sizes.get(name, "0 kB").split()[0]) * 1024


def wait_until(look: Any, what: str) -> Any:
    """Raises RuntimeError."""
    deadline_s = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        if found := look():
            return found
        time.sleep(0.1)
    raise RuntimeError(f"waited {START_TIMEOUT_S:.0f} s for {what}")


@contextmanager
def hub_process(namespace: str, folder: Path) -> Iterator[str]:
    """Its address, in that namespace."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "bench.common.local_hub", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.terminate()
        process.wait()


def sent_by(hub: str, namespace: str) -> int:
    with inside(namespace), Client(hub) as asked:
        return int(asked.get("/sent")["n_bytes"])


@contextmanager
def watching(machines: list[NamedMachine]) -> Iterator[None]:
    over = threading.Event()
    threads = [threading.Thread(target=each.watch, args=(over,)) for each in machines]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@dataclass
class Step:
    name: str
    seconds: float
    n_bytes: int = 0


def measure(shape_name: str, folder: Path, n_tokens: int, *, hub_for_all: bool) -> dict[str, Any]:
    files = folder / "hub"
    files.mkdir()
    began_s = time.perf_counter()
    parts = write_model(SHAPES[shape_name], files, stem=STEM, n_parts=N_PARTS)
    size_bytes = sum(part.stat().st_size for part in parts)
    steps = [Step("write the four parts", time.perf_counter() - began_s, size_bytes)]
    with ExitStack() as stack:
        namespaces = stack.enter_context(cabled_namespaces(NAMES))
        limits = measure_limits(parts[0], namespaces)
        with_hub = NAMES if hub_for_all else NAMES[:1]
        hubs = {name: stack.enter_context(hub_process(namespaces[name], files)) for name in with_hub}
        machines = [NamedMachine(folder / name, namespaces[name], hubs.get(name, "")) for name in NAMES]
        first, second, third = machines
        invitation = ""
        memory = f"--max-memory-gib {ROOM * size_bytes / GIB / len(NAMES):.4f}"
        for one, name in zip(machines, NAMES, strict=True):
            one.type("swarmllm network create" if one is first else f"swarmllm join {invitation}")
            stack.callback(one.stop)
            one.start(f"swarmllm daemon --nickname {name} {memory}")
            if one is first:
                invitation = one.type("swarmllm invite").strip()
        wait_until(lambda: third.type("swarmllm peers").count("12D3Koo") >= 2, "the three to meet")
        with watching(machines):
            share = f"swarmllm share hf:{REPOSITORY}:{parts[0].name} --name {MODEL} --yes"
            began_s = time.perf_counter()
            print(f"$ {share}\n{first.type(share)}")
            ended_s = time.perf_counter()
            ask = f'swarmllm chat --model {MODEL} --max-tokens 4 "What is a pipeline?" --route'
            asked_s = time.perf_counter()
            print(f"$ {ask}\n{second.type(ask)}")
            answered_s = time.perf_counter()
            again = f'swarmllm chat --model {MODEL} --max-tokens {n_tokens} --json "What is a segment?"'
            timed = json.loads(second.type(again))
        for one in machines:
            one.look_at_disk()
        sent_bytes = [sent_by(hub, namespaces[name]) for name, hub in hubs.items()]
    steps += [*steps_of(machines), Step("share, from the command to all layers ready", ended_s - began_s)]
    steps.append(Step("the first question and its answer of 4 tokens", answered_s - asked_s))
    return {
        "size_bytes": size_bytes,
        "hub_sent_bytes": sent_bytes,
        "steps": [{"name": s.name, "seconds": s.seconds, "n_bytes": s.n_bytes} for s in steps],
        "limits": limits,
        "second_answer": {"usage": timed["usage"], "swarm": timed["swarm"]},
        "nodes": {
            name: {
                "disk_bytes": one.seen.disk_bytes,
                "disk_peak_bytes": one.seen.disk_peak_bytes,
                "peaks": {process: vars(peak) for process, peak in one.seen.peaks.items()},
            }
            for name, one in zip(NAMES, machines, strict=True)
        },
    }


def steps_of(machines: list[NamedMachine]) -> list[Step]:
    """In the order in which they began; what every node says of itself, seen every LOOK_EVERY_S."""
    found = []
    for name, one in zip(NAMES, machines, strict=True):
        for step, (start_s, end_s) in one.seen.spans.items():
            if step.startswith(("fetching", "checking", "loading")):
                found.append(
                    (start_s, Step(f"{name}: {step}", end_s - start_s, one.seen.fetched_bytes[step]))
                )
    return [step for _, step in sorted(found, key=lambda each: each[0])]


def measure_limits(file: Path, namespaces: dict[str, str]) -> dict[str, float]:
    """In bytes per second."""
    return {
        "disk": disk_bytes_per_s(file),
        "memory, one thread": memory_bytes_per_s(1),
        "memory, all threads": memory_bytes_per_s(len(os.sched_getaffinity(0))),
        "line": line_bytes_per_s(namespaces[NAMES[0]], namespaces[NAMES[1]]),
    }


def disk_bytes_per_s(path: Path) -> float:
    """Past the page cache."""
    n_bytes, piece = 0, mmap.mmap(-1, 16 * 2**20)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        began_s = time.perf_counter()
        while (n := os.readv(file, [piece])) == len(piece):
            n_bytes += n
        return (n_bytes + n) / (time.perf_counter() - began_s)
    finally:
        os.close(file)


def memory_bytes_per_s(n_threads: int) -> float:
    """Of reading, the best of five."""
    arrays = [np.ones(2**26, np.int64) for _ in range(n_threads)]
    took_s = []
    with ThreadPoolExecutor(n_threads) as threads:
        for _ in range(5):
            began_s = time.perf_counter()
            list(threads.map(np.sum, arrays))
            took_s.append(time.perf_counter() - began_s)
    return sum(array.nbytes for array in arrays) / min(took_s)


def line_bytes_per_s(sender: str, receiver: str, n_bytes: int = 2**30) -> float:
    """Of one TCP connection without encryption."""
    with inside(receiver):
        server = socket.create_server(("10.87.0.2", 0))
    piece = bytes(2**20)

    def give() -> None:
        with inside(sender):
            connection = socket.create_connection(server.getsockname()[:2])
        with connection:
            for _ in range(n_bytes // len(piece)):
                connection.sendall(piece)

    with server, ThreadPoolExecutor(1) as threads:
        giving = threads.submit(give)
        connection, _ = server.accept()
        room, came, began_s = bytearray(2**20), 0, time.perf_counter()
        with connection:
            while n := connection.recv_into(room):
                came += n
        giving.result()
        return came / (time.perf_counter() - began_s)


def text_of(result: dict[str, Any]) -> str:
    lines = ["| step | s | GB | GB/s |", "|---|---|---|---|"]
    for step in result["steps"]:
        gigabytes = step["n_bytes"] / 1e9
        rate = f"{gigabytes / step['seconds']:.2f}" if gigabytes and step["seconds"] else ""
        size = f"{gigabytes:.2f}" if gigabytes else ""
        lines.append(f"| {step['name']} | {step['seconds']:.1f} | {size} | {rate} |")
    lines += ["", "| limit of this machine | GB/s |", "|---|---|"]
    lines += [f"| {name} | {rate / 1e9:.2f} |" for name, rate in result["limits"].items()]
    lines += [
        "",
        "| node | daemon: private, GiB at most | worker: private, GiB at most | worker: mapped, GiB at most"
        " | disk, GiB | disk at most, GiB |",
        "|---|---|---|---|---|---|",
    ]
    nothing = vars(Peak())
    for name, node in result["nodes"].items():
        daemon, worker = (node["peaks"].get(process, nothing) for process in ("daemon", "worker"))
        cells = [daemon["private"], worker["private"], worker["mapped"]]
        cells += [node["disk_bytes"], node["disk_peak_bytes"]]
        lines.append(f"| {name} | " + " | ".join(f"{n_bytes / GIB:.2f}" for n_bytes in cells) + " |")
    swarm, usage = result["second_answer"]["swarm"], result["second_answer"]["usage"]
    lines += [
        "",
        f"Of a model of {result['size_bytes'] / 1e9:.2f} GB the hub sent each node"
        f" {', '.join(f'{n_bytes / 1e9:.2f}' for n_bytes in result['hub_sent_bytes'])} GB."
        f" The second question ({usage['prompt_tokens']} tokens) was read in"
        f" {swarm['prefill_ms'] / 1e3:.1f} s and answered with {swarm['decode_tokens_per_s']:.2f} tokens/s"
        f" over {usage['completion_tokens']} tokens, through {len(swarm['route'])} nodes.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--tokens", type=int, default=16, help="of the second answer  [default: 16]")
    parser.add_argument("--hub-for-all", action="store_true", help="the second and the third reach it, too")
    parser.add_argument("--folder", type=Path, help="for all files, deleted at the end  [default: a new one]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        result = measure(arguments.shape, Path(name), arguments.tokens, hub_for_all=arguments.hub_for_all)
    text = text_of(result)
    command = f"python -m bench.share_real_size --shape {arguments.shape} --tokens {arguments.tokens}"
    command += " --hub-for-all" if arguments.hub_for_all else ""
    print(text)
    if arguments.shape == "7b":
        stem = RESULTS / f"share-real-size-{arguments.shape}{'-hub-for-all' if arguments.hub_for_all else ''}"
        whole = {"command": command, "machine": machine(), **result}
        stem.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
        stem.with_suffix(".md").write_text(f"`{command}` on {machine()}\n\n{text}\n")


if __name__ == "__main__":
    main()
