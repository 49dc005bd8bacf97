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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from bench.common.figures import RESULTS, machine, refuse_without_matplotlib
from bench.common.large_swarm import LargeSwarm
from bench.common.large_swarm_nodes import (
    DIAL_RTTS,
    PLAN_EVERY_S,
    SPEAK_S,
    VANISHED_S,
    Node,
    Origin,
    id_of,
)
from swarmllm.errors import NoPipeline
from swarmllm.models import LayerRange, Manifest
from swarmllm.pipeline.route.assembly import Assembly, RouteQuery, assemble
from swarmllm.pipeline.route.request_routes import CHANGES_MAX, GAIN
from swarmllm.pipeline.route.suspects import sparing
from swarmllm.pipeline.route.untried import unless_much_longer
from swarmllm.pipeline.route.warming import DIALS_MAX, EVERY_S, ROUTES
from swarmllm.scheduling.cheapest import cheapest_route, route_cost_s
from swarmllm.scheduling.route import RouteStage
from swarmllm.swarm.records.details_exchange import LOOK_S
from swarmllm.swarm.records.spread import HEARTBEATS_PER_S
from swarmllm_proto.identifiers import NodeId

DEADLINE_S = 60.0
COMMAND = "python -m bench.large_swarm"


def stages_of(chosen: Assembly) -> tuple[RouteStage, ...]:
    return tuple(RouteStage(stage.node_id, LayerRange(stage.start, stage.end)) for stage in chosen.stages)


def choose(question: RouteQuery, avoid: set[NodeId], origin: Origin, *, may_risk: bool) -> Assembly:
    """As `RequestRoutes.choose` does. Raises NoPipeline."""
    now = trio.current_time()
    untried = sorted(origin.reachable.untried(now) & question.holders.keys())

    def without(avoided: set[NodeId]) -> Assembly:
        return assemble(replace(question, avoid=avoided))

    def timed(suspects: Sequence[NodeId]) -> Assembly:
        found = sparing(without, avoid, suspects)
        return replace(found, cost_s=route_cost_s(stages_of(found), question.inputs))

    if may_risk and origin.untried.may_be_taken(now):
        return unless_much_longer(timed, (), untried)
    return timed(untried)


async def ask(swarm: LargeSwarm, nursery: trio.Nursery) -> None:
    """One request of a random origin, to its end."""
    rng, figures = swarm.rng, swarm.figures
    origin = rng.choice(swarm.origins)
    model = rng.choice(origin.uses)
    size = rng.choice([64, 256, 1024]), rng.choice([32, 128, 256])
    is_first = model.name not in origin.asked
    origin.asked[model.name] = (model, *size)
    if is_first:
        nursery.start_soon(warm, swarm, origin)
    held, truth = swarm.truth(origin.node, model, size)
    best = cheapest_route(model.n_layers, 1, held, truth)
    began_s, left, avoid, n_tries = trio.current_time(), 1.0, set[NodeId](), 0
    while left > 0:
        if trio.current_time() > began_s + DEADLINE_S:
            figures.n_asked += 1
            figures.n_unserved += 1
            return
        told: dict[NodeId, int] = {}
        try:
            question = swarm.known(origin, model, size, told)
            chosen = choose(question, avoid, origin, may_risk=not n_tries)
        except NoPipeline:
            avoid.clear()
            await trio.sleep(1.0)
            continue
        n_tries += 1
        risked = chosen.node_ids & origin.reachable.untried(trio.current_time())
        refused = await assign(swarm, origin, model, stages_of(chosen), told)
        if refused:
            if risked & refused - set(origin.connected):
                origin.untried.failed(trio.current_time())
            avoid |= refused
            continue
        if risked:
            origin.untried.accepted()
        route = await lighter(swarm, origin, model, size, stages_of(chosen), avoid, told)
        if best is not None and all(stage.node_id in truth.speeds for stage in route):
            swarm.plan_ratios.append(route_cost_s(route, truth) / route_cost_s(best, truth))
        left = await walk(swarm, origin, model, size, route, left)
        figures.n_rerouted += left > 0
    figures.n_asked += 1
    took_s = trio.current_time() - began_s
    figures.costs_s.append(took_s)
    figures.served_at_s.append(trio.current_time())
    if best is not None:
        ratio = took_s / route_cost_s(best, truth)
        figures.ratios.append(ratio)
        (swarm.first_ratios if is_first else swarm.later_ratios).append(ratio)


async def reach(swarm: LargeSwarm, origin: Origin, node_id: NodeId) -> bool:
    if node_id == origin.node.node_id or node_id in origin.connected:
        origin.worked_with.add(node_id)
        return True
    origin.n_dials += 1
    node = swarm.nodes.get(node_id)
    if node is not None:
        await trio.sleep(DIAL_RTTS * origin.node.place.rtt_s(node.place))
        if node.alive:
            origin.meets(node_id)
            origin.worked_with.add(node_id)
            return True
    else:
        await trio.sleep(VANISHED_S if node_id in swarm.vanished else 0.1)
    origin.n_dials_in_vain += 1
    origin.dialler.dialled(node_id, trio.current_time(), succeeded=False)
    return False


