"""What the reader of a running answer notices while a long prompt is admitted, through HTTP; the rival is
llama.cpp's own server.

    python -m bench.stalls --rounds 2 --llama-server PATH

One answer runs; after a while a second request comes with a prompt of `--prompt` tokens. Figures are times
between two pieces of the first answer's text: before that, and from the arrival of the prompt until its first
token. (`bench.admission` compares chunks with whole prompts inside one worker.)
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack

import numpy as np

from bench.common.figures import Figure, publish, ratios
from bench.common.llama_server import NAME, add_option, llama_server
from bench.common.models import half_billion
from bench.common.raw_stream import Client
from bench.common.shapes import HALF_BILLION
from bench.common.streamed import Endpoint, Reading, letters
from bench.common.swarm_nodes import swarm_of

N_BEFORE = 40
"""Pieces of the running answer before the prompt comes."""
N_READER_PROMPT = 32
SLOTS = 2
OURS = "daemon"


def admit(endpoint: Endpoint, n_prompt: int, seed: int) -> dict[str, float]:
    """Milliseconds between two pieces of text, and until the long prompt's first token. The reader's answer
    is left before its end, as one leaves a page."""
    client = Client()
    n_tokens = HALF_BILLION.context_length - N_READER_PROMPT
    reader = client.ask(endpoint.question(letters(N_READER_PROMPT, seed), n_tokens))
    client.run_until(lambda: reader.n_received > N_BEFORE)
    late = client.ask(endpoint.question(letters(n_prompt, seed + 1), 1))
    client.run_until(lambda: late.is_over)
    client.close()
    pieces = Reading.of(reader.events(), is_whole=False)
    first_s = Reading.of(late.events()).first_s
    found = {"first token of the prompt": (first_s - late.begun_s) * 1000}
    times = np.array(pieces.times_s)
    n_came = int(np.searchsorted(times, late.begun_s))
    n_answered = int(np.searchsorted(times, first_s))
    # The piece before the prompt came begins the first gap, the one after its first token ends the last.
    for when, values in (("before", times[:n_came]), ("during", times[n_came - 1 : n_answered + 1])):
        p50, p95, worst = np.percentile(np.diff(values) * 1000, [50, 95, 100])
        found |= {f"{when}, p50": p50, f"{when}, p95": p95, f"{when}, longest": worst}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add_option(parser)
    arguments = parser.parse_args()
    gguf = half_billion()
    common = {"n_threads": arguments.threads, "n_ctx": SLOTS * HALF_BILLION.context_length}
    figures: dict[tuple[str, str], Figure] = {}
    with ExitStack() as stack:
        swarm = stack.enter_context(swarm_of(1, gguf, HALF_BILLION.n_layers, **common, n_slots=SLOTS))
        endpoints = [swarm.endpoint(OURS)]
        if arguments.llama_server is not None:
            server = llama_server(arguments.llama_server, gguf, n_slots=SLOTS, **common)
            endpoints.insert(0, stack.enter_context(server))
        for index in range(arguments.rounds):
            for endpoint in endpoints:
                for what, value in admit(endpoint, arguments.prompt, 10 * index).items():
                    figure = figures.setdefault(
                        (endpoint.name, what), Figure(f"{what}, {endpoint.name}", "ms")
                    )
                    figure.values.append(value)
    rows: list[tuple[Figure, Figure | None]] = []
    for what in dict.fromkeys(what for _, what in figures):
        for endpoint in endpoints:
            figure = figures[endpoint.name, what]
            is_rival = endpoint.name == NAME or len(endpoints) == 1
            rows.append((figure, None if is_rival else ratios(figure, figures[NAME, what])))
    command = (
        f"python -m bench.stalls --rounds {arguments.rounds} --prompt {arguments.prompt} "
        f"--threads {arguments.threads}"
    )
    publish("stalls-0.5b", command, rows)


if __name__ == "__main__":
    main()
