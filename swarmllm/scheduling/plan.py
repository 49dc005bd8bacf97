"""Why a route was chosen: its cost taken apart, and what the alternatives would have cost.

The search keeps no record of what it rejected; the reasons are worked out afterwards (see `alternatives`), by
asking for the cost of each. A plan is for people, so that is cheap enough, and it cannot disagree with the
search, because both count with `cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmllm.models.layers import LayerRange, merge
from swarmllm.scheduling.alternatives import (
    Alternative,
    OtherCuts,
    best_with_others,
    is_at_home,
    same_cuts,
)
from swarmllm.scheduling.cheapest import cheapest_route, route_cost_s
from swarmllm.scheduling.constraints import Refusal
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.pieces import runnable
from swarmllm.scheduling.route import RouteStage, choose_route
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc_base import RowFormat


@dataclass(frozen=True, slots=True)
class PlannedStage:
    node_id: NodeId
    layers: LayerRange
    compute_s: float
    """For the whole request: prompt and answer."""
    network_s: float
    """For the whole request: from this stage to the next, after the last one back to the first."""
    is_measured: bool
    lacks: str
    """Why the node may refuse it: nobody else has room for these layers."""
    alternatives: tuple[Alternative, ...]
    """Those with the stage's cuts first, best first. The first of these that is not full is the standby."""

    @property
    def standby(self) -> NodeId | None:
        return next(
            (
                other.node_id
                for other in self.alternatives
                if not other.is_full and other.layers == self.layers
            ),
            None,
        )


@dataclass(frozen=True, slots=True)
class Rival:
    """A whole route that was not taken, or was: `cost_s` None where there is none."""

    name: str
    stages: tuple[RouteStage, ...]
    cost_s: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    stages: tuple[PlannedStage, ...]
    cost_s: float
    ends_s: float
    """Of the cost: to the first stage and from the last, where those are not at home."""
    rivals: tuple[Rival, ...]
    refused: tuple[Refusal, ...] = ()
    """What would have been there but may not be used."""
    row_formats: tuple[RowFormat, ...] = ()
    """How rows come to each stage; empty: all as f32."""

    @property
    def is_exact(self) -> bool:
        """Nothing is rounded on the way: the text is that of the uncut model."""
        return "q8_0" not in self.row_formats


def make_plan(
    n_layers: int,
    cut_alignment: int,
    holders: Mapping[NodeId, Sequence[LayerRange]],
    circumstances: RouteInputs,
    refused: tuple[Refusal, ...] = (),
) -> Plan | None:
    """The route a request would take and its reasons; None where there is none."""
    route = cheapest_route(n_layers, cut_alignment, holders, circumstances)
    if route is None:
        return None
    allowed = {node_id: runnable(ranges, n_layers, cut_alignment) for node_id, ranges in holders.items()}
    cost_s, speeds = route_cost_s(route, circumstances), circumstances.speeds
    others = OtherCuts(n_layers, cut_alignment, allowed, circumstances)
    stages = tuple(
        PlannedStage(
            node_id=stage.node_id,
            layers=stage.layers,
            compute_s=circumstances.layer_s(stage.node_id) * len(stage.layers),
            network_s=_network_s(route, index, circumstances),
            is_measured=speeds[stage.node_id].is_measured,
            lacks=speeds[stage.node_id].lacks,
            alternatives=(
                *same_cuts(route, index, allowed, circumstances),
                *others.of(stage, cost_s),
            ),
        )
        for index, stage in enumerate(route)
    )
    home = {circumstances.origin: allowed.get(circumstances.origin, ())}
    rivals = [
        _rival(
            "all at home", choose_route(n_layers, cut_alignment, home, circumstances.origin), circumstances
        ),
        _rival(
            "fewest stages",
            choose_route(n_layers, cut_alignment, allowed, circumstances.origin),
            circumstances,
        ),
    ]
    if is_at_home(route, circumstances):
        others_free = {node_id: allowed[node_id] for node_id in allowed if not speeds[node_id].is_full}
        if any(others_free[node_id] for node_id in others_free.keys() - home):
            away = best_with_others(n_layers, cut_alignment, home | others_free, circumstances)
            rivals.append(_rival("with other nodes", away, circumstances))
    ends_s = circumstances.entry_s(route[0].node_id) + circumstances.exit_s(route[-1].node_id)
    used = {stage.node_id for stage in route}
    without_room = tuple(
        Refusal(node_id, layers, speeds[node_id].lacks)
        for node_id, ranges in allowed.items()
        if speeds[node_id].is_full and node_id not in used
        for layers in ranges
    )
    return Plan(stages, cost_s, ends_s, tuple(rivals), (*refused, *without_room))


def standbys_of(
    route: Sequence[RouteStage], holders: Mapping[NodeId, Iterable[LayerRange]], circumstances: RouteInputs
) -> tuple[NodeId | None, ...]:
    """For each stage the other holder with which the request would be least slower; None: there is none that
    has room."""
    held = [
        (layers.start, layers.end, node_id, layers)
        for node_id, ranges in holders.items()
        for layers in merge(ranges)
    ]
    found = []
    for index, stage in enumerate(route):
        first, last = stage.layers.start, stage.layers.end
        able = {node_id: (layers,) for start, end, node_id, layers in held if start <= first and last <= end}
        others = same_cuts(route, index, able, circumstances)
        found.append(next((other.node_id for other in others if not other.is_full), None))
    return tuple(found)


def _network_s(route: Sequence[RouteStage], index: int, circumstances: RouteInputs) -> float:
    here = route[index].node_id
    if index + 1 < len(route):
        return circumstances.hop_s(here, route[index + 1].node_id)
    return circumstances.closing_s(here, route[0].node_id)


def _rival(name: str, route: tuple[RouteStage, ...] | None, circumstances: RouteInputs) -> Rival:
    return Rival(name, route or (), route_cost_s(route, circumstances) if route else None)
