"""How long choosing a route takes: `python -m bench.scheduling`.

1,000 nodes of which each holds four of 80 layers (50 per range), in three regions, mixed hardware; every
cost is from `swarmllm.scheduling.cost`. Rivals in the same run, taking turns: greedy, which is quick and
wrong, and the same exact search in plain Python, one ring per first node. What is timed includes building
the cost arrays from what a node knows.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from bench.common.figures import Figure, ratios, table, write
from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.cheapest import cheapest_route, route_cost_s
from swarmllm.scheduling.coordinates import Coordinate
from swarmllm.scheduling.cost import NodeSpeed, RouteInputs, Workload
from swarmllm.scheduling.route import RouteStage

N_NODES = 1000
N_LAYERS = 80
N_HELD = 4
N_ROUNDS = 5
SEEDS = range(4)
Holders = dict[str, list[LayerRange]]
Swarm = tuple[Holders, RouteInputs]
Route = tuple[RouteStage, ...]
Found = TypeVar("Found")
COMMAND = "python -m bench.scheduling"


def make_swarm(seed: int) -> Swarm:
    rng = random.Random(seed)
    names = [f"node{i:04}" for i in range(N_NODES)]
    n_ranges = N_LAYERS // N_HELD
    held = {
        name: [LayerRange(N_HELD * (i % n_ranges), N_HELD * (i % n_ranges) + N_HELD)]
        for i, name in enumerate(names)
    }
    speeds = {}
    for name in names:
        decode_s = rng.choice([0.0003, 0.001, 0.004]) * rng.uniform(0.8, 1.2)
        speeds[name] = NodeSpeed(decode_s, decode_s / 10, rng.choice([0, 0, 1, 2]))
    region = {name: rng.choice([0.004, 0.04, 0.16]) for name in names[1:]}
    rtt_s = {name: far_s * rng.uniform(0.8, 1.2) for name, far_s in region.items()}
    pairs = {
        (a, b): 0.004 * rng.uniform(0.8, 1.2)
        for a in names[1:]
        for b in rng.sample(names[1:], 8)
        if a != b and region[a] == region[b]
    }
    places = {
        name: Coordinate((region[name], rng.uniform(0, 0.004), 0.0), 0.001, 0.2)
        for name in names[1:]
        if rng.random() < 0.9
    }
    return held, RouteInputs(names[0], Workload(512, 256, 16384), speeds, rtt_s, pairs, places)


def exact(held: Holders, known: RouteInputs) -> Route:
    route = cheapest_route(N_LAYERS, 1, held, known)
    assert route is not None
    return route


def crowded(swarm: Swarm) -> Swarm:
    """The same swarm, of which a tenth of the nodes has no room."""
    held, known = swarm
    full = set(random.Random(0).sample(sorted(held), N_NODES // 10))
    speeds = {
        name: replace(speed, lacks="no free slot") if name in full else speed
        for name, speed in known.speeds.items()
    }
    return held, replace(known, speeds=speeds)


def greedy(held: Holders, known: RouteInputs) -> Route:
    """At each boundary the node that is best now."""
    starting: dict[int, list[str]] = {}
    for name, (layers,) in held.items():
        starting.setdefault(layers.start, []).append(name)
    route: list[RouteStage] = []
    for start in range(0, N_LAYERS, N_HELD):

        def cost_s(name: str) -> float:
            hop_s = known.hop_s(route[-1].node_id, name) if route else known.entry_s(name)
            return hop_s + N_HELD * known.layer_s(name)

        route.append(RouteStage(min(starting[start], key=cost_s), LayerRange(start, start + N_HELD)))
    return tuple(route)


def plain(held: Holders, known: RouteInputs) -> float:
    """The exact search without numpy and without bounds: the least cost."""
    starting: dict[int, list[str]] = {}
    for name, (layers,) in held.items():
        starting.setdefault(layers.start, []).append(name)
    compute = {name: N_HELD * known.layer_s(name) for name in held}
    columns = [starting[start] for start in range(0, N_LAYERS, N_HELD)]
    hops = [
        {(a, b): known.hop_s(a, b) for a in here for b in after}
        for here, after in itertools.pairwise(columns)
    ]
    best_s = float("inf")
    for first in columns[0]:
        costs = {first: known.entry_s(first) + compute[first]}
        for hop, after in zip(hops, columns[1:], strict=True):
            costs = {b: min(cost + hop[a, b] for a, cost in costs.items()) + compute[b] for b in after}
        best_s = min(
            best_s,
            min(cost + known.closing_s(a, first) + known.exit_s(a) for a, cost in costs.items()),
        )
    return best_s


def timed_ms(work: Callable[[Holders, RouteInputs], Found], swarm: Swarm, figure: Figure) -> Found:
    began_s = time.perf_counter()
    result = work(*swarm)
    figure.values.append((time.perf_counter() - began_s) * 1000)
    return result


def main() -> int:
    ours, rival, slow = (
        Figure("exact, numpy", "ms"),
        Figure("greedy", "ms"),
        Figure("exact, plain Python", "ms"),
    )
    among_full = Figure("exact, a tenth of the nodes full", "ms")
    ours_cost, greedy_cost = Figure("cost, exact", "s"), Figure("cost, greedy", "s")
    for seed in SEEDS:
        swarm = make_swarm(seed)
        known, crowd = swarm[1], crowded(swarm)
        for n_round in range(N_ROUNDS):
            route = timed_ms(exact, swarm, ours)
            other = timed_ms(greedy, swarm, rival)
            with_room = timed_ms(exact, crowd, among_full)
            assert not any(crowd[1].speeds[stage.node_id].is_full for stage in with_room)
            if n_round == 0:
                exact_s = timed_ms(plain, swarm, slow)
                assert abs(route_cost_s(route, known) - exact_s) < 1e-6, "the two exact searches disagree"
                ours_cost.values.append(route_cost_s(route, known))
                greedy_cost.values.append(route_cost_s(other, known))
    first_rounds = Figure("exact, numpy, first of each swarm", "ms", ours.values[::N_ROUNDS])
    text = table(
        [
            (ours, ratios(ours, rival)),
            (rival, None),
            (among_full, ratios(among_full, ours)),
            (first_rounds, ratios(first_rounds, slow)),
            (slow, None),
            (ours_cost, ratios(ours_cost, greedy_cost)),
            (greedy_cost, None),
        ]
    )
    rows = [
        (figure, None) for figure in (ours, rival, among_full, first_rounds, slow, ours_cost, greedy_cost)
    ]
    print(text)
    print(write("scheduling", COMMAND, rows, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
