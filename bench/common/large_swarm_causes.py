"""What of the things that an origin does not know makes its plans dear, in `large_swarm`.

For each request the route is chosen again, as if the origin knew one more thing. What it really takes, over
what the oracle's route takes, is noted beside that of the real plan. Nothing is changed by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import trio

from bench.common.large_swarm_nodes import Origin, id_of
from swarmllm.models import LayerRange, Manifest
from swarmllm.pipeline.route.assembly import Assembly, RouteQuery, assemble
from swarmllm.scheduling.cheapest import route_cost_s
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.route import RouteStage
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.record_parts import RecordDetails, decode_details

if TYPE_CHECKING:
    from bench.common.large_swarm import LargeSwarm

CAUSES: Final = ("loads", "details", "speeds", "distances", "all of these", "untried nodes")
"""The last one: nodes that were never connected are taken like others."""
LOADS: Final = ("n_active", "lacks")
SPEEDS: Final = ("decode_s", "prefill_s")
Choose = Callable[[RouteQuery], Assembly]


@dataclass(frozen=True)
class Taken:
    """The route that a request took."""

    route: tuple[RouteStage, ...]
    told: Mapping[NodeId, int]
    """What ran on the stages that were asked, as they said."""
    best_s: float
    """Of the oracle's route."""
    is_first: bool
    """Of its origin, for this model."""


@dataclass(frozen=True)
class PlanRatios:
    """Of one request, over what the oracle's route takes."""

    at_s: float
    is_first: bool
    plan: float
    known: Mapping[str, float]
    """By what else the origin knew."""


def with_truth(known: RouteInputs, truth: RouteInputs, *fields: str) -> RouteInputs:
    """With these fields of each node's speed as they really are."""
    speeds = {
        node_id: replace(speed, **{name: getattr(truth.speeds[node_id], name) for name in fields})
        if node_id in truth.speeds
        else speed
        for node_id, speed in known.speeds.items()
    }
    return replace(known, speeds=speeds)


def with_distances(known: RouteInputs, truth: RouteInputs) -> RouteInputs:
    places = {**known.coordinates, **truth.coordinates}
    return replace(known, origin_rtt_s={}, pair_rtt_s={}, coordinates=places)


def plan_ratios(
    swarm: LargeSwarm,
    origin: Origin,
    model: Manifest,
    size: tuple[int, int],
    taken: Taken,
    choose: Choose,
    truth: RouteInputs,
) -> PlanRatios:
    """Raises NoPipeline."""

    def ratio(question: RouteQuery, choose: Choose = choose) -> float:
        stages = choose(question).stages
        route = tuple(RouteStage(each.node_id, LayerRange(each.start, each.end)) for each in stages)
        if any(stage.node_id not in truth.speeds for stage in route):
            return float("nan")
        return route_cost_s(route, truth) / taken.best_s

    question = swarm.known(origin, model, size, taken.told)
    known = question.inputs
    with_all = with_distances(with_truth(known, truth, *LOADS, *SPEEDS), truth)
    said = origin.said
    origin.said = _all_details(swarm, model)
    try:
        detailed = swarm.known(origin, model, size, taken.told)
    finally:
        origin.said = said
    return PlanRatios(
        trio.current_time(),
        taken.is_first,
        route_cost_s(taken.route, truth) / taken.best_s,
        dict(
            zip(
                CAUSES,
                (
                    ratio(replace(question, inputs=with_truth(known, truth, *LOADS))),
                    ratio(detailed),
                    ratio(replace(question, inputs=with_truth(known, truth, *SPEEDS))),
                    ratio(replace(question, inputs=with_distances(known, truth))),
                    ratio(replace(question, inputs=with_all)),
                    ratio(question, assemble),
                ),
                strict=True,
            )
        ),
    )


def _all_details(swarm: LargeSwarm, model: Manifest) -> dict[NodeId, RecordDetails]:
    return {
        node_id: decode_details(node.details.details)
        for node_id, node in swarm.holders[id_of(model)].items()
        if node.details is not None
    }


def table(found: Sequence[PlanRatios], each_s: float) -> str:
    """The ratios at p95, by the time of the request."""
    lines = [f"| seconds | requests | the plan | {' | '.join(CAUSES)} |", "|---" * (len(CAUSES) + 3) + "|"]
    begin_s = min((each.at_s for each in found), default=0.0)
    groups: dict[int, list[PlanRatios]] = {}
    for each in found:
        groups.setdefault(int((each.at_s - begin_s) / each_s), []).append(each)
    named = [(f"{n * each_s:.0f} to {(n + 1) * each_s:.0f}", group) for n, group in sorted(groups.items())]
    named.append(("first requests", [each for each in found if each.is_first]))
    named.append(("later ones", [each for each in found if not each.is_first]))
    for name, group in [*named, ("all", list(found))]:
        cells = [_p95([each.plan for each in group])]
        cells += [_p95([each.known[cause] for each in group]) for cause in CAUSES]
        lines.append(f"| {name} | {len(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _p95(values: list[float]) -> str:
    found = sorted(value for value in values if not math.isnan(value))
    return f"{found[min(len(found) - 1, int(0.95 * len(found)))]:.3f}" if found else ""
