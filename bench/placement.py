"""How long placing a model takes, and how good the pipelines are: `python -m bench.placement`.

256 nodes in three regions, with room for 4 to 90 of 80 layers. Timed: a swarm in which nobody holds anything,
and the same one settled, after one node has left. The rival is first-fit, as in Language Pipes: nodes in the
order they came take the next layers that fit, and a new pipeline is begun when one is complete.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace

from bench.common.figures import Figure, ratios, table, write
from swarmllm.scheduling.coordinates import Coordinate
from swarmllm.scheduling.placement import ModelShape, Placement, PlacementNode, place

N_NODES = 256
SHAPE = ModelShape(80, 1, 100_000_000, 500_000_000, 500_000_000)
SEEDS = range(4)
N_ROUNDS = 3
COMMAND = "python -m bench.placement"


def make_nodes(seed: int) -> list[PlacementNode]:
    rng = random.Random(seed)
    regions = [Coordinate((x, y, 0.0), 0.002, 0.1) for x, y in ((0.0, 0.0), (0.09, 0.0), (0.03, 0.15))]
    return [
        PlacementNode(
            f"node{i:03}",
            rng.choice([4, 8, 16, 24, 40, 90]) * SHAPE.layer_bytes,
            rng.choice([0.0003, 0.001, 0.004]),
            place=rng.choice(regions),
        )
        for i in range(N_NODES)
    ]


def acted(nodes: list[PlacementNode], plan: Placement) -> list[PlacementNode]:
    after = []
    for node in nodes:
        target = plan.targets[node.node_id]
        used = sum(map(SHAPE.n_bytes, node.held)) - sum(map(SHAPE.n_bytes, target))
        after.append(replace(node, held=target, free_bytes=node.free_bytes + used))
    return after


def first_fit(nodes: list[PlacementNode]) -> list[int]:
    """Stages of each complete pipeline."""
    pipelines, at, n_stages = [], 0, 0
    for node in nodes:
        room = node.free_bytes // SHAPE.layer_bytes - (5 if at == 0 else 0)
        if room < 1:
            continue
        room -= 5 if at + room >= SHAPE.n_layers else 0
        at, n_stages = min(SHAPE.n_layers, at + max(1, room)), n_stages + 1
        if at == SHAPE.n_layers:
            pipelines.append(n_stages)
            at, n_stages = 0, 0
    return pipelines


def score(stages: list[int]) -> float:
    """Parallax's: k^2 / s."""
    return len(stages) ** 2 / sum(stages) if stages else 0.0


def main() -> int:
    fresh, left = Figure("place 256 nodes, nothing held", "ms"), Figure("after one node left", "ms")
    ours, rival = Figure("k^2/s, ours", ""), Figure("k^2/s, first fit", "")
    pipes, rival_pipes = Figure("pipelines, ours", ""), Figure("pipelines, first fit", "")
    for seed in SEEDS:
        nodes = make_nodes(seed)
        for _ in range(N_ROUNDS):
            began_s = time.perf_counter()
            plan = place(SHAPE, nodes)
            fresh.values.append((time.perf_counter() - began_s) * 1000)
        settled = acted(nodes, plan)
        settled = acted(settled, place(SHAPE, settled))
        for i in range(N_ROUNDS):
            remaining = [node for n, node in enumerate(settled) if n != 17 * i]
            began_s = time.perf_counter()
            place(SHAPE, remaining)
            left.values.append((time.perf_counter() - began_s) * 1000)
        stages = [len(pipeline) for pipeline in plan.pipelines]
        others = first_fit(nodes)
        ours.values.append(score(stages))
        rival.values.append(score(others))
        pipes.values.append(len(stages))
        rival_pipes.values.append(len(others))
    rows = [
        (fresh, None),
        (left, None),
        (ours, ratios(ours, rival)),
        (rival, None),
        (pipes, ratios(pipes, rival_pipes)),
        (rival_pipes, None),
    ]
    text = table(rows)
    print(text)
    print(write("placement", COMMAND, [(figure, None) for figure, _ in rows], text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
