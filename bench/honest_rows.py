"""How many of many honest stretches a check would call wrong, for kinds of kernels, batches and KV.

    python -m bench.honest_rows [--stretches 100000] [--seconds 3600] [--seed 9] [--kv q8_0]
        [--kernels NAME=FOLDER ...]

A middle stage of the bundled model computes rows of texts cut at random from the repository's pages, as an
auditor that has the layers would, with either type of KV, and once with each of these settings, also while
the worker computes other requests. Prints the largest distances from the auditor's rows, with its own type of
KV and with the nearer one, and how many of the latter are above their limits
(`swarmllm.pipeline.check.thresholds`): above the least one, and above the one that is left once the auditor
has computed them in other batches, which is an accusation. `--kv` is the auditor's own type.

`--kernels` adds workers whose libggml-cpu.so.0 is that of a folder: another build of the same ggml, whose
source is in llama-cpp-python's source distribution (vendor/llama.cpp/ggml; an empty ggml.pc.in may have to be
added). AVX2: cmake -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF; SSE4.2: the same with GGML_AVX, GGML_AVX2,
GGML_FMA, GGML_F16C and GGML_BMI2 off; then build the target ggml-cpu.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import trio

from bench.checked_rows import HONEST, N_ROWS, libraries, named_folder
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.sampling import STRETCH_ROWS
from swarmllm.pipeline.check.thresholds import SAME_KV, spread_with_kv
from swarmllm.pipeline.check.verdict import distance
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.ipc import KvType
from swarmllm_proto.limits import EXACT_ROWS
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
N_BESIDE: Final = 3
"""Other requests, which the same worker computes meanwhile."""


def texts() -> list[str]:
    return [Path(page).read_text(encoding="utf-8")[:40_000] for page in TEXTS]


async def computed(
    pool: WorkerPool, model: ModelFile, layers: LayerRange, rows: Tensor, n: int, name: str = "audited"
) -> Tensor:
    return await _computed(pool, model, layers, rows, n, name)


async def computed_in(
    kv_type: KvType, pool: WorkerPool, model: ModelFile, layers: LayerRange, rows: Tensor
) -> Tensor:
    """As the auditor computes them with another type of KV than its own."""
    options = {"exact_rows": len(rows), "kv_type": kv_type}
    return await _computed(pool, model, layers, rows, EXACT_ROWS, kv_type, **options)


async def _computed(
    pool: WorkerPool, model: ModelFile, layers: LayerRange, rows: Tensor, n: int, name: str, **options: Any
) -> Tensor:
    results = []
    for at in range(0, len(rows), n):
        result = await pool.forward(
            model,
            request_id=f"{name} {layers}",
            layers=layers,
            position=at,
            tensor=rows[at : at + n],
            want="hidden",
            n_prompt_tokens=len(rows),
            **options,
        )
        results.append(np.array(result.tensor))
    await pool.cancel(model.model_id, f"{name} {layers}")
    return np.concatenate(results)


VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "": {},
    ", plain attention": {"flash_attention": "off"},
    ", KV in Q8_0": {"kv_type": "q8_0"},
}
"""Of each other build of the kernels."""


async def main(
    n_stretches: int, seconds: float, seed: int, own: KvType, builds: Sequence[tuple[str, Path]]
) -> None:
    (other,) = (kv_type for kv_type in get_args(KvType) if kv_type != own)
    drawn = random.Random(seed)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        entry = Catalogue(Path(name) / "models.sqlite").ensure(GUIDE_PATH, "guide")
        model = ModelFile(entry.model_id, entry.path)
        n_layers = entry.manifest.n_layers
        before, layers = LayerRange(0, n_layers // 3), LayerRange(n_layers // 3, 2 * n_layers // 3)
        found: dict[str, list[float]] = {}
        nearer: dict[str, list[float]] = {}
        n_above: Counter[str] = Counter()
        n_wrong: Counter[str] = Counter()
        equal: Counter[str] = Counter()
        async with AsyncExitStack() as stack:
            pools: dict[str, WorkerPool] = {}

            async def start(what: str, settings: Mapping[str, Any]) -> None:
                options = WorkerSettings(cache_dir=Path(name) / "cache", n_ctx=2048, n_slots=6, **settings)
                pools[what] = WorkerPool(options, Path(name) / f"run{len(pools)}")
                await stack.enter_async_context(pools[what].running())
                await pools[what].load(model, layers)

            for what, settings in SETTINGS.items():
                await start(what, settings)
            for build, kernels in builds:
                for what, settings in VARIANTS.items():
                    with libraries(kernels):
                        await start(build + what, {"kernels": "ggml", **settings})
            auditor = pools["KV in Q8_0" if own == "q8_0" else "the same settings"]
            await auditor.load(model, before)
            tokens = np.concatenate([await auditor.tokenize(model, text=text) for text in texts()])
            while sum(map(len, found.values())) < n_stretches and time.monotonic() - started_s < seconds:
                at = drawn.randrange(len(tokens) - N_ROWS)
                came_in = await computed(auditor, model, before, tokens[at : at + N_ROWS], 128)
                base = await computed(auditor, model, layers, came_in, 128)

                again = await computed(auditor, model, layers, came_in, STRETCH_ROWS)
                in_other = await computed_in(other, auditor, model, layers, came_in)
                spreads = [
                    spread_with_kv(*each)
                    for each in zip(
                        _distances(base, again, came_in), _distances(base, in_other, came_in), strict=True
                    )
                ]

                async def compare(what: str, pool: WorkerPool, n: int) -> None:
                    rows = await computed(pool, model, layers, came_in, n)  # noqa: B023
                    note(what, pool, n, rows)

                def note(what: str, pool: WorkerPool, n: int, rows: Tensor) -> None:
                    name = f"{what}, batches of {n}"
                    offs = _distances(base, rows, came_in)  # noqa: B023
                    in_other_type = _distances(in_other, rows, came_in)  # noqa: B023
                    for off, off_in_other, spread in zip(offs, in_other_type, spreads, strict=True):  # noqa: B023
                        near = min(off, off_in_other)
                        found.setdefault(name, []).append(off)
                        nearer.setdefault(name, []).append(near)
                        equal[name] += near == 0
                        n_above[name] += near > SAME_KV.least
                        n_wrong[name] += near > SAME_KV.limit(spread)

                n = drawn.choice(BATCHES)
                async with trio.open_nursery() as nursery:
                    for what, pool in pools.items():
                        nursery.start_soon(compare, what, pool, n)
                others = [
                    await computed(auditor, model, before, tokens[at : at + N_ROWS], 128)
                    for at in drawn.sample(range(len(tokens) - N_ROWS), N_BESIDE)
                ]
                for what, pool in pools.items():
                    async with trio.open_nursery() as nursery:
                        for number, rows in enumerate(others):
                            batch = drawn.choice((*BATCHES, 7))
                            nursery.start_soon(computed, pool, model, layers, rows, batch, f"{number}")
                        note(
                            what + ", beside others",
                            pool,
                            128,
                            await computed(pool, model, layers, came_in, 128),
                        )
    print(
        f"| honest, the auditor with KV in {own} and batches of 128 | stretches | equal | mean | most "
        "| most, nearer type | above least | wrong |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for what, measured in sorted(found.items()):
        print(
            f"| {what} | {len(measured)} | {equal[what]} | {np.mean(measured):.4f} | {max(measured):.4f} "
            f"| {max(nearer[what]):.4f} | {n_above[what]} | {n_wrong[what]} |"
        )
    print(
        f"\n{sum(map(len, found.values()))} stretches in {time.monotonic() - started_s:.0f} s, "
        f"{n_above.total()} above the least limit, {n_wrong.total()} wrong"
    )


def _distances(base: Tensor, rows: Tensor, came_in: Tensor) -> list[float]:
    cuts = [slice(cut, cut + STRETCH_ROWS) for cut in range(0, N_ROWS, STRETCH_ROWS)]
    return [distance(base[cut], rows[cut], came_in[cut]) for cut in cuts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stretches", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=9, help="of the texts")
    parser.add_argument("--kv", choices=get_args(KvType), default="f16", help="of the auditor")
    parser.add_argument("--kernels", nargs="*", type=named_folder, default=(), metavar="NAME=FOLDER")
    options = parser.parse_args()
    trio.run(main, options.stretches, options.seconds, options.seed, options.kv, options.kernels)
