"""What becomes of the trust between two honest nodes on a machine that has no processor time left.

    python -m bench.starved [--requests 2000] [--at-once 6] [--loops 4] [--tokens 12] [--seconds 3600]

Two daemons on loopback with half of the bundled model each, their workers linked, beside processes that do
nothing but compute. Short requests go to both nodes, alone and several at once. Tokens that go by links and
by daemons overtake each other then, and deadlines pass. Prints what came of the requests, and the lowest
trust that each node had in the other one; neither may end below where it began.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx

from bench.common.swarm_nodes import demo_nodes, wait_for
from swarmllm.cli.client import Client

HOLDINGS = {"a": ["guide:0:6"], "b": ["guide:6:12"]}
PROMPTS = ("What is a pipeline?", "What is a shard?", "How does prefill work?")
TIMEOUT_S = 120.0
NO_ANSWER = 0
"""In the place of an HTTP status: none within that time."""
LOOK_EVERY = 20
"""Requests between two looks at the trust."""


@dataclass
class Outcome:
    """Of all requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    texts: dict[str, Counter[str]] = field(default_factory=dict)
    """By prompt: how often each answer came."""
    first: list[float] = field(default_factory=list)
    """What each node trusts the other one with, in the beginning."""
    lowest: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    events: list[dict[str, int]] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def keeps_trust(self) -> bool:
        return all(last >= first for first, last in zip(self.first, self.last, strict=True))


@contextmanager
def busy_loops(n: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(
    n_requests: int, n_at_once: int, n_loops: int, *, n_tokens: int = 12, seconds: float = math.inf
) -> Outcome:
    """Half of the requests go one after the other, half `n_at_once` at a time, in turns, until there were so
    many or so many seconds have passed."""
    outcome = Outcome()
    with demo_nodes() as nodes, ExitStack() as stack, busy_loops(n_loops):
        bootstrap: list[str] = []
        announced = []
        for name, load in HOLDINGS.items():
            node = nodes.start(name, load, bootstrap)
            announced.append(wait_for(node.announcement, f"{name} to start"))
            bootstrap = bootstrap or list(announced[0]["addresses"])
        urls, ids = [each["api_url"] for each in announced], [each["node_id"] for each in announced]
        clients = [stack.enter_context(Client(url)) for url in urls]
        for client in clients:
            wait_for(lambda client=client: _is_ready(client), "every node to know all layers")

        def trust() -> list[dict[str, object]]:
            return [
                dict(client.get(f"/api/admin/peers/{other}")["trust"])
                for client, other in zip(clients, reversed(ids), strict=True)
            ]

        def scores() -> list[float]:
            return [float(str(each["score"])) for each in trust()]

        outcome.first = outcome.lowest = scores()
        start_s = time.monotonic()
        with (
            httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http,
            ThreadPoolExecutor(n_at_once) as together,
        ):

            def ask(number: int) -> None:
                prompt = PROMPTS[number % len(PROMPTS)]
                body = {
                    "model": "guide",
                    "messages": [{"role": "user", "content": prompt}],
                    "temperature": 0,
                    "max_tokens": n_tokens,
                }
                try:
                    answer = http.post(f"{urls[number % len(urls)]}/v1/chat/completions", json=body)
                except httpx.TimeoutException:
                    outcome.statuses[NO_ANSWER] += 1
                    return
                outcome.statuses[answer.status_code] += 1
                if answer.status_code == httpx.codes.OK:
                    text = answer.json()["choices"][0]["message"]["content"]
                    outcome.texts.setdefault(prompt, Counter())[text] += 1

            for begin in range(0, n_requests, LOOK_EVERY):
                if time.monotonic() - start_s > seconds:
                    break
                numbers = range(begin, min(begin + LOOK_EVERY, n_requests))
                if begin // LOOK_EVERY % 2:
                    list(together.map(ask, numbers))
                else:
                    for number in numbers:
                        ask(number)
                outcome.lowest = [min(pair) for pair in zip(outcome.lowest, scores(), strict=True)]
        outcome.took_s = time.monotonic() - start_s
        outcome.last = scores()
        outcome.events = [dict(each["counts"]) for each in trust()]  # type: ignore[call-overload]
    return outcome


def _is_ready(client: Client) -> bool:
    return any(m["name"] == "guide" and m["complete"] for m in client.get("/api/admin/models")["models"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which none is begun")
    options = parser.parse_args()
    outcome = run(
        options.requests,
        options.at_once,
        options.loops,
        n_tokens=options.tokens,
        seconds=options.seconds,
    )
    print(f"{outcome.statuses.total()} requests beside {options.loops} busy loops in {outcome.took_s:.0f} s")
    print(
        f"HTTP statuses: {dict(outcome.statuses)}; texts per prompt: "
        f"{[len(texts) for texts in outcome.texts.values()]}"
    )
    for name, first, lowest, last, events in zip(
        HOLDINGS, outcome.first, outcome.lowest, outcome.last, outcome.events, strict=True
    ):
        print(
            f"{name} trusts the other one: {first:.3f} at first, {lowest:.3f} at least, {last:.3f} at last; "
            f"{events}"
        )
    sys.exit(not outcome.keeps_trust)


if __name__ == "__main__":
    main()
