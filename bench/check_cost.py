"""What signed rows and checks cost, end to end: processor time of all nodes, and time between two tokens.

    python -m bench.check_cost [--model guide|0.5b] [--requests 60] [--rounds 2]

A model in thirds over three real workers, of which the first belongs to the node that asks, and a fourth,
slower node that has the last two thirds and computes again what is checked. All nodes are in one
process, on the in-memory router. Requests of 64 tokens, one after the other: a piece of them without
signatures and checks, one with both at the default rate, and so on in the order ABBA. Processor time is that
of this process and of the workers, until all checks that were drawn are over. The nodes begin as strangers,
which are checked as often as the budget of 3 % allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import trio

from bench.common.figures import RESULTS, machine
from bench.decode import half_billion
from bench.three_liars import CHECK_S, ORIGIN, counted_draws, open_nodes
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling

COMMAND: Final = "python -m bench.check_cost"
NODES: Final = ORIGIN, node_id_named("b"), node_id_named("c")
OTHER: Final = node_id_named("d")
N_TOKENS: Final = 64
TICKS_PER_S: Final = 100


def cpu_s(pools: Mapping[NodeId, WorkerPool]) -> float:
    """Of this process and of all workers."""
    total = time.process_time()
    for pool in pools.values():
        for worker in pool.statistics():
            if worker.pid is not None:
                fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return total


async def piece(
    pools: Mapping[NodeId, WorkerPool], entry: CatalogueEntry, n_requests: int, *, is_checked: bool
) -> dict[str, float]:
    """`is_checked`: with signatures, and checks at the default rate."""
    gaps: list[float] = []
    rate = 1 / 16 if is_checked else 0.0
    async with open_nodes(pools, NODES, entry, check_rate=rate, signs=is_checked) as nodes:
        origin, began_s = nodes[ORIGIN].pipelines, cpu_s(pools)
        with counted_draws() as drawn:
            for number in range(n_requests):
                prompt = Prompt(text=f"{number}: what is layer {number % 12} of {number} nodes?")
                sampling = Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
                async with origin.generate(prompt, entry, sampling) as generation:
                    before_s = 0.0
                    async for _ in generation:
                        now_s = time.perf_counter()
                        if before_s:
                            gaps.append(now_s - before_s)
                        before_s = now_s
                with trio.move_on_after(CHECK_S):
                    while (seen := origin.statistics()).checked + seen.checks_dropped < len(drawn):  # noqa: ASYNC110
                        await trio.sleep(0.02)
        return {
            "cpu_s_per_request": (cpu_s(pools) - began_s) / n_requests,
            "token_ms_median": 1000 * statistics.median(gaps),
            "checks": float(origin.statistics().checked),
        }


async def main(model: str, n_requests: int, n_rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = GUIDE_PATH if model == "guide" else half_billion()
        entry = Catalogue(folder / "models.sqlite").ensure(path, model)
        third = entry.manifest.n_layers // 3
        held = {node: f"{i * third}:{(i + 1) * third}" for i, node in enumerate(NODES)}
        held[OTHER] = f"{third}:{3 * third}"
        pools: dict[NodeId, WorkerPool] = {}
        async with AsyncExitStack() as stack:
            for node_id, layers in held.items():
                settings = WorkerSettings(
                    cache_dir=folder / f"cache{len(pools)}", n_ctx=512, n_slots=4, n_threads=1
                )
                pool = WorkerPool(settings, folder / f"run{len(pools)}")
                await stack.enter_async_context(pool.running())
                await pool.load(ModelFile(entry.model_id, entry.path), LayerRange.parse(layers))
                pools[node_id] = pool
            await piece(pools, entry, 2, is_checked=True)  # to warm up
            found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for round_number in range(n_rounds):
                for is_checked in (False, True) if round_number % 2 == 0 else (True, False):
                    found[is_checked].append(await piece(pools, entry, n_requests, is_checked=is_checked))
    figures: dict[str, Any] = {"model": model, "requests": n_requests, "rounds": n_rounds}
    for is_checked, name in ((False, "without"), (True, "with")):
        for key in found[is_checked][0]:
            figures[f"{key}_{name}"] = round(statistics.median(each[key] for each in found[is_checked]), 4)
    for key in ("cpu_s_per_request", "token_ms_median"):
        figures[f"{key}_more"] = round(figures[f"{key}_with"] / figures[f"{key}_without"] - 1, 4)
    print(json.dumps(figures, indent=1))
    command = f"{COMMAND} --model {model} --requests {n_requests} --rounds {n_rounds}"
    result = {"machine": machine(), "command": command, **figures}
    (RESULTS / f"check_cost-{model}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("guide", "0.5b"), default="guide")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    trio.run(main, arguments.model, arguments.requests, arguments.rounds)
