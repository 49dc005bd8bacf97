"""Tokens/s of many streams over real daemons on loopback whose steps are those of a larger model, emulated.

    python -m bench.full_pipelines --nodes 1 2 4 --streams 1 8 16 --rounds 3

Workers run the bundled model and then sleep until each step has taken `--scale` times what one of the 0.5B
shape takes (`emulated_steps.py`), so that a few busy cores can be many nodes. Daemons, links, clients and
HTTP are real. The rival takes rows as they come: the same daemons, whose workers form no cohorts. "Bound"
is what stages that never wait would do: each runs streams / stages rows in every batch.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

import numpy as np

from bench.common.emulated_steps import emulating, step_s
from bench.common.figures import Figure, publish, ratios
from bench.common.streamed import Endpoint, Together, ask_all, letters
from bench.common.swarm_nodes import swarm_of
from swarmllm.guide import GUIDE_PATH

N_LAYERS = 12
CELLS_PER_STREAM = 512
SPEED = "tokens/s"
UNITS = (SPEED, "p50 ms between tokens", "p95 ms between tokens")
RIVAL, OURS = "as it comes", "cohorts"


def bound(n_nodes: int, n_streams: int, scale: float) -> float:
    """Tokens/s."""
    if n_streams < n_nodes:
        return n_streams / (step_s(1) * scale)
    n_rows = n_streams / n_nodes
    return n_rows / (step_s(n_rows) * scale / n_nodes)


def measure(
    endpoint: Endpoint, n_streams: int, n_tokens: int, prompts: tuple[int, int], seed: int
) -> dict[str, float]:
    lengths = np.random.default_rng(seed).integers(prompts[0], prompts[1] + 1, n_streams)
    texts = [letters(int(length), seed * 1000 + index) for index, length in enumerate(lengths)]
    together = Together.of(ask_all(endpoint, texts, n_tokens))
    gaps_ms = (np.percentile(together.gaps_s, [50, 95]) * 1000).tolist()
    return dict(zip(UNITS, (together.tokens_per_s, *gaps_ms), strict=True))


def endpoint(stack: ExitStack, name: str, n_nodes: int, n_streams: int, scale: float) -> Endpoint:
    stack.enter_context(emulating(scale, as_it_comes=name == RIVAL))
    swarm = swarm_of(
        n_nodes,
        GUIDE_PATH,
        N_LAYERS,
        n_threads=1,
        n_ctx=n_streams * CELLS_PER_STREAM,
        n_slots=n_streams,
        max_concurrent_requests=n_streams,
        ngram_lookup_enabled=False,
    )
    return stack.enter_context(swarm).endpoint(name)


def compare(arguments: argparse.Namespace, n_nodes: int) -> list[tuple[Figure, Figure | None]]:
    names = (RIVAL, OURS) if n_nodes > 1 else (OURS,)
    found: dict[tuple[int, str, str], Figure] = {}
    with ExitStack() as stack:
        n_slots = max(arguments.streams)
        endpoints = [endpoint(stack, name, n_nodes, n_slots, arguments.scale) for name in names]
        for each in endpoints:
            ask_all(each, [letters(8, seed) for seed in range(n_slots)], 4)  # warm-up: pipelines, links
        for index in range(arguments.rounds):
            for n_streams in arguments.streams:
                for each in endpoints:
                    seed = 100 * (index + 1) + n_streams
                    values = measure(each, n_streams, arguments.tokens, tuple(arguments.prompts), seed)
                    for unit, value in values.items():
                        label = f"{n_nodes} nodes, {n_streams} streams, {each.name}"
                        found.setdefault((n_streams, unit, each.name), Figure(label, unit)).values.append(
                            value
                        )
    rows: list[tuple[Figure, Figure | None]] = []
    for n_streams in arguments.streams:
        for unit in UNITS:
            ours = found[n_streams, unit, OURS]
            rival = found.get((n_streams, unit, RIVAL))
            rows += [(ours, None)] if rival is None else [(rival, None), (ours, ratios(ours, rival))]
        most = bound(n_nodes, n_streams, arguments.scale)
        speed = found[n_streams, SPEED, OURS]
        rows.append((Figure(f"{speed.name} / bound", "x", [value / most for value in speed.values]), None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument(
        "--prompts", type=int, nargs=2, default=[8, 8], help="shortest and longest, in tokens"
    )
    parser.add_argument("--scale", type=float, default=10.0)
    arguments = parser.parse_args()
    rows: list[tuple[Figure, Figure | None]] = []
    for n_nodes in arguments.nodes:
        rows += compare(arguments, n_nodes)
    low, high = arguments.prompts
    publish(
        f"full-pipelines-{low}-to-{high}",
        f"python -m bench.full_pipelines --nodes {' '.join(map(str, arguments.nodes))} "
        f"--streams {' '.join(map(str, arguments.streams))} --rounds {arguments.rounds} "
        f"--tokens {arguments.tokens} --prompts {low} {high} --scale {arguments.scale:g}",
        rows,
    )


if __name__ == "__main__":
    main()
