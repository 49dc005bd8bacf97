"""A batch of a few rows in the worker and in ggml's tiles: processor time; the rival is ggml as it comes.

"worker" computes as it measured to be the fastest here, "ours" always with the worker's own kernels.

    python -m bench.small_batches --rounds 5

    python -m bench.small_batches --rounds 5 --model 0.6b-q4_k_m

A batch is one step of so many streams, or, of 64 rows and more, a prompt. Both sides are processes with the
same model, a random one of 0.5B shape in Q8_0 or of 0.6B in Q4_K_M, and one thread, and take turns; a figure
of a round is the best of 4 batches, in milliseconds that the processor worked for it, which others on the
machine disturb least. The worker's way is that of `workers/swarmllm_workers/kernels/small_batches.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.common.uncut import keep_from_amx, other_libraries

if "tiles" in sys.argv[1:]:
    # Before the worker's package, which the next imports bring: it cannot stand before ggml any more.
    keep_from_amx()
    import llama_cpp  # noqa: F401

from bench.common.figures import Figure, publish, ratios
from bench.common.models import MODELS, bench_model

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
PROMPTS = (64, 512)
N_PROMPT = 64
N_REPEATS = 4


def serve(gguf: str, n_threads: int, side: str) -> None:
    """Answers each number of rows on stdin with milliseconds."""
    from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
    from swarmllm_workers.kernels import repacking, small_batches
    from swarmllm_workers.kernels.kernel_tuning import KernelTuning

    tuning = KernelTuning("ours" if side == "ours" else "auto")
    if side == "tiles":
        repacking.keeps_rows = lambda _: False
    model = Model(Path(gguf))  # after the mode is known: it decides whether rows are rearranged
    settings = ContextSettings(
        n_ctx=2048,
        n_slots=max(ROWS),
        n_threads=n_threads,
        n_outputs_max=max(ROWS),
        flash_attention="auto",
    )
    context = Context(model, settings)
    tokens = (np.arange(N_PROMPT) % 250).astype(np.int32)
    for slot in range(max(ROWS)):
        context.decode(tokens, np.arange(N_PROMPT), slot, np.zeros(N_PROMPT, np.int8))
    context.decode(tokens[:1], np.full(1, N_PROMPT), 0, True)
    assert small_batches.is_asked() != (side == "tiles")
    tuning.tune(tuning.read([Path(gguf)]), n_threads)
    for choice in tuning.choices:
        print(choice, file=sys.stderr)
    for line in sys.stdin:
        n = int(line)
        best_s = float("inf")
        for _ in range(N_REPEATS):
            if n in PROMPTS:
                context.truncate(0, 0)
                started_s = time.process_time()
                context.decode(np.resize(tokens, n), np.arange(n), 0, np.zeros(n, np.int8))
            else:
                for slot in range(n):
                    context.truncate(slot, N_PROMPT)
                started_s = time.process_time()
                context.decode(tokens[:n], np.full(n, N_PROMPT), np.arange(n), True)
            best_s = min(best_s, time.process_time() - started_s)
        print(json.dumps(best_s * 1000), flush=True)


class Side:
    def __init__(self, gguf: Path, n_threads: int, side: str) -> None:
        command = [sys.executable, "-m", "bench.small_batches", "--serve", str(gguf)]
        command += ["--threads", str(n_threads), "--side", side]
        environment = other_libraries() if side == "tiles" else None
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def milliseconds(self, n_rows: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{n_rows}\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure(arguments: argparse.Namespace) -> None:
    gguf = bench_model(arguments.model).gguf
    prompts = () if arguments.no_prompts else PROMPTS
    sides = {name: Side(gguf, arguments.threads, name) for name in ("tiles", "ours", "worker")}
    figures = {(name, n): Figure(f"{n} rows, {name}", "ms") for n in (*ROWS, *prompts) for name in sides}
    for _ in range(arguments.rounds):
        for (name, n), figure in figures.items():
            figure.values.append(sides[name].milliseconds(n))
    for side in sides.values():
        side.close()
    rows: list[tuple[Figure, Figure | None]] = []
    for n in (*ROWS, *prompts):
        theirs = figures["tiles", n]
        rows.append((theirs, None))
        rows += [(ours, ratios(ours, theirs)) for ours in (figures["ours", n], figures["worker", n])]
    for name in sides:
        for n in ROWS[1:]:
            pairs = zip(figures[name, 1].values, figures[name, n].values, strict=True)
            rows.append((Figure(f"{n} streams / 1 stream, {name}", "x", [n * a / b for a, b in pairs]), None))
    command = f"python -m bench.small_batches --rounds {arguments.rounds} --threads {arguments.threads}"
    command += f" --model {arguments.model}"
    command += " --no-prompts" * arguments.no_prompts
    publish(f"small-batches-{arguments.model}-{arguments.threads}-threads", command, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--no-prompts", action="store_true", help="steps only")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--side", default="worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.threads, arguments.side)
        return
    measure(arguments)


if __name__ == "__main__":
    main()
