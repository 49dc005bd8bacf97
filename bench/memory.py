"""Memory per loaded model: against the file's size, what was predicted, and llama-cpp-python's `Llama`.

    python -m bench.memory --model 0.5b

A worker, as the daemon starts one, and a process with `Llama` each load the model and compute a prompt that
fills the context, so that keys, values and work space are resident. Memory is what the kernel counts for the
process (PSS: shared pages in parts), less what such a process has before loading.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import trio

from bench.common.figures import Figure, publish, ratios
from bench.common.shapes import HALF_BILLION, build
from bench.common.uncut import Uncut
from bench.engine import MIB, held_bytes
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.pool import WorkerPool
from swarmllm.workerpool.settings import LoadOptions, ModelFile, WorkerSettings
from swarmllm_proto.ipc import Sampling

WAYS = {
    "worker": LoadOptions(),
    "worker, not mapped": LoadOptions(use_mmap=False),
    "worker, q8_0 and flash attention": LoadOptions(kv_type="q8_0", flash_attention="on"),
}


def prompt_of(n_ctx: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 250, n_ctx - 8).astype(np.int32)


async def workers_bytes(gguf: Path, layers: LayerRange, n_ctx: int, folder: Path) -> dict[str, list[float]]:
    """By way: taken and predicted."""
    settings = WorkerSettings(cache_dir=folder / "segments", n_ctx=n_ctx, n_threads=n_threads(), n_prefixes=0)
    pool, model = WorkerPool(settings, folder / "run"), ModelFile("0" * 64, gguf)
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    found = {}
    async with pool.running():
        for name, options in WAYS.items():
            await pool.tokenize(model, text="x")
            before = held_bytes(pid_of(pool))
            await pool.load(model, layers, None, options)
            async with pool.generate(
                model, request_id="r", tokens=prompt_of(n_ctx), sampling=sampling
            ) as stream:
                async for _ in stream:
                    pass
            memory = pool.memory(model.model_id)
            predicted = memory.weights_bytes + memory.kv_bytes + memory.work_bytes
            found[name] = [held_bytes(pid_of(pool)) - before, predicted]
            await pool.unload(model.model_id)
    return found


def pid_of(pool: WorkerPool) -> int:
    return next(each.pid for each in pool.statistics() if each.pid is not None)


def n_threads() -> int:
    return len(os.sched_getaffinity(0))


def rivals_bytes(gguf: Path, n_ctx: int) -> int:
    with subprocess.Popen(
        [sys.executable, "-c", "import llama_cpp; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as idle:
        assert idle.stdout is not None
        idle.stdout.readline()
        before = held_bytes(idle.pid)
        idle.kill()
    rival = Uncut(gguf, n_ctx, n_threads())
    rival.generate(prompt_of(n_ctx).tolist(), 2)
    taken = held_bytes(rival.pid) - before
    rival.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["guide", "0.5b"], default="0.5b")
    parser.add_argument("--ctx", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.model == "guide":
            gguf, n_layers = GUIDE_PATH, 12
        else:
            gguf, n_layers = build(HALF_BILLION, folder / "half-billion.gguf"), HALF_BILLION.n_layers
        file_size = Figure("file", "MiB", [gguf.stat().st_size / MIB])
        rival = Figure("llama-cpp-python", "MiB", [rivals_bytes(gguf, arguments.ctx) / MIB])
        found = trio.run(workers_bytes, gguf, LayerRange(0, n_layers), arguments.ctx, folder)
    rows: list[tuple[Figure, Figure | None]] = [(file_size, None), (rival, ratios(rival, file_size))]
    for way, (taken, predicted) in found.items():
        for label, size_bytes in ((way, taken), (f"{way}: predicted", predicted)):
            figure = Figure(label, "MiB", [size_bytes / MIB])
            rows.append((figure, ratios(figure, file_size)))
    publish(
        f"memory-{arguments.model}",
        f"python -m bench.memory --model {arguments.model} --ctx {arguments.ctx}",
        rows,
    )


if __name__ == "__main__":
    main()
