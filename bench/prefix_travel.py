"""What it saves that another node has computed the beginning of a prompt: time to first token, and work.

    python -m bench.prefix_travel --rounds 5 [--mbit-s 100 --rtt-ms 20]

Two daemons that share what they keep run the same whole model, the 0.5B shape in Q8_0 with random weights and
a token per letter. The second is asked a prompt of 672 tokens of which the first has computed 640, against
one of the same length that nobody has computed, in turns. `--mbit-s` puts a proxy in user space between them,
which delays and limits what goes each way. `--kv-types f16 q8_0` has the two keep KV as different types, and
`--rounded` has it travel as q8_0 between two that keep f16.

Both have `encrypted_pipeline` on: a node with all layers then computes what its own clients ask. Otherwise a
route may lead to the holder, which is as fast as the node that was asked and need not fetch. What that takes
has a row of its own: a third node without layers, the model pinned to the first, asks it over the same line.

The first fetch between two nodes dials a connection for it, and has rows of its own. Rounds before it do not
count: a node does not ask where that does not seem to pay, as on a machine that is busy with other work.

    python -m bench.prefix_travel --nodes 8 --users 64

All nodes get questions of users with one system prompt of 2,000 tokens, one after the other: how many tokens
of it the swarm computed in all, as a multiple of computing it once. `--holders 1`: only the first node has
the layers, and computes for the clients of all.

    python -m bench.prefix_travel --cut --rounds 5 [--mbit-s 100 --rtt-ms 20]

The same model, cut in two. A third node, which holds no layers, has asked two nodes, which are about to stop.
Later two others take over their layers, and it asks again. Against a prompt that nobody has computed, over
the same two nodes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from random import Random
from typing import Any

import httpx

from bench.common.figures import RESULTS, Figure, machine, ratios, table
from bench.common.models import half_billion
from bench.common.shapes import HALF_BILLION
from bench.common.swarm_nodes import behind_proxy, demo_nodes, is_complete, wait_for
from swarmllm.cli.client import Client
from swarmllm_proto.blocks import BLOCK_TOKENS

N_SHARED, N_PROMPT = 640, 672
N_SYSTEM, N_QUESTION = 2000, 40
N_CTX = 4096
ANSWER_S = 300.0
N_CTX_CUT = 16384
OLD, NEW = ("old-1", "old-2"), ("new-1", "new-2")
NEVER_S = 600
FIRST_TRIES = 3
"""Rounds until the first fetch."""
SETTLED_S = 7.0
"""News of what is kept is told every five seconds."""
HTTP = httpx.Client(timeout=ANSWER_S, trust_env=False, verify=False)
"""A client for each request would first read the system's certificates, and that takes about as long as an
answer."""


def letters(seed: int, n_tokens: int) -> str:
    """The bench model has a token per letter."""
    return "".join(Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=n_tokens))


def route(answer: dict[str, Any]) -> tuple[str, ...]:
    """The names of the nodes that computed it."""
    return tuple(stage["nickname"] for stage in answer["swarm"]["route"])


class Node:
    def __init__(self, client: Client, name: str, node_id: str = "") -> None:
        self.client, self.name, self.node_id = client, name, node_id
        self.model = ""

    def add(self, path: str) -> None:
        for event in self.client.post_progress("/api/admin/models", {"path": path}):
            self.model = event.get("model", {}).get("name", self.model)

    def load(self, path: str, layers: str | None = None) -> None:
        """None: all."""
        self.add(path)
        body = {} if layers is None else {"layers": layers}
        for _ in self.client.post_progress(f"/api/admin/models/{self.model}/load", body):
            pass

    def holders(self) -> set[str]:
        """Of layers of the model, by name."""
        found = self.client.get(f"/api/admin/models/{self.model}/status")["holders"]
        return {each["nickname"] for each in found if each["layers"]}

    def is_near_to(self, names: Sequence[str]) -> bool:
        """It has measured the way to each of these."""
        peers = self.client.get("/api/admin/peers")["peers"]
        return {each["nickname"] for each in peers if each["rtt_ms"] is not None}.issuperset(names)

    def stream(self, model: str) -> AbstractContextManager[httpx.Response]:
        body = {"model": model, "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        url = f"{self.client.api_url}/v1/completions"
        return HTTP.stream("POST", url, json=body)

    def ask_over(self, prompt: str, *names: str) -> dict[str, Any]:
        """Raises RuntimeError where other nodes compute the answer than these."""
        answer = self.ask(prompt)
        if route(answer) != names:
            raise RuntimeError(f"{self.name} was answered by {route(answer)}, not by {names}")
        return answer

    def ask(self, prompt: str) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        url = f"{self.client.api_url}/v1/completions"
        return dict(HTTP.post(url, json=body).raise_for_status().json())

    def first_token(self, prompt: str, *names: str) -> tuple[float, dict[str, Any]]:
        """Milliseconds until the answer, which has one token. Raises as `ask_over`."""
        start_s = time.perf_counter()
        answer = self.ask_over(prompt, *names)
        return (time.perf_counter() - start_s) * 1000, answer

    def counters(self) -> dict[str, float]:
        """Of KV that travels, by the last word of the metric's name and its labels; what is not 0."""
        text = HTTP.get(f"{self.client.api_url}/metrics").text
        lines = (line for line in text.splitlines() if line.startswith("swarmllm_prefix_"))
        found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
        return {name.removeprefix("swarmllm_prefix_"): value for name, value in found.items() if value}

    def announced(self, peer: str) -> int:
        peers = self.client.get("/api/admin/peers")["peers"]
        return sum(each["announced_prefixes"] for each in peers if each["nickname"] == peer)


