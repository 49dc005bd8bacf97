"""What a piece of a prompt costs behind rows that are there already, as after a fetch of KV, by its length.

    python -m bench.suffix --rounds 3
    python -m bench.suffix --rounds 3 --model 0.6b-q4_k_m

Batches of 1 to 128 rows of which the last one has logits, at the beginning of a context and behind 640 rows,
with attention of less than 64 rows left to ggml and as the worker chooses it, in turns. One thread, in
milliseconds of the processor, the least of the rounds. A second context at the same positions, whose callback
is asked for every node of the graph, tells what of it is attention (see `bench.step`).
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bench.common.figures import RESULTS, machine
from bench.common.models import MODELS, bench_model
from bench.step import Nodes
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.kernels import row_attention
from swarmllm_workers.kernels.kernel_tuning import KernelTuning

ROWS = (1, 8, 17, 32, 63, 64, 128)
KNOWN = (0, 640)
PIECE = 320
WAYS = {"ggml": False, "worker": None}
"""Whose attention, and what is forced."""


def decode_ms(context: Context, position: int, n_rows: int) -> float:
    """Of these rows at that position; what was behind it is forgotten."""
    context.truncate(0, position)
    positions = np.arange(position, position + n_rows, dtype=np.int32)
    outputs = np.zeros(n_rows, np.int8)
    outputs[-1] = 1
    started = time.thread_time_ns()
    context.decode(positions % 250, positions, 0, outputs)
    return (time.thread_time_ns() - started) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    arguments = parser.parse_args()
    path, nodes = bench_model(arguments.model).gguf, Nodes(time.thread_time_ns)
    model, tuning = Model(path), KernelTuning()
    tuning.tune(tuning.read([path]), 1)
    settings = {"n_ctx": 2048, "n_slots": 1, "n_threads": 1, "flash_attention": "auto"}
    plain, watched = (
        {n_known: Context(model, ContextSettings(**settings, **more)) for n_known in KNOWN}
        for more in ({}, {"eval_callback": nodes.callback})
    )
    for n_known in KNOWN:
        for context in (plain[n_known], watched[n_known]):
            for at in range(0, n_known, PIECE):
                decode_ms(context, at, PIECE)
    found: dict[tuple[int, int, str], list[tuple[float, float, float]]] = {}
    for _ in range(arguments.rounds + 1):
        for n_rows in ROWS:
            for n_known in KNOWN:
                for whose, is_ours in WAYS.items():
                    row_attention.force(is_ours)
                    in_all_ms = decode_ms(plain[n_known], n_known, n_rows)
                    nodes.sums.clear()
                    nodes.counts.clear()
                    decode_ms(watched[n_known], n_known, n_rows)
                    part_ns = nodes.of_step_ns(1)
                    parts_ms = part_ns["weights"] / 1e6, part_ns["attention"] / 1e6
                    found.setdefault((n_known, n_rows, whose), []).append((in_all_ms, *parts_ms))
    lines = [
        "| rows | behind | attention by | ms | ms a row | weights, ms a row | attention, ms a row |",
        "|---|---|---|---|---|---|---|",
    ]
    for (n_known, n_rows, whose), rounds in found.items():
        in_all_ms, weights_ms, attention_ms = (min(each) for each in zip(*rounds[1:], strict=True))
        each_ms = (f"{ms / n_rows:.2f}" for ms in (in_all_ms, weights_ms, attention_ms))
        lines.append(f"| {n_rows} | {n_known} | {whose} | {in_all_ms:.0f} | {' | '.join(each_ms)} |")
    text = "\n".join(lines)
    print(text)
    command = f"python -m bench.suffix --rounds {arguments.rounds} --model {arguments.model}"
    (RESULTS / f"suffix-{arguments.model}.md").write_text(f"`{command}` on {machine()}\n\n{text}\n")


if __name__ == "__main__":
    main()
