"""A node that has every layer, 20 ms away: the whole decode loop there, against a round trip per token.

    python -m bench.remote_generate [--rtt-ms 20] [--rounds 5] [--tokens 64]

Two daemons with a delay proxy in user space between them, both planes. Remote-generate: the node that is
asked has no layer, the other has all. The rival: the same model on the same two nodes, with its first layer
on the node that is asked, so that every token comes back to it before the next one can begin.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.common.figures import RESULTS, Figure, machine, ratios, table
from bench.common.swarm_nodes import Swarm, behind_proxy, demo_nodes, is_complete, wait_for
from swarmllm.cli.client import Client

PROMPT = "What is a pipeline?"


@contextmanager
def far_swarm(asked: list[str], other: list[str], rtt_s: float) -> Iterator[Swarm]:
    """Two nodes that reach each other through the proxy only."""
    with demo_nodes() as nodes, ExitStack() as stack:
        bootstrap: list[str] = []
        urls: dict[str, str] = {}
        for name, load in (("other", other), ("asked", asked)):
            away = stack.enter_context(behind_proxy(rtt_s / 2))
            node = nodes.start(name, load, bootstrap, {"n_threads": 1}, away.settings)
            announced: dict[str, Any] = wait_for(node.announcement, f"{name} to start")
            urls[name] = announced["api_url"]
            bootstrap = away.addresses(announced["node_id"])
        client = stack.enter_context(Client(urls["asked"]))
        wait_for(lambda: is_complete(client, "guide"), "a pipeline for guide")
        yield Swarm(nodes, client, "guide")


def measure(
    name: str, asked: list[str], other: list[str], rtt_s: float, rounds: int, n_tokens: int
) -> tuple[Figure, set[str], set[str]]:
    """(tokens per second, shapes, texts)"""
    figure = Figure(name, "tokens/s")
    with far_swarm(asked, other, rtt_s) as swarm:
        answers = [swarm.ask(PROMPT, n_tokens) for _ in range(rounds + 1)][1:]
    figure.values += [answer.tokens_per_s for answer in answers]
    return figure, {answer.swarm["shape"] for answer in answers}, {answer.text for answer in answers}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    rtt_s, rounds, n_tokens = arguments.rtt_ms / 1e3, arguments.rounds, arguments.tokens
    rival, shapes, texts = measure(
        "a round trip per token", ["guide:0:1"], ["guide:1:12"], rtt_s, rounds, n_tokens
    )
    assert shapes == {"chain"}, shapes
    ours, shapes, our_texts = measure("remote-generate", [], ["guide"], rtt_s, rounds, n_tokens)
    assert shapes == {"remote-generate"}, shapes
    ratio = ratios(ours, rival)
    text = table([(rival, None), (ours, ratio)])
    print(text)
    if our_texts != texts:
        print("The texts differ: beyond the end of its answer the model is not sure of its words.")
    data = {
        "machine": machine(),
        "command": f"python -m bench.remote_generate --rtt-ms {arguments.rtt_ms:g}",
        "figures": [figure.as_json() for figure in (rival, ours, ratio)],
    }
    (RESULTS / "remote_generate.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / "remote_generate.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
