"""Real daemons on loopback for a benchmark: k processes, each with its share of one model's layers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from bench.common.delay_proxy import delay_proxy, free_port
from bench.common.raw_stream import stream_events
from bench.common.streamed import Endpoint
from swarmllm.cli.client import Client
from swarmllm.cli.demo import DemoNodes
from swarmllm.operating_system import family

START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """One streamed answer as its client saw it."""

    n_tokens: int
    n_prompt_tokens: int
    first_token_s: float
    decode_s: float
    text: str
    swarm: dict[str, Any]
    n_cached: int = 0
    """Tokens of the prompt."""
    n_right: int = 0
    """Guesses that were right."""
    n_wrong: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Of decoding. Raises RuntimeError where it was over at once: there is nothing to time."""
        if not self.decode_s:
            raise RuntimeError(f"all {self.n_tokens} tokens came in one event: ask for more (--tokens)")
        return (self.n_tokens - 1) / self.decode_s


class Swarm:
    """Daemons that hold one model between them; asked through the first."""

    def __init__(self, nodes: DemoNodes, client: Client, model: str) -> None:
        self.nodes, self.client, self.model = nodes, client, model

    def endpoint(self, name: str) -> Endpoint:
        """Of the first daemon; all of them answer."""
        pids = [mark.pid for node in self.nodes.nodes for mark in family(node.process.pid)]
        return Endpoint(name, self.client.api_url, self.model, tuple(pids))

    def ask(self, prompt: str, n_tokens: int, *, ignore_eos: bool = True) -> Answer:
        """See `ask_chat`."""
        return ask_chat(self.client.api_url, self.model, prompt, n_tokens, ignore_eos=ignore_eos)


def ask_chat(api_url: str, model: str, prompt: str, n_tokens: int, *, ignore_eos: bool = True) -> Answer:
    """Greedy, `n_tokens` exactly, or at most where the model may end its answer. Times are the client's:
    first text to finish chunk."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": n_tokens,
        "ignore_eos": ignore_eos,
    }
    start_s = time.perf_counter()
    events = stream_events(api_url, "/v1/chat/completions", body)
    text: list[str] = []
    first_s = end_s = 0.0
    usage: dict[str, Any] = {}
    swarm: dict[str, Any] = {}
    for event in events:
        if "error" in event.content:
            raise RuntimeError(event.content["error"])
        usage = event.content.get("usage") or usage
        swarm = event.content.get("swarm") or swarm
        for choice in event.content.get("choices", ()):
            if piece := choice.get("delta", {}).get("content"):
                first_s = first_s or event.at_s
                text.append(piece)
            if choice.get("finish_reason"):
                end_s = event.at_s
    if not end_s:
        raise RuntimeError("the answer had no end")
    guesses = usage.get("completion_tokens_details", {})
    return Answer(
        n_tokens=int(usage["completion_tokens"]),
        n_prompt_tokens=int(usage["prompt_tokens"]),
        first_token_s=first_s - start_s,
        decode_s=end_s - first_s,
        text="".join(text),
        swarm=swarm,
        n_cached=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        n_right=guesses.get("accepted_prediction_tokens", 0),
        n_wrong=guesses.get("rejected_prediction_tokens", 0),
    )


@contextmanager
def demo_nodes(module: str = "swarmllm") -> Iterator[DemoNodes]:
    """Daemons that are started here are gone at the end, also those that a benchmark has frozen. `module`:
    what python runs."""
    nodes = DemoNodes(module)
    try:
        yield nodes
    finally:
        for node in nodes.nodes:
            for mark in family(node.process.pid):
                os.kill(mark.pid, signal.SIGCONT)
        nodes.stop()
        nodes.remove_folder()


@contextmanager
def swarm_of(
    n_nodes: int, gguf: Path, n_layers: int, *, n_threads: int, n_ctx: int, **inference: object
) -> Iterator[Swarm]:
    """`n_nodes` daemons, the layers of `gguf` shared out evenly and in order. `inference`: more keys of that
    table."""
    with swarm_of_all(n_nodes, {gguf: n_layers}, None, n_threads=n_threads, n_ctx=n_ctx, **inference) as all_:
        yield all_[0]


@contextmanager
def swarm_of_all(
    n_nodes: int,
    layers: Mapping[Path, int],
    one_way_s: float | None,
    *,
    n_threads: int,
    n_ctx: int,
    **inference: object,
) -> Iterator[list[Swarm]]:
    """`n_nodes` daemons that share each of the models out evenly and in order; one Swarm of each model.
    `layers`: how many each file has. `one_way_s`: between any two of them, by proxies; None: no proxies."""
    clients: list[Client] = []
    inference |= {"n_threads": n_threads, "n_ctx": n_ctx}
    with demo_nodes() as nodes, ExitStack() as stack:
        bootstrap: list[str] = []
        for i in range(n_nodes):
            away = None if one_way_s is None else stack.enter_context(behind_proxy(one_way_s))
            node = nodes.start(f"n{i + 1}", [], bootstrap, inference, away and away.settings)
            announced = wait_for(node.announcement, f"{node.name} to start")
            clients.append(stack.enter_context(Client(announced["api_url"])))
            addresses = away.addresses(announced["node_id"]) if away else announced["addresses"]
            bootstrap = bootstrap or list(addresses)
        names = [share_out(clients, gguf, n_layers) for gguf, n_layers in layers.items()]
        yield [Swarm(nodes, clients[0], name) for name in names]


def share_out(clients: Sequence[Client], gguf: Path, n_layers: int) -> str:
    """Add a model to all nodes and load its layers evenly and in order; its name."""
    bounds = [round(i * n_layers / len(clients)) for i in range(len(clients) + 1)]
    name = ""
    for client, start, end in zip(clients, bounds, bounds[1:], strict=False):
        for event in client.post_progress("/api/admin/models", {"path": str(gguf)}):
            name = event.get("model", {}).get("name", name)
        for _ in client.post_progress(f"/api/admin/models/{name}/load", {"layers": f"{start}:{end}"}):
            pass
    wait_for(lambda: is_complete(clients[0], name), f"a pipeline for {name}")
    return name


@dataclass(frozen=True)
class BehindProxy:
    """A node that others reach through a proxy only."""

    settings: dict[str, object]
    """Of its table `network`."""

    def addresses(self, node_id: str) -> list[str]:
        """At which it is reached."""
        (host,) = self.settings["announce"]  # type: ignore[misc]
        return [f"/ip4/{host}/tcp/{self.settings['libp2p_port']}/p2p/{node_id}"]


_HOMES = count(1)


@contextmanager
def behind_proxy(one_way_s: float, bytes_per_s: float = 0.0) -> Iterator[BehindProxy]:
    """Two loopback addresses that nobody else has here: of a node, and of its proxy (see `delay_proxy`)."""
    number = next(_HOMES)
    home, proxy = (f"127.0.{1 + n // 250}.{1 + n % 250}" for n in (2 * number, 2 * number + 1))
    ports = free_port(home), free_port(home)
    settings: dict[str, object] = {
        "listen_host": home,
        "announce": [proxy],
        "libp2p_port": ports[0],
        "data_port": ports[1],
    }
    with delay_proxy([((proxy, port), (home, port)) for port in ports], one_way_s, bytes_per_s):
        yield BehindProxy(settings)


def is_complete(client: Client, name: str) -> bool:
    models: Sequence[dict[str, Any]] = client.get("/api/admin/models")["models"]
    return any(model["name"] == name and model["complete"] for model in models)


def wait_for(probe: Any, what: str) -> Any:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if found := probe():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"waited {START_TIMEOUT_S:.0f} s for {what}")
