"""Tokens/s and the time between tokens with 1 to 16 streams at the same time, through HTTP; the rivals are
one stream, and llama.cpp's own server.

    python -m bench.concurrency --rounds 3 --llama-server PATH

Each answer is followed by one client from its own socket; figures are of the time in which all streams ran.
Rounds interleave servers and numbers of streams, so that the machine's drift hits all alike, and no prompt is
asked twice. What of the processor a token takes, its share of a prompt of eight tokens included, counts
daemon and worker; with one thread (`--threads 1`) other programs on the machine hardly change it.
llama.cpp's server has as many slots as there are streams. Nobody guesses tokens, because a random model
repeats itself. `--without-batching` adds a daemon that computes the same streams in turn, `--ggml-kernels`
one whose matrix products are all ggml's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from bench.common.figures import Figure, publish, ratios, threads_suffix
from bench.common.llama_server import NAME, add_option, llama_server
from bench.common.models import MODELS, bench_model
from bench.common.streamed import Endpoint, Together, ask_all, letters
from bench.common.swarm_nodes import swarm_of

N_PROMPT = 8
CELLS_PER_STREAM = 512
SPEED = "tokens/s"
UNITS = (SPEED, "p50 ms between tokens", "p95 ms between tokens", "ms of the processor per token")
OURS = "daemon"


def measure(endpoint: Endpoint, n_streams: int, n_tokens: int, seed: int) -> dict[str, float]:
    prompts = [letters(N_PROMPT, seed * 1000 + index) for index in range(n_streams)]
    before_s = endpoint.cpu_s()
    together = Together.of(ask_all(endpoint, prompts, n_tokens))
    used_s = (endpoint.cpu_s() - before_s) / (n_streams * n_tokens)
    times_ms = np.array([*np.percentile(together.gaps_s, [50, 95]), used_s]) * 1000
    return dict(zip(UNITS, (together.tokens_per_s, *times_ms.tolist()), strict=True))


Servers = dict[str, Callable[[int], Endpoint]]
"""By name: who answers so many streams."""


def start(arguments: argparse.Namespace, stack: ExitStack) -> Servers:
    n_slots = max(arguments.streams)
    model = bench_model(arguments.model)
    gguf, n_layers = model.gguf, model.n_layers

    def daemon(name: str, **inference: object) -> Callable[[int], Endpoint]:
        swarm = swarm_of(
            1,
            gguf,
            n_layers,
            n_threads=arguments.threads,
            n_ctx=n_slots * CELLS_PER_STREAM,
            n_slots=n_slots,
            max_concurrent_requests=n_slots,
            ngram_lookup_enabled=False,
            **inference,
        )
        endpoint = stack.enter_context(swarm).endpoint(name)
        return lambda _: endpoint

    servers: Servers = {}
    if arguments.llama_server is not None:
        # One for each number of streams, with as many slots: what suits it best.
        rivals = {
            n: stack.enter_context(
                llama_server(
                    arguments.llama_server,
                    gguf,
                    n_threads=arguments.threads,
                    n_ctx=n * CELLS_PER_STREAM,
                    n_slots=n,
                )
            )
            for n in arguments.streams
        }
        servers[NAME] = rivals.__getitem__
    if arguments.without_batching:
        servers[f"{OURS}, in turn"] = daemon(f"{OURS}, in turn", continuous_batching=False)
    if arguments.ggml_kernels:
        servers[f"{OURS}, ggml's kernels"] = daemon(f"{OURS}, ggml's kernels", kernels="ggml")
    return servers | {OURS: daemon(OURS)}


def run(arguments: argparse.Namespace) -> list[tuple[Figure, Figure | None]]:
    found: dict[tuple[str, int, str], Figure] = {}
    with ExitStack() as stack:
        servers = start(arguments, stack)
        for n_streams in arguments.streams:
            for server in servers.values():
                prompts = [letters(N_PROMPT, seed) for seed in range(n_streams)]
                ask_all(server(n_streams), prompts, 4)  # warm-up: page cache, graphs
        for index in range(arguments.rounds):
            for n_streams in arguments.streams:
                for name, server in servers.items():
                    seed = 100 * (index + 1) + n_streams
                    values = measure(server(n_streams), n_streams, arguments.tokens, seed)
                    for unit, value in values.items():
                        label = f"{n_streams} stream{'s' if n_streams > 1 else ''}, {name}"
                        figure = found.setdefault((name, n_streams, unit), Figure(label, unit))
                        figure.values.append(value)
    rows: list[tuple[Figure, Figure | None]] = []
    for unit in UNITS:
        for n_streams in arguments.streams:
            *rivals, ours = (found[name, n_streams, unit] for name in servers)
            rows += [(rival, None) for rival in rivals]
            rows.append((ours, ratios(ours, rivals[0]) if rivals else None))
    for name in servers:
        alone = found[name, arguments.streams[0], SPEED]
        for n_streams in arguments.streams[1:]:
            gain = ratios(found[name, n_streams, SPEED], alone)
            gain.name = f"{name}: {n_streams} streams / {arguments.streams[0]}"
            rows.append((gain, None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--without-batching", action="store_true")
    parser.add_argument("--ggml-kernels", action="store_true")
    add_option(parser)
    arguments = parser.parse_args()
    rows = run(arguments)
    command = (
        f"python -m bench.concurrency --model {arguments.model} --rounds {arguments.rounds} "
        f"--streams {' '.join(map(str, arguments.streams))} "
        f"--tokens {arguments.tokens} --threads {arguments.threads}"
        + " --ggml-kernels"
        * arguments.ggml_kernels
    )
    publish(f"concurrency-{arguments.model}{threads_suffix(arguments.threads)}", command, rows)


if __name__ == "__main__":
    main()
