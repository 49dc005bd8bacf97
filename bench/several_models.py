"""Streams of several models on one node at the same time, and alone: `python -m bench.several_models`.

Random models of a 0.5B shape (Q8_0), all loaded on one daemon whose workers may use `--threads` threads each,
by default all cores. Each round asks each model alone, a second after the one before, and then all at once.
Tokens are counted while all streams run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench.common.raw_stream import stream_all
from bench.common.shapes import HALF_BILLION_SMALL_VOCABULARY, build
from bench.common.streamed import Endpoint, Reading, Together, ask_all, letters
from bench.common.swarm_nodes import swarm_of_all
from swarmllm.operating_system import n_cores

REST_S = 1.0
SHAPE = HALF_BILLION_SMALL_VOCABULARY


def alone(endpoint: Endpoint, prompt: str, n_tokens: int) -> float:
    time.sleep(REST_S)
    (reading,) = ask_all(endpoint, [prompt], n_tokens)
    return (reading.n_tokens - 1) / (reading.end_s - reading.first_s)


def together(endpoints: list[Endpoint], prompt: str, n_tokens: int) -> float:
    time.sleep(REST_S)
    readings = stream_all([endpoint.question(prompt, n_tokens) for endpoint in endpoints])
    return Together.of([Reading.of(events) for events in readings]).tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=n_cores())
    arguments = parser.parse_args()
    print("| round | alone, tokens/s | all at once, tokens/s in all |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        files = [build(SHAPE, Path(folder) / f"m{i}.gguf", seed=i) for i in range(arguments.models)]
        layers = dict.fromkeys(files, SHAPE.n_layers)
        with swarm_of_all(1, layers, None, n_threads=arguments.threads, n_ctx=1024) as swarms:
            endpoints = [swarm.endpoint(swarm.model) for swarm in swarms]
            for number in range(arguments.rounds + 1):
                # No prompt twice: a worker guesses what one that it knows goes on with.
                rates = [alone(endpoint, letters(32, number), arguments.tokens) for endpoint in endpoints]
                in_all = together(endpoints, letters(32, 1000 + number), arguments.tokens)
                if number:  # the first one warms up
                    print(f"| {number} | {', '.join(f'{r:.0f}' for r in rates)} | {in_all:.0f} |", flush=True)


if __name__ == "__main__":
    main()
