"""One stream through one worker and through a daemon, and what a loaded model takes; the rivals are
llama-cpp-python's `Llama` and llama.cpp's own server.

    python -m bench.engine --rounds 5 --llama-server PATH

All get the same prompt of about `--prompt` tokens, another one in each round, and go on greedily. The worker
runs as the daemon starts it, with its defaults, except that nobody guesses tokens, because a random model
repeats itself; its clock is that of the process it answers to. What goes through HTTP is timed by the client:
from sending the request to the first text, and from there to the end. Memory is what the kernel counts for
the worker process (PSS: shared pages in parts) before and after loading, against the file and against what
was predicted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import trio

from bench.common.figures import Figure, publish, ratios, threads_suffix
from bench.common.llama_server import NAME, add_option, llama_server
from bench.common.models import MODELS, bench_model
from bench.common.streamed import Endpoint, ask_all, letters
from bench.common.swarm_nodes import swarm_of
from bench.common.uncut import Uncut
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.pool import WorkerPool
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm_proto.ipc import Sampling

MIB = 2**20
N_CTX = 2048
RIVAL = "llama-cpp-python"
WORKER = "worker"
DAEMON = "daemon, HTTP"


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


def over_http(endpoint: Endpoint, prompt: str, n_tokens: int) -> tuple[float, float]:
    start_s = time.perf_counter()
    (reading,) = ask_all(endpoint, [prompt], n_tokens)
    return reading.first_s - start_s, reading.end_s - reading.first_s


def start_servers(
    arguments: argparse.Namespace, gguf: Path, n_layers: int, stack: ExitStack
) -> list[Endpoint]:
    common = {"n_threads": arguments.threads, "n_ctx": N_CTX}
    swarm = stack.enter_context(swarm_of(1, gguf, n_layers, **common, ngram_lookup_enabled=False))
    endpoints = [swarm.endpoint(DAEMON)]
    if arguments.llama_server is not None:
        server = stack.enter_context(llama_server(arguments.llama_server, gguf, n_slots=1, **common))
        endpoints.append(replace(server, name=f"{NAME}, HTTP"))
    return endpoints


async def measure(
    arguments: argparse.Namespace, gguf: Path, n_layers: int, endpoints: list[Endpoint], folder: Path
) -> list[tuple[Figure, Figure | None]]:
    n_tokens = arguments.tokens
    settings = WorkerSettings(
        cache_dir=folder / "segments",
        n_ctx=N_CTX,
        n_threads=arguments.threads,
        n_prefixes=0,
        ngram_max_size=0,
    )
    model = ModelFile("0" * 64, gguf)
    pool = WorkerPool(settings, folder / "run")
    rival = Uncut(gguf, N_CTX, arguments.threads)
    figures: dict[tuple[str, str], Figure] = {}
    async with pool.running():
        await pool.tokenize(model, text="x")
        pid = next(s.pid for s in pool.statistics() if s.pid is not None)
        before = held_bytes(pid)
        await pool.load(model, LayerRange(0, n_layers), None)
        for i in range(arguments.rounds + 1):
            text = letters(arguments.prompt, seed=i)
            prompt = np.asarray(await pool.tokenize(model, text=text), np.int32)
            theirs = rival.generate(prompt.tolist(), n_tokens)
            passed = {
                RIVAL: (theirs["prefill_s"], theirs["decode_s"]),
                WORKER: await run(pool, model, prompt, n_tokens),
            }
            for endpoint in endpoints:
                passed[endpoint.name] = over_http(endpoint, text, n_tokens)
            if i == 0:
                continue  # warm-up: page cache, graphs
            for side, (prefill_s, decode_s) in passed.items():
                for phase, speed in (
                    ("prefill", len(prompt) / prefill_s),
                    ("decode", (n_tokens - 1) / decode_s),
                ):
                    figure = figures.setdefault((side, phase), Figure(f"{phase}, {side}", "tokens/s"))
                    figure.values.append(speed)
        memory = pool.memory(model.model_id)
        taken = held_bytes(pid) - before
    rival.close()
    rows: list[tuple[Figure, Figure | None]] = []
    for phase in ("prefill", "decode"):
        theirs_ = figures[RIVAL, phase]
        rows.append((theirs_, None))
        rows += [
            (figure, ratios(figure, theirs_))
            for (side, its_phase), figure in figures.items()
            if its_phase == phase and side != RIVAL
        ]
        if len(endpoints) > 1:
            rows.append((ratios(*(figures[endpoint.name, phase] for endpoint in endpoints)), None))
    predicted = memory.weights_bytes + memory.kv_bytes + memory.work_bytes
    file_size = Figure("file", "MiB", [arguments.size_bytes / MIB])
    loaded = Figure("worker, more than before loading", "MiB", [taken / MIB])
    foretold = Figure("predicted", "MiB", [predicted / MIB])
    rows += [(file_size, None), (loaded, ratios(loaded, file_size)), (foretold, ratios(foretold, file_size))]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=513)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add_option(parser)
    arguments = parser.parse_args()
    model = bench_model(arguments.model)
    gguf, n_layers = model.gguf, model.n_layers
    arguments.size_bytes = gguf.stat().st_size
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoints = start_servers(arguments, gguf, n_layers, stack)
        rows = trio.run(measure, arguments, gguf, n_layers, endpoints, folder)
    command = (
        f"python -m bench.engine --model {arguments.model} --rounds {arguments.rounds} "
        f"--prompt {arguments.prompt} --tokens {arguments.tokens} --threads {arguments.threads}"
    )
    publish(f"engine-{arguments.model}{threads_suffix(arguments.threads)}", command, rows)


if __name__ == "__main__":
    main()
