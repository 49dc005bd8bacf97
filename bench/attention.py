"""What a step costs while other requests hold cells: libllama's fused attention; the rival is its plain one.

    python -m bench.attention --rounds 3

One step of 1, 4 and 16 streams of some 40 tokens each, alone in the cells, and with 3,584 more cells in use,
as finished requests leave them that are kept for prompts that begin alike. One thread, in seconds of the
processor, so that whatever else the machine does counts little. The 0.5B shape in Q8_0.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bench.common.figures import Figure, publish, ratios
from bench.common.models import half_billion
from swarmllm_proto.ipc import FlashAttention
from swarmllm_workers.engine.libllama import N_BATCH, Context, ContextSettings, Model

STREAMS = (1, 4, 16)
N_PROMPT = 32
N_STEPS = 6
N_FOREIGN = 7 * N_BATCH
FOREIGN = max(STREAMS)
"""The sequence of all that is nobody's."""
KERNELS: tuple[tuple[str, FlashAttention], ...] = (("plain", "off"), ("fused", "on"))


def fill(context: Context, sequence: int, n_rows: int) -> None:
    for start in range(0, n_rows, N_BATCH):
        rows = np.arange(start, min(start + N_BATCH, n_rows), dtype=np.int32)
        context.decode(rows % 250, rows, sequence, np.zeros(len(rows), np.int8))


def step_ms(context: Context, n_streams: int) -> float:
    """Median of a few steps, which are taken back."""
    sequences = np.arange(n_streams, dtype=np.int32)
    found = []
    for at in range(N_PROMPT, N_PROMPT + N_STEPS):
        start_s = time.process_time()
        context.decode(sequences + 100, np.full(n_streams, at), sequences, True)
        found.append(time.process_time() - start_s)
    for sequence in range(n_streams):
        context.truncate(sequence, N_PROMPT)
    return float(np.median(found)) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = Model(half_billion())
    figures: dict[tuple[int, int, str], Figure] = {}
    contexts = {
        name: Context(
            model,
            ContextSettings(
                n_ctx=2 * N_FOREIGN,
                n_slots=FOREIGN + 1,
                n_threads=1,
                n_outputs_max=FOREIGN + 1,
                flash_attention=kernel,
            ),
        )
        for name, kernel in KERNELS
    }
    for n_foreign in (0, N_FOREIGN):
        for context in contexts.values():
            for sequence in range(max(STREAMS)):
                context.truncate(sequence, 0)
            fill(context, FOREIGN, n_foreign)
            for sequence in range(max(STREAMS)):
                fill(context, sequence, N_PROMPT)
        for index in range(arguments.rounds + 1):
            for n_streams in STREAMS:
                for name, context in contexts.items():
                    label = f"{n_streams} stream{'s' if n_streams > 1 else ''}, {name}"
                    label += f", {n_foreign} cells of others" if n_foreign else ""
                    value = step_ms(context, n_streams)
                    if index:  # the first round warms up
                        figure = figures.setdefault((n_foreign, n_streams, name), Figure(label, "ms"))
                        figure.values.append(value)
    for context in contexts.values():
        context.close()
    model.close()
    rows: list[tuple[Figure, Figure | None]] = []
    for (n_foreign, n_streams, name), figure in figures.items():
        plain = figures[n_foreign, n_streams, "plain"]
        rows.append((figure, None if name == "plain" else ratios(figure, plain)))
    publish("attention-0.5b", f"python -m bench.attention --rounds {arguments.rounds}", rows)


if __name__ == "__main__":
    main()
