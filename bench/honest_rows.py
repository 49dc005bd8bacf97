"""How many of many honest stretches a check would call wrong, for kinds of kernels, batches and KV.

    python -m bench.honest_rows [--stretches 100000] [--seconds 3600]

A middle stage of the bundled model computes rows of texts cut at random from the repository's pages, once as
an auditor would and once with each of these settings. Prints the largest distances, and how many are wrong.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from bench.checked_rows import HONEST, N_ROWS
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.sampling import STRETCH_ROWS
from swarmllm.pipeline.check.verdict import TOLERANCE, distance
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.tensors import Tensor

TEXTS: Final = ("README.md", *(f"docs/{n}.md" for n in ("swarm", "architecture", "scheduling", "security")))
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    **HONEST,
    "ggml's kernels, plain attention": {
        "kernels": "ggml",
        "flash_attention": "off",
    },
}
BATCHES: Final = (128, 32, 256)


def texts() -> list[str]:
    return [Path(page).read_text(encoding="utf-8")[:40_000] for page in TEXTS]


async def computed(pool: WorkerPool, model: ModelFile, layers: LayerRange, rows: Tensor, n: int) -> Tensor:
    results = []
    for at in range(0, len(rows), n):
        result = await pool.forward(
            model,
            request_id=f"{layers}",
            layers=layers,
            position=at,
            tensor=rows[at : at + n],
            want="hidden",
            n_prompt_tokens=len(rows),
        )
        results.append(np.array(result.tensor))
    await pool.cancel(model.model_id, f"{layers}")
    return np.concatenate(results)


async def main(n_stretches: int, seconds: float) -> None:
    drawn = random.Random(9)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        entry = Catalogue(Path(name) / "models.sqlite").ensure(GUIDE_PATH, "guide")
        model = ModelFile(entry.model_id, entry.path)
        n_layers = entry.manifest.n_layers
        before, layers = LayerRange(0, n_layers // 3), LayerRange(n_layers // 3, 2 * n_layers // 3)
        found: dict[str, list[float]] = {}
        async with AsyncExitStack() as stack:
            pools: dict[str, WorkerPool] = {}
            for what, settings in SETTINGS.items():
                options = WorkerSettings(cache_dir=Path(name) / "cache", n_ctx=512, n_slots=2, **settings)
                pools[what] = WorkerPool(options, Path(name) / f"run{len(pools)}")
                await stack.enter_async_context(pools[what].running())
                await pools[what].load(model, layers)
            auditor = next(iter(pools.values()))
            await auditor.load(model, before)
            tokens = np.concatenate([await auditor.tokenize(model, text=text) for text in texts()])
            while sum(map(len, found.values())) < n_stretches and time.monotonic() - started_s < seconds:
                at = drawn.randrange(len(tokens) - N_ROWS)
                came_in = await computed(auditor, model, before, tokens[at : at + N_ROWS], 128)
                base = await computed(auditor, model, layers, came_in, 128)

                async def compare(what: str, pool: WorkerPool, n: int, came_in: Tensor, base: Tensor) -> None:
                    rows = await computed(pool, model, layers, came_in, n)
                    found.setdefault(f"{what}, batches of {n}", []).extend(
                        distance(*(each[cut : cut + STRETCH_ROWS] for each in (base, rows, came_in)))
                        for cut in range(0, N_ROWS, STRETCH_ROWS)
                    )

                n = drawn.choice(BATCHES)
                async with trio.open_nursery() as nursery:
                    for what, pool in pools.items():
                        nursery.start_soon(compare, what, pool, n, came_in, base)
    print(
        "| honest, the auditor with batches of 128 | stretches | mean | most | wrong |\n|---|---|---|---|---|"
    )
    for what, measured in sorted(found.items()):
        n_wrong = sum(each > TOLERANCE for each in measured)
        print(f"| {what} | {len(measured)} | {np.mean(measured):.4f} | {max(measured):.4f} | {n_wrong} |")
    n_all, n_wrong = (
        sum(map(len, found.values())),
        sum(each > TOLERANCE for m in found.values() for each in m),
    )
    print(
        f"\n{n_all} stretches in {time.monotonic() - started_s:.0f} s, {n_wrong} wrong; tolerance {TOLERANCE}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stretches", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    trio.run(main, options.stretches, options.seconds)