def inference(n_threads: int, n_ctx: int) -> dict[str, object]:
    """A daemon's table of that name. To try where the model may be cut would go on beside the first round."""
    return {
        "n_threads": n_threads,
        "n_ctx": n_ctx,
        "share_prefix_cache_with_peers": "on",
        "check_cuts": False,
    }


class SharingSwarm:
    """Nodes that share what they keep; with `mbit_s` the ways between them lead through the proxy."""

    def __init__(self, stack: ExitStack, rtt_s: float, mbit_s: float, n_threads: int) -> None:
        self._stack = stack
        self._nodes = stack.enter_context(demo_nodes())
        self._line = rtt_s / 2, mbit_s * 125_000
        self._inference = inference(n_threads, N_CTX)
        self._bootstrap: list[str] = []

    def start(self, name: str, **more: object) -> Node:
        """`more`: of the table `inference`."""
        one_way_s, bytes_per_s = self._line
        away = self._stack.enter_context(behind_proxy(one_way_s, bytes_per_s)) if bytes_per_s else None
        settings = {**self._inference, **more}
        node = self._nodes.start(name, [], self._bootstrap, settings, away and away.settings)
        told = wait_for(node.announcement, f"{name} to start")
        addresses = away.addresses(told["node_id"]) if away else told["addresses"]
        self._bootstrap = self._bootstrap or list(addresses)
        return Node(self._stack.enter_context(Client(told["api_url"])), name, told["node_id"])

    def print_log_of_fetches(self) -> None:
        """What the nodes said of KV that was not fetched."""
        for node in self._nodes.nodes:
            for line in node.log_path.read_text("utf-8", "replace").splitlines():
                if "prefix" in line:
                    print(f"{node.name}: {line}")


def pair(
    rounds: int,
    rtt_s: float,
    mbit_s: float,
    n_threads: int,
    kv_types: Sequence[str] = (),
    *,
    rounded: bool = False,
) -> list[tuple[Figure, Figure | None]]:
    """`kv_types`: of each node."""
    warm_name = f"{N_PROMPT} tokens, {N_SHARED} of them computed elsewhere"
    cold = Figure(f"{N_PROMPT} tokens, new", "ms")
    warm, fetch = Figure(warm_name, "ms"), Figure("of that, fetching", "ms")
    mib = Figure("KV that came", "MiB")
    first_cold = Figure(cold.name, "ms")
    first_warm = Figure(f"the first fetch of the two: {warm_name}", "ms")
    first_fetch = Figure(fetch.name, "ms")
    remote = Figure(f"{warm_name}, asked there over the line", "ms")
    computes_itself: dict[str, object] = {"encrypted_pipeline": True}
    if rounded:
        computes_itself["activation_compression"] = "q8_0"
    path, n_layers = str(half_billion()), HALF_BILLION.n_layers
    with ExitStack() as stack:
        swarm = SharingSwarm(stack, rtt_s, mbit_s, n_threads)
        holder, second = (
            swarm.start(name, kv_type=kv_type, **computes_itself)
            for name, kv_type in zip(("n1", "n2"), kv_types or ("f16", "f16"), strict=True)
        )
        for node in (holder, second):
            node.load(path)
        asker = swarm.start("asker", pins=[f"{holder.model}:0:{n_layers}@{holder.node_id}"])
        asker.add(path)
        for node in (second, asker):
            wait_for(lambda node=node: holder.name in node.holders(), "the holder's layers")
            wait_for(lambda node=node: node.is_near_to([holder.name]), "round trips to be measured")
        asker.ask_over("a", holder.name)  # Its worker reads the vocabulary before the first question.
        n_own, index = N_PROMPT - N_SHARED, 0
        while len(cold.values) < rounds:
            shared, n_before = letters(100 + index, N_SHARED), second.announced(holder.name)
            holder.ask_over(shared + "z", holder.name)
            cold_ms, _ = second.first_token(letters(1000 + index, N_PROMPT), second.name)
            wait_for(lambda n=n_before: second.announced(holder.name) > n, "the announcement")
            warm_ms, answer = second.first_token(shared + letters(2000 + index, n_own), second.name)
            remote_ms, _ = asker.first_token(shared + letters(3000 + index, n_own), holder.name)
            prefix = answer["swarm"]["prefix"] or {"tokens": 0, "fetch_ms": 0.0, "bytes": 0}
            if prefix["tokens"] != N_SHARED:
                tokens = prefix["tokens"]
                print(f"round {index}: {tokens} fetched, {warm_ms:.0f} ms against {cold_ms:.0f} ms")
                print(f"{second.name}: {second.counters()}")
            index += 1
            if first_fetch.values:
                cold.values.append(cold_ms)
                warm.values.append(warm_ms)
                fetch.values.append(prefix["fetch_ms"])
                mib.values.append(prefix["bytes"] / 2**20)
                remote.values.append(remote_ms)
            elif prefix["tokens"]:
                first_cold.values.append(cold_ms)
                first_warm.values.append(warm_ms)
                first_fetch.values.append(prefix["fetch_ms"])
            elif index == FIRST_TRIES:
                raise RuntimeError(f"nothing was fetched in {index} rounds")
    return [
        (cold, None),
        (warm, ratios(cold, warm)),
        (fetch, None),
        (mib, None),
        (remote, ratios(cold, remote)),
        (first_warm, ratios(first_cold, first_warm)),
        (first_fetch, None),
    ]


