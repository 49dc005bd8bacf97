"""What HTTP costs per token: streams through a daemon's endpoint, beside the same worker asked in process.

    python -m bench.http_overhead --rounds 3

The rival is `WorkerPool.generate` in this process, IPC included: all that a daemon has but its HTTP, its
pipeline and its admission. The model is the bundled one, whose tokens take a third of a millisecond: no
other shows so much of what is not computing. Every stream has the same prompt and length. CPU is that of the
daemon process, or of this one where it takes the daemon's place; workers are not counted in either.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec
import trio

from bench.common.figures import Figure, ratios, table, write
from bench.common.streamed import cpu_s
from swarmllm.cli.demo import DemoNodes
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.pool import WorkerPool
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm_proto.ipc import Sampling

N_TOKENS = 64
SLOTS_MAX = 64
N_CTX = SLOTS_MAX * 192
QUESTION = "What is a pipeline?"
START_TIMEOUT_S = 60.0
Streams = Callable[[int], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    trio.run(measure, parser.parse_args())


async def measure(arguments: argparse.Namespace) -> None:
    daemons = DemoNodes()
    inference = {
        "n_threads": 1,
        "n_ctx": N_CTX,
        "n_slots": SLOTS_MAX,
        "max_concurrent_requests": SLOTS_MAX,
        "max_queued_requests": SLOTS_MAX,
    }
    try:
        daemon = daemons.start("bench", ["guide"], [], inference)
        with trio.fail_after(START_TIMEOUT_S):
            while (found := daemon.announcement()) is None:  # noqa: ASYNC110 (another process)
                await trio.sleep(0.05)
            url = str(found["api_url"])
            async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
                while (await http.get("/health/ready")).status_code != 200:  # noqa: ASYNC110
                    await trio.sleep(0.05)
        with tempfile.TemporaryDirectory() as folder:
            await _compare(arguments, url, daemon.process.pid, Path(folder))
    finally:
        daemons.stop()


async def _compare(arguments: argparse.Namespace, url: str, daemon_pid: int, folder: Path) -> None:
    settings = WorkerSettings(cache_dir=folder / "cache", n_ctx=N_CTX, n_slots=SLOTS_MAX, n_threads=1)
    pool, model = WorkerPool(settings, folder / "run"), ModelFile("0" * 64, GUIDE_PATH)
    contestants: dict[str, tuple[Streams, int]] = {}
    figures: dict[tuple[int, str, str], Figure] = {}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool.running())
        await pool.load(model, LayerRange(0, 12), None)
        limits = httpx.Limits(max_connections=SLOTS_MAX)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits)
        )

        async def in_process(n: int) -> None:
            async with trio.open_nursery() as nursery:
                for i in range(n):
                    nursery.start_soon(_generate, pool, model, f"bench-{i}")

        async def over_http(n: int) -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(n):
                    nursery.start_soon(_ask, http)

        contestants = {"in process": (in_process, os.getpid()), "HTTP": (over_http, daemon_pid)}
        for run, _ in contestants.values():
            await run(max(arguments.streams))  # warm-up
        for _ in range(arguments.rounds):
            for n in arguments.streams:
                for name, (run, pid) in contestants.items():
                    before_s, since_s = cpu_s(pid), time.perf_counter()
                    await run(n)
                    passed_s = time.perf_counter() - since_s
                    used_s = cpu_s(pid) - before_s
                    for unit, value in (
                        ("tokens/s", n * N_TOKENS / passed_s),
                        ("CPU us/token", used_s / (n * N_TOKENS) * 1e6),
                    ):
                        label = f"{name}, {n} stream{'s' if n > 1 else ''}"
                        figures.setdefault((n, name, unit), Figure(label, unit)).values.append(value)
    rows: list[tuple[Figure, Figure | None]] = []
    for unit in ("tokens/s", "CPU us/token"):
        for n in arguments.streams:
            rival, ours = figures[n, "in process", unit], figures[n, "HTTP", unit]
            rows += [(rival, None), (ours, ratios(ours, rival) if min(rival.values) else None)]
    text = table(rows)
    print(text)
    write("http_overhead", f"python -m bench.http_overhead --rounds {arguments.rounds}", rows, text)


async def _generate(pool: WorkerPool, model: ModelFile, request_id: str) -> None:
    tokens = await pool.tokenize(model, messages=[{"role": "user", "content": QUESTION}])
    sampling = Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
    async with pool.generate(model, request_id=request_id, tokens=tokens, sampling=sampling) as generation:
        n_tokens = len([token async for token, _ in generation])
    assert n_tokens == N_TOKENS


async def _ask(http: httpx.AsyncClient) -> None:
    body = {
        "model": "guide",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": N_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        told = b"".join([chunk async for chunk in answer.aiter_raw()])
    usage = msgspec.json.decode(told.split(b"data: ")[-2])["usage"]
    assert usage["completion_tokens"] == N_TOKENS


if __name__ == "__main__":
    main()
