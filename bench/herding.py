"""Origins that choose in the same second, from the same records: how unevenly do they load like nodes?

    python -m bench.herding [--seeds 20]

Only the choice is played: every node's record is as old as the second, requests stay where they are sent. A
model of 24 layers is held in halves by 16 nodes, eight for each half, whose speeds differ by up to some
percent. 64 requests of 32 origins come within the second. The rival is the choice by the records alone; ideal
would be 8 requests on every node.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from random import Random

from bench.common.figures import RESULTS, Figure, machine, ratios, table
from bench.common.simulated_swarm import make_manifest
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.route.inputs import SPREAD, NetworkDistances, OwnLoad, route_inputs, workload
from swarmllm.scheduling.cheapest import cheapest_route
from swarmllm.scheduling.speeds import Observations
from swarmllm_proto.swarm import NodeCapability, ObservedLatency

N_LAYERS, N_PER_HALF, N_ORIGINS, N_REQUESTS = 24, 8, 32, 64
WAYS = ("the records alone", "and what it sent itself", "and another lean per origin", "both")


def second(spread: float, way: str, seed: int) -> Counter[str]:
    """Requests by node, after one second of choices."""
    random = Random(seed)
    manifest = make_manifest(N_LAYERS)
    halves = LayerRange(0, N_LAYERS // 2), LayerRange(N_LAYERS // 2, N_LAYERS)
    holders = {f"n{seed}-{i}": [halves[i % 2]] for i in range(2 * N_PER_HALF)}
    said = {
        node_id: NodeCapability(
            observed_latencies=(
                ObservedLatency(
                    model_id=manifest.model_id,
                    decode_s=0.001 * random.uniform(1, 1 + spread),
                    prefill_s=0.0001,
                ),
            )
        )
        for node_id in holders
    }
    distances = NetworkDistances(dict.fromkeys(holders, 0.002))
    taken: Counter[str] = Counter()
    own: dict[str, Counter[str]] = {f"o{seed}-{i}": Counter() for i in range(N_ORIGINS)}
    for _ in range(N_REQUESTS):
        origin = random.choice(list(own))
        known = route_inputs(
            origin,
            manifest,
            workload(manifest, 128, 128),
            [*holders, origin],
            said,
            distances,
            Observations(),
            OwnLoad(sent=own[origin] if way in WAYS[1::2] else {}),
        )
        if way in WAYS[:2]:
            known.leans.clear()  # type: ignore[attr-defined]
        route = cheapest_route(N_LAYERS, 1, holders, known)
        assert route is not None
        used = Counter(stage.node_id for stage in route)
        taken += used
        own[origin] += used
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    rows, figures = [], []
    for spread in (0.0, 0.03, 0.1):
        busiest = {
            way: Figure(
                f"{spread:.0%} apart, {way}",
                "requests",
                [max(second(spread, way, seed).values()) for seed in range(arguments.seeds)],
            )
            for way in WAYS
        }
        rival = busiest[WAYS[0]]
        rows += [(figure, None if figure is rival else ratios(figure, rival)) for figure in busiest.values()]
        figures += [figure.as_json() for figure in busiest.values()]
    text = table(rows)
    print(f"requests on the busiest node (ideal: {N_REQUESTS // N_PER_HALF}; spread {SPREAD:.0%})\n{text}")
    data = {"machine": machine(), "command": "python -m bench.herding", "figures": figures}
    (RESULTS / "herding.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / "herding.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