async def assign(
    swarm: LargeSwarm, origin: Origin, model: Manifest, route: tuple[RouteStage, ...], told: dict[NodeId, int]
) -> set[NodeId]:
    """All stages at once: who does not accept; in `told`, what runs on those that do."""
    refused: set[NodeId] = set()
    following = {each.node_id: after.node_id for each, after in pairwise(route)}

    async def one(stage: RouteStage) -> None:
        if not await reach(swarm, origin, stage.node_id):
            refused.add(stage.node_id)
            return
        node = swarm.nodes.get(stage.node_id)
        if node is not None:
            await trio.sleep(origin.node.place.rtt_s(node.place))
            await swarm.meet(node, following.get(stage.node_id))
        if node is None or not node.alive or node.lacks or not holds(node, stage):
            refused.add(stage.node_id)
        else:
            told[stage.node_id] = node.n_active

    async with trio.open_nursery() as nursery:
        for stage in route:
            nursery.start_soon(one, stage)
    return refused


def holds(node: Node, stage: RouteStage) -> bool:
    return any(each.start <= stage.layers.start and stage.layers.end <= each.end for each in node.held)


async def lighter(
    swarm: LargeSwarm,
    origin: Origin,
    model: Manifest,
    size: tuple[int, int],
    route: tuple[RouteStage, ...],
    avoid: set[NodeId],
    told: dict[NodeId, int],
) -> tuple[RouteStage, ...]:
    """The route, or one that takes clearly less time by what stages tell (see `request_routes.lighter`)."""
    for _ in range(CHANGES_MAX):
        question = swarm.known(origin, model, size, told)
        try:
            other = stages_of(choose(question, avoid, origin, may_risk=False))
        except NoPipeline:
            return route
        known = question.inputs
        if any(stage.node_id not in known.speeds for stage in route):
            return route
        if route_cost_s(route, known) <= GAIN * route_cost_s(other, known):
            return route
        swarm.figures.n_reassigned += 1
        refused = await assign(swarm, origin, model, other, told)
        avoid |= refused
        if not refused:
            route = other
    return route


async def walk(
    swarm: LargeSwarm,
    origin: Origin,
    model: Manifest,
    size: tuple[int, int],
    route: tuple[RouteStage, ...],
    left: float,
) -> float:
    """Takes as long as the route really takes; the part of the request that is still to be done when a stage
    is lost on the way."""
    nodes = [swarm.nodes[stage.node_id] for stage in route if stage.node_id in swarm.nodes]
    if len(nodes) < len(route):
        return left
    _, truth = swarm.truth(origin.node, model, size, also=nodes)
    took_s = route_cost_s(route, truth) * left
    began_s = trio.current_time()
    busy(swarm, nodes, 1)
    try:
        while trio.current_time() < began_s + took_s:
            with trio.move_on_at(began_s + took_s):
                await swarm.died.wait()
            if not all(node.alive for node in nodes):
                return max(1e-3, left * (1 - (trio.current_time() - began_s) / took_s))
    finally:
        busy(swarm, nodes, -1)
    for node in nodes:
        seen_s = node.layer_s * swarm.rng.uniform(0.95, 1.1)
        node.observations.observe(id_of(model), "decode", seen_s, 1, 1)
        node.observations.observe(id_of(model), "prefill", seen_s / 8 * 64, 1, 64)
        swarm.dirty[node.node_id] = None
    return 0.0


def busy(swarm: LargeSwarm, nodes: list[Node], change: int) -> None:
    for node in nodes:
        node.n_active += change
        if node.alive:
            swarm.dirty[node.node_id] = None


async def warm(swarm: LargeSwarm, origin: Origin) -> None:
    """Connects with nodes of probable routes, as `pipeline.route.warming` does."""
    for model, *size in list(origin.asked.values()):
        question = swarm.known(origin, model, (size[0], size[1]), {})
        needed = dict[NodeId, None]()
        for _ in range(ROUTES):
            try:
                route = stages_of(assemble(replace(question, avoid=tuple(needed))))
            except NoPipeline:
                break
            found = sorted({stage.node_id for stage in route} - {origin.node.node_id})
            if not found:
                break
            needed |= dict.fromkeys(found)
        missing = [node_id for node_id in needed if node_id not in origin.connected]
        origin.worked_with |= {node_id for node_id in needed if node_id in origin.connected}
        async with trio.open_nursery() as nursery:
            for node_id in missing[:DIALS_MAX]:
                nursery.start_soon(reach, swarm, origin, node_id)


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
            origin.heard(swarm.book.node_ids(), trio.current_time())
        nursery.start_soon(regularly, SPEAK_S, swarm.speak)
        nursery.start_soon(regularly, 1 / HEARTBEATS_PER_S, swarm.beat)
        nursery.start_soon(regularly, SPEAK_S, swarm.tell_sustained_loads)
        nursery.start_soon(regularly, PLAN_EVERY_S, look)
        nursery.start_soon(regularly, EVERY_S, keep_warm)
        if is_brief:
            nursery.start_soon(regularly, LOOK_S, look_for_details)
        nursery.start_soon(every, ask_every_s / n_nodes, lambda: nursery.start_soon(ask, swarm, nursery))
        nursery.start_soon(every, change_every_s / n_nodes, swarm.change)
        await trio.sleep(settle_s)
        swarm.begin_counting()
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
        "envelopes asked for again, per s": round(swarm.n_fetched / duration_s, 2),
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
