"""Decode tokens/s: uncut in llama-cpp-python, through one daemon, cut over two and three daemons on loopback.

    python -m bench.decode --model guide --rounds 7
    python -m bench.decode --model 0.5b --rounds 5

All contestants are resident; they take turns, round by round, so that the machine's drift hits all alike.
Ours are timed by an HTTP client of the first daemon (first text to finish chunk), the rival inside its own
loop: every cost is on our side. What cutting alone costs is the second table: the same against one daemon of
ours, which computes and samples as the others do. Nobody guesses tokens: a random model repeats itself.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

from bench.common.figures import Figure, ratios, table, write
from bench.common.models import MODELS, bench_model
from bench.common.swarm_nodes import Answer, Swarm, swarm_of
from bench.common.uncut import Uncut

PROMPT = "What is a pipeline?"
N_CTX = 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="guide")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    model = bench_model(arguments.model)
    gguf, n_layers = model.gguf, model.n_layers
    command = (
        f"python -m bench.decode --model {arguments.model} --rounds {arguments.rounds} "
        f"--tokens {arguments.tokens} --threads {arguments.threads} "
        f"--nodes {' '.join(map(str, arguments.nodes))}"
    )
    rival = Figure("llama-cpp-python, uncut", "tokens/s")
    ours = {n: Figure(f"{n} daemon{'s' if n > 1 else ''}", "tokens/s") for n in arguments.nodes}
    last: dict[int, Answer] = {}
    with ExitStack() as stack:
        uncut = Uncut(gguf, N_CTX, arguments.threads)
        stack.callback(uncut.close)
        swarms: dict[int, Swarm] = {
            n: stack.enter_context(
                swarm_of(
                    n, gguf, n_layers, n_threads=arguments.threads, n_ctx=N_CTX, ngram_lookup_enabled=False
                )
            )
            for n in arguments.nodes
        }
        prompt: list[int] = []
        for round_index in range(arguments.rounds + 1):
            if round_index > 0:
                answer = uncut.generate(prompt, arguments.tokens)
            answers = {n: swarm.ask(PROMPT, arguments.tokens) for n, swarm in swarms.items()}
            if round_index == 0:
                # Warm-up: page cache, graphs, pipelines, links. It tells how long the prompt is.
                prompt = prompt_tokens(gguf, next(iter(answers.values())).n_prompt_tokens)
                uncut.generate(prompt, arguments.tokens)
                continue
            rival.values.append((len(answer["tokens"]) - 1) / answer["decode_s"])
            for n, each in answers.items():
                ours[n].values.append(each.tokens_per_s)
                last[n] = each
    rows = [(rival, None), *((figure, ratios(figure, rival)) for figure in ours.values())]
    parts = [table(rows), *(stages(n, answer) for n, answer in last.items())]
    if 1 in ours and len(ours) > 1:
        cut = [(figure, ratios(figure, ours[1])) for n, figure in ours.items() if n > 1]
        parts.insert(1, table([(ours[1], None), *cut]))
    text = "\n\n".join(parts)
    print(text)
    write(f"decode-{arguments.model}", command, rows, text)


def prompt_tokens(gguf: Path, n_tokens: int) -> list[int]:
    """As long as ours with its template: decode cost depends on the length, not on the words."""
    from llama_cpp import Llama

    vocabulary = Llama(str(gguf), vocab_only=True, verbose=False)
    question = vocabulary.tokenize(PROMPT.encode(), add_bos=False)
    return (question * n_tokens)[:n_tokens]


def stages(n_nodes: int, answer: Answer) -> str:
    """Where a token's time went in the last round."""
    head = ["stage", "layers", "compute ms/token", "IPC and queue ms/token", "network ms/token"]
    keys = ["nickname", "layers", "compute_ms_per_token", "overhead_ms_per_token", "network_ms_per_token"]
    rows = [
        head,
        ["---"] * len(head),
        *([str(stage[key]) for key in keys] for stage in answer.swarm["route"]),
    ]
    return "\n".join([f"{n_nodes} node(s), last round:", "", *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    main()
