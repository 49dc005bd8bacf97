"""A large swarm, simulated, in which some of the nodes ask.

    python -m bench.large_swarm [--nodes 10000] [--origins 200] [--picture FILE]

Twenty models of 8B to 400B are shared out over nodes in three regions. Requests come from the origins, as
many as if each node asked once in `--ask-every-s`, and something happens to a node once in 4000 s: it
joins, leaves, is killed, vanishes from the network, or becomes slow without saying so
(`bench.common.large_swarm` says what is real and what is made up). Each request is compared with the best
route that an oracle would have chosen at that moment, who knows all nodes, their real speeds and loads, and
who is alive. `--picture FILE` draws it; that needs matplotlib: `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from bench.common.figures import RESULTS, machine, refuse_without_matplotlib
from bench.common.large_swarm import LargeSwarm
from bench.common.large_swarm_causes import table
from bench.common.large_swarm_nodes import (
    PLAN_EVERY_S,
    SPEAK_S,
    Origin,
)
from bench.common.large_swarm_requests import ask, warm
from swarmllm.pipeline.route.warming import EVERY_S
from swarmllm.swarm.records.details_exchange import LOOK_S
from swarmllm.swarm.records.spread import HEARTBEATS_PER_S

CAUSES_EVERY_S = 30.0
COMMAND = "python -m bench.large_swarm"


async def simulate(
    n_nodes: int,
    duration_s: float,
    seed: int = 1,
    n_origins: int = 200,
    ask_every_s: float = 500.0,
    change_every_s: float = 4000.0,
    settle_s: float = 30.0,
    *,
    is_brief: bool = True,
    causes: bool = False,
) -> LargeSwarm:
    """Under the mock clock. Requests count that begin after `settle_s`."""
    swarm = LargeSwarm(n_nodes, n_origins, seed, is_brief=is_brief)
    told("placed", swarm)

    async def every(mean_s: float, act: Callable[[], None]) -> None:
        while True:
            await trio.sleep(swarm.rng.expovariate(1 / mean_s))
            act()

    async def regularly(each_s: float, act: Callable[[], None]) -> None:
        while True:
            await trio.sleep(each_s)
            act()

    def look() -> None:
        n_complete = sum(swarm.plan(model, nursery) for model in swarm.models)
        swarm.figures.samples.append((trio.current_time(), len(swarm.nodes), n_complete, swarm.n_moved))
        told("", swarm)

    def look_for_details() -> None:
        for origin in swarm.origins:
            if origin not in looking:
                nursery.start_soon(look_once, origin)

    looking: set[Origin] = set()

    async def look_once(origin: Origin) -> None:
        looking.add(origin)
        await origin.exchange.look()
        looking.remove(origin)

    def keep_warm() -> None:
        for origin in swarm.origins:
            nursery.start_soon(warm, swarm, origin)

    async with trio.open_nursery() as nursery:
        for origin in swarm.origins:
            origin.heard(swarm.heard.book.node_ids(), trio.current_time())
        nursery.start_soon(regularly, SPEAK_S, swarm.heard.speak)
        nursery.start_soon(regularly, 1 / HEARTBEATS_PER_S, swarm.heard.beat)
        nursery.start_soon(regularly, SPEAK_S, swarm.heard.tell_sustained_loads)
        nursery.start_soon(regularly, PLAN_EVERY_S, look)
        nursery.start_soon(regularly, EVERY_S, keep_warm)
        if is_brief:
            nursery.start_soon(regularly, LOOK_S, look_for_details)
        nursery.start_soon(every, ask_every_s / n_nodes, lambda: nursery.start_soon(ask, swarm, nursery))
        nursery.start_soon(every, change_every_s / n_nodes, swarm.change)
        await trio.sleep(settle_s)
        swarm.begin_counting()
        swarm.causes = [] if causes else None
        await trio.sleep(duration_s)
        nursery.cancel_scope.cancel()
    return swarm


def told(what: str, swarm: LargeSwarm) -> None:
    figures = swarm.figures
    print(
        f"second {trio.current_time():.0f}: {what} {len(swarm.nodes)} nodes, {figures.n_asked} requests, "
        f"{time.process_time():.0f} s of the processor",
        file=sys.stderr,
    )


def summary(swarm: LargeSwarm, duration_s: float) -> dict[str, Any]:
    figures, n_origins = swarm.figures, len(swarm.origins)

    def quantiles(values: list[float]) -> list[float]:
        found = sorted(values) or [float("nan")]
        return [round(found[min(len(found) - 1, int(part * len(found)))], 3) for part in (0.5, 0.95)]

    n_dials = sum(origin.n_dials for origin in swarm.origins)
    n_in_vain = sum(origin.n_dials_in_vain for origin in swarm.origins)
    return {
        "requests served": f"{figures.n_asked - figures.n_unserved} of {figures.n_asked}",
        "of them re-routed on the way": figures.n_rerouted,
        "duration p50 / p95 (s)": quantiles(figures.costs_s),
        "against the oracle's route p50 / p95": quantiles(figures.ratios),
        "the plans alone, without dials": quantiles(swarm.plan_ratios),
        "of the first request of an origin for a model": quantiles(swarm.first_ratios),
        "of later ones": quantiles(swarm.later_ratios),
        "records and loads heard, bytes/s": round(figures.n_record_bytes / duration_s),
        "details that an origin receives besides, bytes/s": round(
            sum(origin.n_details_bytes for origin in swarm.origins) / n_origins / duration_s
        ),
        "envelopes and heartbeats heard, signed, each once, bytes/s": round(
            figures.n_sealed_bytes / duration_s
        ),
        "of them envelopes": round(figures.n_envelope_bytes / duration_s),
        "of them heartbeats with news of load": round(figures.n_load_bytes / duration_s),
        "records / news of load heard, per s": [
            round(number / duration_s, 2) for number in (figures.n_records, figures.n_loads)
        ],
        "loads that an origin hears on data connections, per s": round(
            sum(origin.n_loads for origin in swarm.origins) / n_origins / duration_s, 2
        ),
        "routes changed for what stages told": figures.n_reassigned,
        "details of so many nodes at an origin, median": statistics.median(
            len(origin.details) for origin in swarm.origins
        ),
        "envelopes asked for again, per s": round(swarm.heard.n_fetched / duration_s, 2),
        "dials for work, per origin and minute": round(n_dials / n_origins / (duration_s / 60), 2),
        "of them in vain": n_in_vain,
        "connections of an origin, median": statistics.median(len(o.connected) for o in swarm.origins),
        "layers moved per node and hour": round(
            figures.n_moved_layers / len(swarm.nodes) / (duration_s / 3600), 3
        ),
        "changes": figures.counts,
        "complete pipelines of all models": figures.samples[-1][2] if figures.samples else 0,
    }


def draw(found: dict[str, LargeSwarm], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawing, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for name, swarm in found.items():
        ratios = sorted(swarm.figures.ratios)
        axes.plot([100 * (i + 1) / len(ratios) for i in range(len(ratios))], ratios, label=name)
    axes.axhline(1.0, color="#888888", linewidth=1)
    axes.axvline(95, color="#888888", linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("% of requests")
    axes.set_ylabel("duration / that of the oracle's route")
    axes.grid(alpha=0.25)
    axes.legend()
    drawing.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[10_000])
    parser.add_argument("--origins", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--ask-every-s", type=float, default=500.0, help="of each node")
    parser.add_argument("--change-every-s", type=float, default=4000.0, help="of each node")
    parser.add_argument(
        "--whole-records", action="store_true", help="publish them as in a small swarm, for comparison"
    )
    parser.add_argument(
        "--causes",
        action="store_true",
        help="what plans would cost if origins knew loads, details, speeds or distances, by the minute",
    )
    parser.add_argument("--settle-s", type=float, default=30.0, help="before requests count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    refuse_without_matplotlib(parser, options.picture)
    columns: dict[str, dict[str, Any]] = {}
    swarms: dict[str, LargeSwarm] = {}
    for n_nodes in options.nodes:
        began_s = time.process_time()
        run = partial(
            simulate,
            n_nodes,
            options.minutes * 60,
            options.seed,
            min(options.origins, n_nodes // 2),
            options.ask_every_s,
            options.change_every_s,
            is_brief=not options.whole_records,
            causes=options.causes,
            settle_s=options.settle_s,
        )
        swarm = trio.run(run, clock=MockClock(autojump_threshold=0))
        swarms[f"{n_nodes} nodes"] = swarm
        columns[f"{n_nodes} nodes"] = summary(swarm, options.minutes * 60) | {
            "processor time of the simulation (s)": round(time.process_time() - began_s)
        }
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {name} | {' | '.join(str(column[name]) for column in columns.values())} |"
        for name in next(iter(columns.values()))
    ]
    print("\n".join(lines))
    for swarm in swarms.values():
        if swarm.causes is not None:
            print(f"\n{table(swarm.causes, CAUSES_EVERY_S)}")
    RESULTS.mkdir(exist_ok=True)
    names = ("origins", "minutes", "ask_every_s", "change_every_s", "settle_s", "seed")
    given = " ".join(f"--{name.replace('_', '-')} {getattr(options, name):g}" for name in names)
    given += " --whole-records" * options.whole_records
    command = f"{COMMAND} --nodes {' '.join(map(str, options.nodes))} {given}"
    document = {"command": command, "machine": machine(), "figures": columns}
    (RESULTS / "large_swarm.json").write_text(json.dumps(document, indent=2) + "\n")
    (RESULTS / "large_swarm.md").write_text("\n".join(lines) + "\n")
    if options.picture:
        draw(swarms, options.picture)


if __name__ == "__main__":
    main()
