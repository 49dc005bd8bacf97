"""What signed rows and checks cost, end to end: processor time of all nodes, and time between two tokens.

    python -m bench.check_cost [--model guide|0.5b] [--requests 240] [--piece 4]

A model in thirds over three real workers, of which the first belongs to the node that asks, and a fourth,
slower node that has the last two thirds and computes again what is checked. All nodes are in one
process, on the in-memory router. Requests of 64 tokens, one after the other, in short pieces that alternate
in the order ABBA (a machine's speed changes within minutes): over nodes without signatures and checks, and
over nodes with both at the default rate, which share the workers. Processor time is that of this process and
of the workers, until all checks that were drawn are over. The nodes begin as strangers, which are checked as
often as the budget of 3 % allows; the figures come for each quarter of the requests and for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from bench.common.figures import RESULTS, machine
from bench.common.models import half_billion
from bench.three_liars import CHECK_S, ORIGIN, counted_draws, open_nodes
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.pipelines import Pipelines
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


@dataclass
class Spent:
    """By some requests and the checks that they led to."""

    cpu_s: float = 0.0
    n_requests: int = 0
    n_checks: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens."""


async def piece(
    pools: Mapping[NodeId, WorkerPool], origin: Pipelines, entry: CatalogueEntry, first: int, n_requests: int
) -> Spent:
    """`first`: the number of the first request."""
    began, spent = origin.statistics(), Spent(n_requests=n_requests)
    began_cpu_s = cpu_s(pools)
    with counted_draws() as drawn:
        for number in range(first, first + n_requests):
            prompt = Prompt(text=f"{number}: what is layer {number % 12} of {number} nodes?")
            sampling = Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
            async with origin.generate(prompt, entry, sampling) as generation:
                before_s = 0.0
                async for _ in generation:
                    now_s = time.perf_counter()
                    if before_s:
                        spent.gaps_s.append(now_s - before_s)
                    before_s = now_s
        n_ended = began.checked + began.checks_dropped + len(drawn)
        with trio.move_on_after(CHECK_S):
            while (seen := origin.statistics()).checked + seen.checks_dropped < n_ended:  # noqa: ASYNC110
                await trio.sleep(0.02)
    spent.cpu_s = cpu_s(pools) - began_cpu_s
    spent.n_checks = origin.statistics().checked - began.checked
    return spent


async def pairs(
    pools: Mapping[NodeId, WorkerPool], entry: CatalogueEntry, n_requests: int, n_piece: int
) -> list[tuple[Spent, Spent]]:
    """Pieces without and with signatures and checks, beside each other."""
    found: list[tuple[Spent, Spent]] = []
    async with (
        open_nodes(pools, NODES, entry, check_rate=0.0, signs=False) as plain,
        open_nodes(pools, NODES, entry, check_rate=1 / 16, signs=True) as checked,
    ):
        for nodes in (plain, checked):  # to warm up
            await piece(pools, nodes[ORIGIN].pipelines, entry, -2, 2)
        for first in range(0, n_requests, n_piece):
            both: dict[bool, Spent] = {}
            for is_checked in (False, True) if first // n_piece % 2 == 0 else (True, False):
                origin = (checked if is_checked else plain)[ORIGIN].pipelines
                both[is_checked] = await piece(pools, origin, entry, first, n_piece)
            found.append((both[False], both[True]))
    return found


def figures_of(found: Sequence[tuple[Spent, Spent]]) -> dict[str, float]:
    """Of some pairs."""
    plain, checked = ([pair[i] for pair in found] for i in range(2))
    without_s, with_s = (sum(x.cpu_s for x in side) for side in (plain, checked))
    without_gap_s, with_gap_s = (
        statistics.median(gap for x in side for gap in x.gaps_s) for side in (plain, checked)
    )
    n_requests = sum(x.n_requests for x in plain)
    return {
        "requests": n_requests,
        "checks": sum(x.n_checks for x in checked),
        "cpu_s_per_request_without": round(without_s / n_requests, 4),
        "cpu_s_per_request_with": round(with_s / n_requests, 4),
        "cpu_more": round(with_s / without_s - 1, 4),
        "cpu_more_in_the_median_pair": round(
            statistics.median(two.cpu_s / one.cpu_s for one, two in found) - 1, 4
        ),
        "token_ms_without": round(1000 * without_gap_s, 3),
        "token_ms_with": round(1000 * with_gap_s, 3),
        "token_more": round(with_gap_s / without_gap_s - 1, 4),
    }


async def main(model: str, n_requests: int, n_piece: int) -> None:
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
            found = await pairs(pools, entry, n_requests, n_piece)
    quarter = max(1, len(found) // 4)
    figures: dict[str, Any] = {
        "all": figures_of(found),
        "quarters": [figures_of(found[i : i + quarter]) for i in range(0, len(found), quarter)],
    }
    print(json.dumps(figures, indent=1))
    command = f"{COMMAND} --model {model} --requests {n_requests} --piece {n_piece}"
    result = {"machine": machine(), "command": command, **figures}
    (RESULTS / f"check_cost-{model}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("guide", "0.5b"), default="guide")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--piece", type=int, default=4)
    arguments = parser.parse_args()
    trio.run(main, arguments.model, arguments.requests, arguments.piece)