@contextmanager
def stopping_chain(
    n_prompts: int, rtt_s: float, mbit_s: float, n_threads: int
) -> Iterator[tuple[Node, list[Node], list[str]]]:
    """A node without layers, the nodes over which it is answered now, and prompts of which two nodes that are
    about to stop have computed the first tokens for it. They stop when the answers are complete that they
    wait for, which is never."""
    gguf, half = half_billion(), HALF_BILLION.n_layers // 2
    halves = f"0:{half}", f"{half}:{2 * half}"
    settings = inference(n_threads, N_CTX_CUT) | {"failover_timeout_s": NEVER_S}
    with demo_nodes() as nodes, ExitStack() as stack:
        bootstrap: list[str] = []

        def start(name: str, load: list[str]) -> Node:
            away = stack.enter_context(behind_proxy(rtt_s / 2, mbit_s * 125_000)) if mbit_s else None
            stays = {"drain_timeout_s": NEVER_S}
            node = nodes.start(name, load, bootstrap, settings, away and away.settings, stays)
            told = wait_for(node.announcement, f"{name} to start")
            bootstrap[:] = bootstrap or (away.addresses(told["node_id"]) if away else told["addresses"])
            return Node(stack.enter_context(Client(told["api_url"])), name)

        def started(names: Sequence[str], load: list[str]) -> list[Node]:
            found = [start(name, load) for name in names]
            for node, layers in zip(found, halves, strict=True):
                node.load(str(gguf), layers)
            return found

        origin, other_half = start("origin", []), start("helper", ["guide:6:12"])
        olds = started(OLD, ["guide:0:6"])
        origin.add(str(gguf))
        wait_for(lambda: origin.holders() == set(OLD), "the first chain")
        prompts = [letters(100 + index, N_SHARED) for index in range(n_prompts)]
        for prompt in prompts:
            origin.ask_over(prompt + "z", *OLD)
        streams = []  # One whose lines are forgotten ends.
        for node in olds:
            wait_for(lambda node=node: is_complete(node.client, "guide"), "a pipeline of the other model")
            streams.append(stack.enter_context(node.stream("guide")).iter_lines())
            next(streams[-1])
        processes = {each.name: each.process for each in nodes.nodes}
        processes[other_half.name].kill()
        # While nobody can take over, nothing is fetched before a request needs it.
        for name in OLD:
            processes[name].terminate()
        wait_for(lambda: not origin.holders(), "the first chain to be given up")
        news = started(NEW, [])
        wait_for(lambda: origin.holders() == set(NEW), "the second chain")
        for node in news:
            wait_for(lambda node=node: node.is_near_to(OLD), "round trips to be measured")
        # A stage that does not know how fast it is does not know whether fetching pays.
        origin.ask_over(letters(99, N_PROMPT), *NEW)
        yield origin, news, prompts


