"""Streams while the nodes under them are killed and frozen: does each complete, with the same text, and how
long does a reader wait?

    python -m bench.chaos [--streams 200] [--disturbed 50] [--seed 1]

With --all, what is off or not used by default on loopback is on: the last stage is told the prompt and has
its draft model, rows are packed, and KV of prompts may travel (which only nodes with the whole model have).

Four daemons on loopback hold the bundled model: "a", whom the clients ask, its first third, the others the
rest, so that no node but "a" is needed by all pipelines. Of each disturbed stream a random node of its
pipeline is killed (-9, the daemon with its worker) or frozen (SIGSTOP) after a random token. A killed node
starts again at once, on other ports; a frozen one goes on after some seconds. The rival of every text and
every pause is the same prompt's stream before anything is disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from bench.common.figures import RESULTS, Figure, machine, table
from bench.common.swarm_nodes import demo_nodes, wait_for
from swarmllm.cli.client import Client
from swarmllm.cli.demo import DemoNode, DemoNodes
from swarmllm.operating_system import family

HOLDINGS = {
    "a": ["guide:0:4"],
    "b": ["guide:4:8"],
    "c": ["guide:8:12"],
    "d": ["guide:4:8", "guide:8:12"],
}
PROMPTS = (
    "What is a pipeline?",
    "What is a shard?",
    "What happens when a node dies?",
    "How does prefill work?",
    "What is a private swarm?",
)
"""The bundled model is sure of its answers to these: where it is not, the order of a sum in a cache that is
shared with other requests can decide."""
N_TOKENS = 120
FROZEN_S = 8.0
"""Longer than it takes the others to notice (4.5 s)."""
READ_TIMEOUT_S = 90.0
ALL_ON: Mapping[str, object] = {
    "share_prefix_cache_with_peers": "on",
    "guess_from_prompt": "on",
    "speculative_decoding": True,
    "activation_compression": "lossless",
}
REFUSED_PAUSE_S = 0.25


class Refused(Exception):
    """Before the first token: with 502 or 503, or the same where the head had been sent."""


@dataclass
class Stream:
    prompt: str
    text: str = ""
    first_s: float = 0.0
    """To the first piece of text."""
    longest_pause_s: float = 0.0
    n_recoveries: int = 0
    n_rebuilt: int = 0
    """Of these, after which only the lost stages computed again."""
    recovery_s: float = 0.0
    """From the daemon's knowing of a failure to the next token."""
    n_refusals: int = 0
    error: str = ""
    disturbed_by: str = ""
    """"kill" or "freeze": what was done while it ran."""


