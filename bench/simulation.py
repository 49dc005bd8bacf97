"""A thousand nodes under churn, simulated: `python -m bench.simulation [--nodes 1000] [--picture FILE]`.

Discrete events on the in-memory router and trio's mock clock (see `simulated_swarm` for what is real and what
is made up). The swarm shares a 70B-sized model out by itself; then requests arrive and nodes join, leave, are
killed, become slow without saying so, and three in a hundred are cut off for a minute. Each request is
compared with the offline optimum: the best route that an oracle would have chosen at the moment it was asked,
who knows real speeds, real load, and who is alive. The picture needs matplotlib: `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trio
from trio.testing import MockClock

from bench.common.figures import RESULTS, machine, refuse_without_matplotlib
from bench.common.simulated_network import SimulatedNetwork
from bench.common.simulated_swarm import N_SLOTS, SPEAK_S, TICK_S, Figures, SimulatedNode, World, busy
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.route.request_routes import CHANGES_MAX, GAIN
from swarmllm.scheduling.cheapest import cheapest_route, route_cost_s
from swarmllm.scheduling.route import RouteStage

N_LAYERS = 80
SETTLE_S = 240.0
CHANGE_EVERY_S = 4.0
ASK_EVERY_S = 0.5
DEADLINE_S = 120.0
CUT_OFF_S = 60.0
SLOWER = 4.0
CHANGES = ("join", "join", "leave", "kill", "slow")
COMMAND = "python -m bench.simulation"


async def ask(world: World) -> None:
    """One request from a random node, to its end."""
    figures, rng = world.figures, world.rng
    origin = world.nodes[rng.choice(sorted(world.nodes))]
    n_prompt, n_output = rng.choice([64, 256, 1024]), rng.choice([32, 128, 256])
    held, truth = world.true(origin, n_prompt, n_output)
    best = cheapest_route(world.manifest.n_layers, 1, held, truth)
    began_s, left, avoid = trio.current_time(), 1.0, set[str]()
    while left > 0:
        if not origin.alive:
            return  # Whoever asked is gone, and its client with it.
        if trio.current_time() > began_s + DEADLINE_S:
            figures.n_asked += 1
            figures.n_unserved += 1
            return
        held, known = world.believed(origin, n_prompt, n_output)
        usable = {node_id: ranges for node_id, ranges in held.items() if node_id not in avoid}
        route = cheapest_route(world.manifest.n_layers, 1, usable, known)
        if route is None:
            avoid.clear()
            await trio.sleep(TICK_S / 5)
            continue
        told, refused = await assign(origin, route)
        if refused:
            avoid |= refused
            continue
        route = await lighter(world, origin, route, avoid, (n_prompt, n_output), told)
        nodes = [world.nodes[stage.node_id] for stage in route if stage.node_id in world.nodes]
        if len(nodes) < len(route):
            continue
        left = await walk(world, origin, route, nodes, (n_prompt, n_output), left)
        figures.n_rerouted += left > 0
    figures.n_asked += 1
    took_s = trio.current_time() - began_s
    figures.costs_s.append(took_s)
    figures.served_at_s.append(trio.current_time())
    if best is not None:
        figures.ratios.append(took_s / route_cost_s(best, truth))


async def lighter(
    world: World,
    origin: SimulatedNode,
    route: tuple[RouteStage, ...],
    avoid: set[str],
    size: tuple[int, int],
    told: dict[str, int],
) -> tuple[RouteStage, ...]:
    """The route, or one that takes clearly less time by what stages tell (see `request_routes.lighter`)."""
    for _ in range(CHANGES_MAX):
        held, known = world.believed(origin, *size, told)
        usable = {node_id: ranges for node_id, ranges in held.items() if node_id not in avoid}
        other = cheapest_route(world.manifest.n_layers, 1, usable, known)
        if any(stage.node_id not in known.speeds for stage in route) or other is None:
            return route
        if route_cost_s(route, known) <= GAIN * route_cost_s(other, known):
            return route
        world.figures.n_reassigned += 1
        more, refused = await assign(origin, other)
        told |= more
        avoid |= refused
        if not refused:
            route = other
    return route


async def assign(origin: SimulatedNode, route: tuple[RouteStage, ...]) -> tuple[dict[str, int], set[str]]:
    """All stages at once, over the network: what runs on those that accept, and who does not."""
    told: dict[str, int] = {}
    refused: set[str] = set()

    async def one(node_id: str) -> None:
        try:
            said = await origin.router.request(node_id, b"assignment")
            if said.startswith(b"yes"):
                told[node_id] = int(said[3:])
            else:
                refused.add(node_id)
        except SwarmLLMError:
            refused.add(node_id)

    async with trio.open_nursery() as nursery:
        for stage in route:
            if stage.node_id != origin.node_id:
                nursery.start_soon(one, stage.node_id)
    return told, refused


async def walk(
    world: World,
    origin: SimulatedNode,
    route: tuple[RouteStage, ...],
    nodes: list[SimulatedNode],
    size: tuple[int, int],
    left: float,
) -> float:
    """Takes as long as the route really takes; the part of the request that is still to be done when a stage
    is lost on the way."""
    _, truth = world.true(origin, *size)
    if any(node.node_id not in truth.speeds for node in nodes):
        return left
    took_s = route_cost_s(route, truth) * left
    began_s = trio.current_time()
    with busy(nodes):
        while trio.current_time() < began_s + took_s:
            with trio.move_on_at(began_s + took_s):
                await world.changed.wait()
            if not is_whole(origin, nodes):
                return max(1e-3, left * (1 - (trio.current_time() - began_s) / took_s))
    for node in nodes:
        seen_s = node.layer_s * world.rng.uniform(0.95, 1.1)
        node.observations.observe(world.model_id, "decode", seen_s, 1, 1)
        node.observations.observe(world.model_id, "prefill", seen_s / 8 * 64, 1, 64)
    return 0.0


def is_whole(origin: SimulatedNode, nodes: list[SimulatedNode]) -> bool:
    """Neighbours in the ring, and the origin, still reach each other."""
    ring = [origin, *nodes, nodes[0]]
    return all(node.alive for node in ring) and all(
        a is b or b.node_id in a.router.connected() for a, b in itertools.pairwise(ring)
    )


def change(world: World) -> None:
    """Something happens to a random node."""
    kind = world.rng.choice(CHANGES)
    figures = world.figures
    figures.counts[kind] = figures.counts.get(kind, 0) + 1
    if kind == "join":
        world.born()
        return
    node = world.nodes[world.rng.choice(sorted(world.nodes))]
    if kind == "slow":
        node.layer_s *= SLOWER
    else:
        # A node that leaves says goodbye, one that is killed does not: to its peers both are a closed link.
        figures.n_lost_layers += sum(map(len, node.held))
        world.dies(node)


async def cut_off(world: World, n_nodes: int) -> None:
    """Some nodes see only each other for a while."""
    lost = world.rng.sample(sorted(world.nodes), n_nodes)
    others = [node_id for node_id in world.nodes if node_id not in set(lost)]
    for a in lost:
        for b in others:
            world.network.cut(a, b)
    world.figures.counts["cut off"] = n_nodes
    world.alarm()
    await trio.sleep(CUT_OFF_S)
    world.network.reunite([node_id for node_id in lost if node_id in world.nodes])
    world.figures.events.append((trio.current_time(), "reunited"))


async def simulate(
    n_nodes: int,
    duration_s: float,
    seed: int = 1,
    n_layers: int = N_LAYERS,
    ask_every_s: float = ASK_EVERY_S,
    change_every_s: float = CHANGE_EVERY_S,
) -> World:
    """Under the mock clock. Returns with the figures."""
    async with SimulatedNetwork() as network, trio.open_nursery() as nursery:
        world = World(network, seed, n_layers)
        for _ in range(n_nodes):
            world.born()

        async def every(mean_s: float, act: Callable[[], None]) -> None:
            while True:
                await trio.sleep(world.rng.expovariate(1 / mean_s))
                act()

        async def look() -> None:
            while True:
                await world.look()
                if trio.current_time() % 60 < TICK_S:
                    n_asked = world.figures.n_asked
                    print(f"second {trio.current_time():.0f}: {n_asked} requests", file=sys.stderr)
                await trio.sleep(TICK_S)

        async def speak() -> None:
            while True:
                await trio.sleep(SPEAK_S)
                await world.speak()

        nursery.start_soon(look)
        nursery.start_soon(speak)
        await trio.sleep(SETTLE_S)
        world.settled = True
        before = (world.figures.n_record_bytes, trio.current_time())
        nursery.start_soon(every, ask_every_s, lambda: nursery.start_soon(ask, world))
        nursery.start_soon(every, change_every_s, lambda: change(world))
        await trio.sleep(duration_s / 2)
        world.figures.events.append((trio.current_time(), "cut off"))
        nursery.start_soon(cut_off, world, max(1, 3 * n_nodes // 100))
        await trio.sleep(duration_s / 2)
        world.figures.n_record_bytes -= before[0]
        nursery.cancel_scope.cancel()
    return world


def summary(figures: Figures, duration_s: float) -> dict[str, object]:
    def quantile(values: list[float], part: float) -> float:
        return sorted(values)[min(len(values) - 1, int(part * len(values)))]

    n_changes = sum(figures.counts.values())
    return {
        "requests served": f"{figures.n_asked - figures.n_unserved} of {figures.n_asked}",
        "of them re-routed on the way": figures.n_rerouted,
        "routes left for lighter ones": figures.n_reassigned,
        "duration p50 / p95 (s)": [round(quantile(figures.costs_s, part), 2) for part in (0.5, 0.95)],
        "against the oracle's route p50 / p95": [
            round(quantile(figures.ratios, part), 3) for part in (0.5, 0.95)
        ],
        "changes": figures.counts,
        "layers lost with nodes": figures.n_lost_layers,
        "layers loaded by others": figures.n_moved_layers,
        "layers loaded by newcomers": figures.n_newcomer_layers,
        "layers moved per change": round(figures.n_moved_layers / max(1, n_changes), 1),
        "gossip of records per node (bytes/s)": round(figures.n_record_bytes / duration_s),
        "complete pipelines, median": statistics.median(sample[2] for sample in figures.samples[-20:]),
    }


def draw(world: World, file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figures = world.figures
    times = [sample[0] for sample in figures.samples]
    drawing, axes = plt.subplots(4, 1, figsize=(9, 9), sharex=True, layout="constrained")
    axes[0].plot(times, [sample[1] for sample in figures.samples], color="#335c81")
    axes[0].set_ylabel("nodes alive")
    axes[1].plot(times, [sample[2] for sample in figures.samples], color="#335c81")
    axes[1].set_ylabel("complete pipelines")
    axes[2].plot(times, [sample[3] for sample in figures.samples], color="#335c81")
    axes[2].set_ylabel("layers loaded, in all")
    axes[3].plot(figures.served_at_s, figures.ratios, ".", markersize=3, color="#b23a48")
    axes[3].set_yscale("log")
    axes[3].set_ylabel("duration / oracle's route")
    axes[3].set_xlabel("seconds")
    for axis in axes:
        axis.grid(alpha=0.25)
        for at_s, _ in figures.events:
            axis.axvline(at_s, color="#888888", linestyle=":", linewidth=1)
    drawing.suptitle(
        f"{len(world.nodes)} simulated nodes: settling, then churn; dotted: 3 % cut off, reunited"
    )
    drawing.savefig(file, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    refuse_without_matplotlib(parser, options.picture)
    began_s = time.perf_counter()
    duration_s = options.minutes * 60
    world = trio.run(simulate, options.nodes, duration_s, options.seed, clock=MockClock(autojump_threshold=0))
    found = {"nodes": options.nodes, "minutes": options.minutes, "slots per node": N_SLOTS}
    found |= summary(world.figures, duration_s)
    text = "\n".join(
        ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in found.items())]
    )
    print(text)
    print(f"simulated in {time.perf_counter() - began_s:.0f} s")
    RESULTS.mkdir(exist_ok=True)
    document = {
        "command": f"{COMMAND} --nodes {options.nodes} --minutes {options.minutes:g} --seed {options.seed}",
        "machine": machine(),
    }
    (RESULTS / "simulation.json").write_text(json.dumps(document | {"figures": found}, indent=2) + "\n")
    (RESULTS / "simulation.md").write_text(text + "\n")
    if options.picture:
        draw(world, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