def cut(rounds: int, rtt_s: float, mbit_s: float, n_threads: int) -> list[tuple[Figure, Figure | None]]:
    cold = Figure(f"{N_PROMPT} tokens, new, over two nodes", "ms")
    warm_name = f"{N_PROMPT} tokens, {N_SHARED} of them computed by two others"
    warm = Figure(warm_name, "ms")
    first_cold, first_warm = Figure(cold.name, "ms"), Figure(f"the first fetch: {warm_name}", "ms")
    with stopping_chain(rounds + 1, rtt_s, mbit_s, n_threads) as (origin, news, prompts):
        for index, shared in enumerate(prompts):
            cold_ms, _ = origin.first_token(letters(1000 + index, N_PROMPT), *NEW)
            prompt = shared + letters(2000 + index, N_PROMPT - N_SHARED)
            warm_ms, answer = origin.first_token(prompt, *NEW)
            n_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            if n_cached != N_SHARED:
                print(f"round {index}: {n_cached} fetched, {warm_ms:.0f} ms against {cold_ms:.0f} ms")
                for node in news:
                    print(f"{node.name}: {node.counters()}")
            (cold if index else first_cold).values.append(cold_ms)
            (warm if index else first_warm).values.append(warm_ms)
    return [
        (cold, None),
        (warm, ratios(cold, warm)),
        (first_warm, ratios(first_cold, first_warm)),
    ]


def system_prompt(
    n_nodes: int, n_users: int, n_threads: int, n_holders: int
) -> list[tuple[Figure, Figure | None]]:
    who = f"{n_nodes} nodes" if n_holders == n_nodes else f"{n_nodes} nodes, {n_holders} with the layers"
    work = Figure(f"{who}, {n_users} users: tokens of the system prompt that were computed", "x once")
    with ExitStack() as stack:
        swarm = SharingSwarm(stack, 0.0, 0.0, n_threads)
        nodes = [swarm.start(f"n{i + 1}") for i in range(n_nodes)]
        for node in nodes[:n_holders]:
            node.load(str(half_billion()))
        for node in nodes[n_holders:]:
            node.add(str(half_billion()))
            wait_for(lambda node=node: is_complete(node.client, node.model), "the holders")
        system, computed = letters(7, N_SYSTEM), 0
        for user in range(n_users):
            node = nodes[user % n_nodes]
            answer = node.ask(system + letters(5000 + user, N_QUESTION))
            cached = min(N_SYSTEM, answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            computed += N_SYSTEM - cached
            if cached < N_SYSTEM // BLOCK_TOKENS * BLOCK_TOKENS:
                peers = node.client.get("/api/admin/peers")["peers"]
                ways = [each["rtt_ms"] for each in peers if each["announced_prefixes"]]
                ran = [stage["nickname"] for stage in answer["swarm"]["route"]]
                print(f"user {user} at {node.name}: {cached} cached on {ran}; ms to holders: {ways}")
                if user:
                    swarm.print_log_of_fetches()
            if not user:
                time.sleep(SETTLED_S)
        work.values.append(computed / N_SYSTEM)
        for node in nodes:
            print(f"{node.name}: {node.counters()}")
    return [(work, None)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mbit-s", type=float, default=0.0)
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--holders", type=int, default=0, help="nodes with the layers; 0: all")
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--kv-types", nargs=2, choices=("f16", "q8_0"), default=())
    parser.add_argument("--rounded", action="store_true")
    arguments = parser.parse_args()
    if arguments.nodes:
        n_holders = arguments.holders or arguments.nodes
        rows = system_prompt(arguments.nodes, arguments.users, arguments.threads, n_holders)
        name = f"prefix-travel-{arguments.nodes}-nodes-{arguments.users}-users"
        command = f"python -m bench.prefix_travel --nodes {arguments.nodes} --users {arguments.users}"
        if n_holders < arguments.nodes:
            name += f"-{n_holders}-with-layers"
            command += f" --holders {n_holders}"
    else:
        line = arguments.rounds, arguments.rtt_ms / 1000, arguments.mbit_s, arguments.threads
        kv_types = arguments.kv_types
        rows = cut(*line) if arguments.cut else pair(*line, kv_types, rounded=arguments.rounded)
        name = "prefix-travel" + "-cut" * arguments.cut + "-far" * bool(arguments.mbit_s)
        name += "".join(f"-{each}" for each in kv_types) + "-rounded" * arguments.rounded
        command = f"python -m bench.prefix_travel{' --cut' * arguments.cut} --rounds {arguments.rounds}"
        command += f" --kv-types {' '.join(kv_types)}" * bool(kv_types) + " --rounded" * arguments.rounded
        if arguments.mbit_s:
            command += f" --mbit-s {arguments.mbit_s:g} --rtt-ms {arguments.rtt_ms:g}"
    text = table(rows)
    print(text)
    figures = [figure.as_json() for row in rows for figure in row if figure is not None]
    data = {"machine": machine(), "command": command, "figures": figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