@dataclass
class Chaos:
    """The swarm, and who of it is down. Streams and disturbances run in threads; processes are started by
    the thread that made this, because the kernel ends them with it."""

    nodes: DemoNodes
    by_name: dict[str, DemoNode]
    ids: dict[str, str]
    url: str
    ways: tuple[str, ...]
    spared: frozenset[str] = frozenset({"a"})
    down: set[str] = field(default_factory=set)
    repairs: queue.Queue[tuple[DemoNode, str]] = field(default_factory=queue.Queue)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def disturb(self, random: Random, route: str) -> str:
        """Kill or freeze some node of a route that is up; what was done."""
        how = random.choice(self.ways)
        with self._lock:
            up = [
                name
                for name in sorted(self.by_name.keys() - self.down - self.spared)
                if self.ids[name] in route
            ]
            if not up:
                return ""
            name = random.choice(up)
            self.down.add(name)
        node = self.by_name[name]
        for mark in family(node.process.pid):
            os.kill(mark.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        self.repairs.put((node, how))
        return how

    def repair(self, until: threading.Event) -> None:
        """Bring back who is down, until all streams have ended and everybody is up."""
        frozen: list[tuple[float, DemoNode]] = []
        starting: list[DemoNode] = []
        while not until.is_set() or frozen or starting or not self.repairs.empty():
            try:
                node, how = self.repairs.get(timeout=0.05)
            except queue.Empty:
                pass
            else:
                if how == "kill":
                    self.nodes.restart(node)
                    starting.append(node)
                else:
                    frozen.append((time.monotonic() + FROZEN_S, node))
            for entry in [entry for entry in frozen if entry[0] <= time.monotonic()]:
                frozen.remove(entry)
                for mark in family(entry[1].process.pid):
                    os.kill(mark.pid, signal.SIGCONT)
                self.down.discard(entry[1].name)
            for node in [node for node in starting if _is_ready(node)]:
                starting.remove(node)
                self.down.discard(node.name)

    def stream(self, prompt: str, n_tokens: int, random: Random | None = None) -> Stream:
        """One request; with `random`, a node is disturbed after some word of it."""
        stream = Stream(prompt)
        n_words = random.randrange(1, 12) if random else 0
        body = {
            "model": "guide",
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "temperature": 0,
            "max_tokens": n_tokens,
        }
        give_up_s = time.monotonic() + READ_TIMEOUT_S
        while True:
            try:
                self._read(body, stream, n_words, random)
            except Refused:
                # Nobody has read a word of it: clients ask again.
                stream.n_refusals += 1
                if time.monotonic() < give_up_s:
                    time.sleep(REFUSED_PAUSE_S)
                    continue
                stream.error = "refused for too long"
            except Exception as error:
                stream.error = f"{type(error).__name__}: {error}"
            return stream

    def _read(self, body: dict[str, object], stream: Stream, n_words: int, random: Random | None) -> None:
        url = f"{self.url}/v1/chat/completions"
        last_s = time.perf_counter()
        with httpx.stream("POST", url, json=body, timeout=READ_TIMEOUT_S, trust_env=False) as response:
            if response.status_code in (502, 503):
                raise Refused
            for line in response.raise_for_status().iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if "error" in event and not stream.text:
                    raise Refused
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                stream.n_recoveries += event.get("swarm", {}).get("recoveries", 0)
                stream.n_rebuilt += event.get("swarm", {}).get("rebuilt", 0)
                stream.recovery_s += event.get("swarm", {}).get("recovery_ms", 0.0) / 1000
                text = next((c["delta"].get("content") for c in event.get("choices", ())), None)
                if not text:
                    continue
                now_s = time.perf_counter()
                if stream.text:
                    stream.longest_pause_s = max(stream.longest_pause_s, now_s - last_s)
                else:
                    stream.first_s = now_s - last_s
                stream.text += text
                if random is not None and len(stream.text.split()) >= n_words:
                    # Not so many pieces: a quick node tells several tokens at once.
                    stream.disturbed_by = self.disturb(random, response.headers["x-swarm-route"])
                    random = None
                last_s = time.perf_counter()


@contextmanager
def chaos(
    holdings: Mapping[str, list[str]] = HOLDINGS,
    ways: tuple[str, ...] = ("kill", "freeze"),
    **inference: object,
) -> Iterator[Chaos]:
    """ "a" is asked, and first."""
    with demo_nodes() as nodes:
        bootstrap: list[str] = []
        found: dict[str, dict[str, Any]] = {}
        for name, load in holdings.items():
            node = nodes.start(name, load, bootstrap, {"n_threads": 1, **inference})
            found[name] = wait_for(node.announcement, f"{name} to start")
            bootstrap = bootstrap or list(found[name]["addresses"])
        for node in nodes.nodes:
            wait_for(lambda node=node: _is_ready(node), f"{node.name} to be ready")
        url = found["a"]["api_url"]
        with Client(url) as client:
            wait_for(
                lambda: len(client.get("/api/admin/peers")["peers"]) == len(holdings) - 1,
                "everybody to be connected",
            )
        ids = {name: announced["node_id"] for name, announced in found.items()}
        yield Chaos(nodes, {node.name: node for node in nodes.nodes}, ids, url, ways)


def run(
    swarm: Chaos,
    n_streams: int,
    n_disturbed: int,
    n_tokens: int,
    seed: int,
    prompts: Sequence[str] = PROMPTS,
) -> tuple[list[Stream], ...]:
    """(one undisturbed stream per prompt, all others)"""
    before = [swarm.stream(prompt, n_tokens) for prompt in prompts]
    random = Random(seed)
    chosen = set(random.sample(range(n_streams), n_disturbed))
    plans = [
        (random.choice(prompts), Random(seed * 1000 + i) if i in chosen else None) for i in range(n_streams)
    ]
    ended = threading.Event()
    streams: list[Stream] = []

    def work() -> None:
        try:
            with ThreadPoolExecutor(2) as threads:
                streams.extend(threads.map(lambda plan: swarm.stream(plan[0], n_tokens, plan[1]), plans))
        finally:
            ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    swarm.repair(ended)
    worker.join()
    return before, streams


def _is_ready(node: DemoNode) -> bool:
    announced = node.announcement()
    if announced is None or announced["pid"] != node.process.pid:
        return False
    with Client(announced["api_url"]) as client:
        try:
            return bool(client.get("/health/ready"))
        except Exception:
            return False


def report(before: Sequence[Stream], streams: Sequence[Stream]) -> tuple[str, dict[str, Any]]:
    texts = {stream.prompt: stream.text for stream in before}
    completed = [stream for stream in streams if not stream.error]
    identical = [stream for stream in completed if stream.text == texts[stream.prompt]]
    hit = [stream for stream in streams if stream.n_recoveries]
    counts = {
        "streams": len(streams),
        "disturbed (kill)": sum(stream.disturbed_by == "kill" for stream in streams),
        "disturbed (freeze)": sum(stream.disturbed_by == "freeze" for stream in streams),
        "streams that changed pipelines": len(hit),
        "of these, built up from what was left": sum(s.n_rebuilt > 0 for s in hit),
        "refused before their first token, and asked again": sum(s.n_refusals > 0 for s in streams),
        "completed": len(completed),
        "text identical to the undisturbed run": len(identical),
    }
    figures = [
        Figure("longest pause, undisturbed", "s", [stream.longest_pause_s for stream in before]),
    ]
    for how in ("kill", "freeze"):
        pauses = [s.longest_pause_s for s in hit if s.disturbed_by == how]
        if pauses:
            figures.append(Figure(f"longest pause of a stream that a {how} hit", "s", pauses))
    lines = ["| what | streams |", "|---|---|", *(f"| {name} | {n} |" for name, n in counts.items()), ""]
    text = "\n".join(lines) + "\n" + table([(figure, None) for figure in figures])
    errors = [stream.error for stream in streams if stream.error]
    return text, {"counts": counts, "figures": [f.as_json() for f in figures], "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--disturbed", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=N_TOKENS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    with chaos(**(ALL_ON if arguments.all else {})) as swarm:
        before, streams = run(swarm, arguments.streams, arguments.disturbed, arguments.tokens, arguments.seed)
    text, data = report(before, streams)
    print(text)
    for error in data["errors"]:
        print(error)
    command = f"python -m bench.chaos --streams {arguments.streams} --disturbed {arguments.disturbed}"
    command += f" --seed {arguments.seed}" + " --all" * arguments.all
    data |= {"machine": machine(), "command": command}
    name = "chaos-all" if arguments.all else "chaos"
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
