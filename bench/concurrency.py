"""Tokens/s of one worker with 1, 2, 4, 8 generations at the same time; the rival is one stream.

    python -m bench.concurrency --rounds 3

All go through a worker process as the daemon starts it, IPC included, in the same run. Rounds interleave the
numbers of streams, so that the machine's drift hits all alike. `--without-batching` adds the same streams
computed in turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import trio

from bench.figures import Figure, ratios, table, write
from bench.shapes import HALF_BILLION, build
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.pool import WorkerPool
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm_proto.ipc import Sampling

N_PROMPT = 32


async def tokens_per_s(pool: WorkerPool, model: ModelFile, n_streams: int, n_tokens: int) -> float:
    """Of all streams together, from the moment that each has its first token until the first of them ends."""
    sampling = Sampling(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    begun: list[float] = []
    counts = [0] * n_streams
    window: list[tuple[float, int]] = []

    async def stream(index: int) -> None:
        tokens = ((7 * index + 31 * np.arange(N_PROMPT)) % 250).astype(np.int32)
        async with pool.generate(
            model, request_id=f"bench-{index}", tokens=tokens, sampling=sampling
        ) as generation:
            async for _ in generation:
                counts[index] += 1
                if counts[index] == 1:
                    begun.append(trio.current_time())
                    if len(begun) == n_streams:
                        window.append((trio.current_time(), sum(counts)))
                if counts[index] == n_tokens and len(window) == 1:
                    window.append((trio.current_time(), sum(counts)))

    async with trio.open_nursery() as nursery:
        for index in range(n_streams):
            nursery.start_soon(stream, index)
    (start_s, n_start), (end_s, n_end) = window
    return (n_end - n_start) / (end_s - start_s)


async def measure(arguments: argparse.Namespace, gguf: Path, n_layers: int, folder: Path) -> None:
    streams: list[int] = arguments.streams
    modes = [True, False] if arguments.without_batching else [True]
    figures = {(n, mode): Figure(_name(n, mode), "tokens/s") for mode in modes for n in streams}
    settings = {
        mode: WorkerSettings(
            cache_dir=folder / "segments",
            n_ctx=2048,
            n_slots=max(streams),
            n_threads=arguments.threads,
            continuous_batching=mode,
        )
        for mode in modes
    }
    model = ModelFile("0" * 64, gguf)
    pools = {mode: WorkerPool(settings[mode], folder / f"run-{mode}") for mode in modes}
    async with AsyncExitStack() as stack:
        for pool in pools.values():
            await stack.enter_async_context(pool.running())
            await pool.load(model, LayerRange(0, n_layers), None)
            await tokens_per_s(pool, model, max(streams), 8)  # warm-up: page cache, graphs
        for _ in range(arguments.rounds):
            for (n, mode), figure in figures.items():
                figure.values.append(await tokens_per_s(pools[mode], model, n, arguments.tokens))
    alone = figures[1, True]
    rows = [(figure, None if figure is alone else ratios(figure, alone)) for figure in figures.values()]
    text = table(rows)
    print(text)
    command = (
        f"python -m bench.concurrency --model {arguments.model} --rounds {arguments.rounds} "
        f"--tokens {arguments.tokens} --threads {arguments.threads}"
    )
    write(f"concurrency-{arguments.model}", command, rows, text)


def _name(n_streams: int, batching: bool) -> str:
    return f"{n_streams} stream{'s' if n_streams > 1 else ''}{'' if batching else ', in turn'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["guide", "0.5b"], default="0.5b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--without-batching", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model == "guide":
            gguf, n_layers = GUIDE_PATH, 12
        else:
            gguf, n_layers = build(HALF_BILLION, Path(folder) / "half-billion.gguf"), HALF_BILLION.n_layers
        trio.run(measure, arguments, gguf, n_layers, Path(folder))


if __name__ == "__main__":
    main()
