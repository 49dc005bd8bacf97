"""One stream through one worker, and what a loaded model takes; the rival is llama-cpp-python's `Llama`.

    python -m bench.engine --rounds 5

Both sides get the same prompt of `--prompt` tokens, another one in each round, and go on greedily. The
worker runs as the daemon starts it, with its defaults (speculation included), and its clock is that of the
process it answers to. Memory is what the kernel counts for the worker process (PSS: shared pages in parts)
before and after loading, against the file and against what was predicted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import trio

from bench.figures import Figure, ratios, table, write
from bench.shapes import HALF_BILLION, build
from bench.uncut import Uncut
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.pool import WorkerPool
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm_proto.ipc import Sampling

MIB = 2**20


async def run(pool: WorkerPool, model: ModelFile, prompt: np.ndarray, n_tokens: int) -> tuple[float, float]:
    """Seconds until the first token, and from there to the last."""
    sampling = Sampling(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    start_s = first_s = trio.current_time()
    async with pool.generate(model, request_id="bench", tokens=prompt, sampling=sampling) as generation:
        n = 0
        async for _ in generation:
            n += 1
            if n == 1:
                first_s = trio.current_time()
    return first_s - start_s, trio.current_time() - first_s


def held_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


async def measure(
    arguments: argparse.Namespace, gguf: Path, size_bytes: int, n_layers: int, folder: Path
) -> None:
    n_prompt, n_tokens = arguments.prompt, arguments.tokens
    settings = WorkerSettings(
        cache_dir=folder / "segments", n_ctx=2048, n_threads=arguments.threads, n_prefixes=0
    )
    model = ModelFile("0" * 64, gguf)
    pool = WorkerPool(settings, folder / "run")
    rival = Uncut(gguf, 2048, arguments.threads)
    figures = {
        (side, phase): Figure(f"{phase}, {side}", "tokens/s")
        for phase in ("prefill", "decode")
        for side in ("llama-cpp-python", "worker")
    }
    async with pool.running():
        await pool.tokenize(model, text="x")
        pid = next(s.pid for s in pool.statistics() if s.pid is not None)
        before = held_bytes(pid)
        await pool.load(model, LayerRange(0, n_layers), None)
        rng = np.random.default_rng(0)
        for i in range(arguments.rounds + 1):
            prompt = rng.integers(0, 250, n_prompt).astype(np.int32)
            theirs = rival.generate(prompt.tolist(), n_tokens)
            ours = await run(pool, model, prompt, n_tokens)
            if i == 0:
                continue  # warm-up: page cache, graphs
            for side, (prefill_s, decode_s) in (
                ("llama-cpp-python", (theirs["prefill_s"], theirs["decode_s"])),
                ("worker", ours),
            ):
                figures[side, "prefill"].values.append(n_prompt / prefill_s)
                figures[side, "decode"].values.append((n_tokens - 1) / decode_s)
        memory = pool.memory(model.model_id)
        taken = held_bytes(pid) - before
    rival.close()
    predicted = memory.weights_bytes + memory.kv_bytes + memory.work_bytes
    file_size = Figure("file", "MiB", [size_bytes / MIB])
    loaded = Figure("worker, more than before loading", "MiB", [taken / MIB])
    foretold = Figure("predicted", "MiB", [predicted / MIB])
    rows: list[tuple[Figure, Figure | None]] = []
    for phase in ("prefill", "decode"):
        theirs_, ours_ = figures["llama-cpp-python", phase], figures["worker", phase]
        rows += [(theirs_, None), (ours_, ratios(ours_, theirs_))]
    rows += [(file_size, None), (loaded, ratios(loaded, file_size)), (foretold, ratios(foretold, file_size))]
    text = table(rows)
    print(text)
    command = (
        f"python -m bench.engine --model {arguments.model} --rounds {arguments.rounds} "
        f"--prompt {n_prompt} --tokens {n_tokens} --threads {arguments.threads}"
    )
    write(f"engine-{arguments.model}", command, rows, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["guide", "0.5b"], default="0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=513)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model == "guide":
            gguf, n_layers = GUIDE_PATH, 12
        else:
            gguf, n_layers = build(HALF_BILLION, Path(folder) / "half-billion.gguf"), HALF_BILLION.n_layers
        trio.run(measure, arguments, gguf, gguf.stat().st_size, n_layers, Path(folder))


if __name__ == "__main__":
    main()
