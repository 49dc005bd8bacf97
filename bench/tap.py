"""What it costs to read the hidden state out of a decode step.

    python -m bench.tap --steps 300

Three contexts over the same weights (the first 23 of the 0.5B's 24 layers, as a segment file) take turns,
step by step: without the tap, with the one in C, with the one in Python that serves where no compiler was.
What the tap saves counts for it as it does in a worker: with it libllama stops behind the last layer, without
it the segment's dummy head (32 tokens) is computed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.common.figures import Figure, ratios, table, write
from bench.common.shapes import HALF_BILLION, build
from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_workers.engine import segment_file
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.engine.tap import Tap
from swarmllm_workers.gguf_file import GgufFile

N_LAYERS = HALF_BILLION.n_layers - 1
N_CTX = 2048
N_PROMPT = 64
N_WARM_UP = 20


class Contestant:
    def __init__(self, model: Model, name: str, n_threads: int, *, native: bool | None) -> None:
        """`native` None: without a tap."""
        self.figure = Figure(name, "ms")
        self._tap = None
        if native is not None:
            output = f"l_out-{N_LAYERS - 1}"
            self._tap = Tap(
                output_name=output, input_name="", n_embd=model.n_embd, n_rows_max=512, native=native
            )
            assert self._tap.is_native == native
        self._context = Context(
            model,
            ContextSettings(
                n_ctx=N_CTX,
                n_slots=1,
                n_threads=n_threads,
                eval_callback=self._tap.callback if self._tap else None,
                eval_user_data=self._tap.user_data if self._tap else None,
            ),
        )

    def step(self, rows: np.ndarray, position: int) -> float:
        start_s = time.perf_counter()
        if self._tap is not None:
            self._tap.arm(rows)
        self._context.decode(rows, np.arange(position, position + len(rows)), 0, True)
        if self._tap is not None:
            self._tap.take(len(rows))
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._context.close()


def measure(gguf: Path, folder: Path, n_steps: int, n_threads: int) -> list[Figure]:
    path = folder / "segment.gguf"
    segment_file.cut(GgufFile(gguf), ARCHITECTURES["qwen2"], 0, N_LAYERS, path)
    model = Model(path)
    contestants = [
        Contestant(model, "without", n_threads, native=None),
        Contestant(model, "tap in C", n_threads, native=True),
        Contestant(model, "tap in Python", n_threads, native=False),
    ]
    rng = np.random.default_rng(0)
    prompt = rng.standard_normal((N_PROMPT, model.n_embd)).astype(np.float32)
    for each in contestants:
        each.step(prompt, 0)
    for i in range(N_WARM_UP + n_steps):
        rows = rng.standard_normal((1, model.n_embd)).astype(np.float32)
        # Whoever comes first in a round finds the caches as the last round left them: each in turn.
        turn = i % len(contestants)
        for each in contestants[turn:] + contestants[:turn]:
            seconds = each.step(rows, N_PROMPT + i)
            if i >= N_WARM_UP:
                each.figure.values.append(seconds * 1000)
    for each in contestants:
        each.close()
    model.close()
    return [each.figure for each in contestants]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gguf = build(HALF_BILLION, folder / "half-billion.gguf")
        without, *taps = measure(gguf, folder, arguments.steps, arguments.threads)
    rows: list[tuple[Figure, Figure | None]] = [(without, None)]
    rows += [(tap, ratios(tap, without)) for tap in taps]
    median = {tap.name: tap.median / without.median for tap in taps}
    said = ", ".join(f"{name}: {ratio:.4f}" for name, ratio in median.items())
    text = f"{table(rows)}\n\nMedian of the steps over the median without: {said}."
    print(text)
    command = f"python -m bench.tap --steps {arguments.steps} --threads {arguments.threads}"
    write("tap", command, rows, text)


if __name__ == "__main__":
    main()
