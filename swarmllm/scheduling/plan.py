"""Explains why a route was chosen: the parts of its cost, and the costs of the alternatives.

The search keeps no record of what it rejected. The alternatives are made afterwards, and the cost of each is
computed. A plan is for people, so that is cheap enough, and it cannot disagree with the search, because both
count with `cost`.

For an alternative, another holder of a stage's layers takes the place of the stage in the route. A node that
holds only some of those layers cannot; its alternative is the best route through one of its ranges, found by
the same search without the other holders of these layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmllm.models.layers import LayerRange, covers, merge, subtract
from swarmllm.scheduling.candidates import pieces_of, runnable
from swarmllm.scheduling.cheapest import cheapest_route, part_cost_s, route_cost_s
from swarmllm.scheduling.constraints import Refusal
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.route import RouteStage, choose_route
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc.base import RowFormat

MAX_ALTERNATIVES = 4
"""Per stage, with its cuts, and as many with others; the cheapest are shown."""
MAX_SEARCHES = 16
"""For one plan, in swarms that are cut in many ways: each takes as long as choosing a route."""

Holders = Mapping[NodeId, Sequence[LayerRange]]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another holder of a stage's layers."""

    node_id: NodeId
    layers: LayerRange
    """What it would run: the stage's, or where it holds only some of those, its range with them."""
    extra_s: float
    """What the request would take longer with it."""
    is_full: bool
    """It would refuse one more, or another node would that is needed with it."""


def same_cuts(
    route: Sequence[RouteStage],
    index: int,
    allowed: Mapping[NodeId, Iterable[LayerRange]],
    inputs: RouteInputs,
) -> tuple[Alternative, ...]:
    stage = route[index]
    cost_s = part_cost_s(route, index, stage.node_id, inputs)
    found = []
    for node_id, ranges in allowed.items():
        if node_id != stage.node_id and covers(ranges, stage.layers):
            extra_s = part_cost_s(route, index, node_id, inputs) - cost_s
            is_full = inputs.speeds[node_id].is_full
            found.append(Alternative(node_id, stage.layers, extra_s, is_full))
    return _best(found)


def _best(found: Iterable[Alternative]) -> tuple[Alternative, ...]:
    order = sorted(found, key=lambda other: (other.is_full, other.extra_s, other.node_id, other.layers))
    return tuple(order[:MAX_ALTERNATIVES])


class OtherCuts:
    """What routes would cost through ranges that have some layers of a stage, but not all."""

    def __init__(self, n_layers: int, cut_alignment: int, allowed: Holders, inputs: RouteInputs) -> None:
        self._n_layers = n_layers
        self._cut_alignment = cut_alignment
        self._allowed = allowed
        self._known = inputs
        self._n_searches = 0

    def of(self, stage: RouteStage, cost_s: float) -> tuple[Alternative, ...]:
        """Where there are more of them than may be searched for, the quickest nodes' are."""
        held = [
            (self._known.layer_s(node_id), node_id, layers)
            for node_id, ranges in self._allowed.items()
            if node_id != stage.node_id and not covers(ranges, stage.layers)
            for layers in ranges
            if layers.overlaps(stage.layers)
        ]
        found: list[Alternative] = []
        for _, node_id, layers in sorted(held):
            if self._n_searches == MAX_SEARCHES or len(found) == MAX_ALTERNATIVES:
                break
            self._n_searches += 1
            route = self._through(node_id, layers)
            if route is not None:
                is_full = any(self._known.speeds[each.node_id].is_full for each in route)
                found.append(Alternative(node_id, layers, route_cost_s(route, self._known) - cost_s, is_full))
        return _best(found)

    def _through(self, node_id: NodeId, layers: LayerRange) -> tuple[RouteStage, ...] | None:
        rest = {
            other: [*subtract(ranges, [layers]), *([layers] if other == node_id else [])]
            for other, ranges in self._allowed.items()
        }
        return cheapest_route(self._n_layers, self._cut_alignment, rest, self._known)


def best_with_others(
    n_layers: int, cut_alignment: int, allowed: Holders, inputs: RouteInputs
) -> tuple[RouteStage, ...] | None:
    """The cheapest route that is not all at home: one in which some piece of home is not used. Of many pieces
    the longest are tried."""
    home = inputs.origin
    held = {node: runnable(ranges, n_layers, cut_alignment) for node, ranges in allowed.items()}
    pieces = sorted(
        (LayerRange(piece.start, piece.end) for piece in pieces_of(held) if piece.node_id == home),
        key=lambda layers: (-len(layers), layers.start),
    )
    routes = [
        cheapest_route(n_layers, cut_alignment, {**allowed, home: subtract(allowed[home], [piece])}, inputs)
        for piece in pieces[:MAX_SEARCHES]
    ]
    return min(
        (route for route in routes if route is not None),
        key=lambda route: route_cost_s(route, inputs),
        default=None,
    )


def is_at_home(route: Sequence[RouteStage], inputs: RouteInputs) -> bool:
    return all(stage.node_id == inputs.origin for stage in route)


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
class ComparedRoute:
    """A whole route for comparison; it may be the chosen one. `cost_s` is None where there is no such
    route."""

    name: str
    stages: tuple[RouteStage, ...]
    cost_s: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    stages: tuple[PlannedStage, ...]
    cost_s: float
    ends_s: float
    """Of the cost: to the first stage and from the last, where those are not at home."""
    rivals: tuple[ComparedRoute, ...]
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
    inputs: RouteInputs,
    refused: tuple[Refusal, ...] = (),
) -> Plan | None:
    """The route a request would take and its reasons; None where there is none."""
    route = cheapest_route(n_layers, cut_alignment, holders, inputs)
    if route is None:
        return None
    allowed = {node_id: runnable(ranges, n_layers, cut_alignment) for node_id, ranges in holders.items()}
    cost_s, speeds = route_cost_s(route, inputs), inputs.speeds
    others = OtherCuts(n_layers, cut_alignment, allowed, inputs)
    stages = tuple(
        PlannedStage(
            node_id=stage.node_id,
            layers=stage.layers,
            compute_s=inputs.layer_s(stage.node_id) * len(stage.layers),
            network_s=_network_s(route, index, inputs),
            is_measured=speeds[stage.node_id].is_measured,
            lacks=speeds[stage.node_id].lacks,
            alternatives=(
                *same_cuts(route, index, allowed, inputs),
                *others.of(stage, cost_s),
            ),
        )
        for index, stage in enumerate(route)
    )
    home = {inputs.origin: allowed.get(inputs.origin, ())}
    rivals = [
        _compared_route("all at home", choose_route(n_layers, cut_alignment, home, inputs.origin), inputs),
        _compared_route(
            "fewest stages",
            choose_route(n_layers, cut_alignment, allowed, inputs.origin),
            inputs,
        ),
    ]
    if is_at_home(route, inputs):
        others_free = {node_id: allowed[node_id] for node_id in allowed if not speeds[node_id].is_full}
        if any(others_free[node_id] for node_id in others_free.keys() - home):
            away = best_with_others(n_layers, cut_alignment, home | others_free, inputs)
            rivals.append(_compared_route("with other nodes", away, inputs))
    ends_s = inputs.entry_s(route[0].node_id) + inputs.exit_s(route[-1].node_id)
    used = {stage.node_id for stage in route}
    without_room = tuple(
        Refusal(node_id, layers, speeds[node_id].lacks)
        for node_id, ranges in allowed.items()
        if speeds[node_id].is_full and node_id not in used
        for layers in ranges
    )
    return Plan(stages, cost_s, ends_s, tuple(rivals), (*refused, *without_room))


def standbys_of(
    route: Sequence[RouteStage], holders: Mapping[NodeId, Iterable[LayerRange]], inputs: RouteInputs
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
        others = same_cuts(route, index, able, inputs)
        found.append(next((other.node_id for other in others if not other.is_full), None))
    return tuple(found)


def _network_s(route: Sequence[RouteStage], index: int, inputs: RouteInputs) -> float:
    here = route[index].node_id
    if index + 1 < len(route):
        return inputs.hop_s(here, route[index + 1].node_id)
    return inputs.closing_s(here, route[0].node_id)


def _compared_route(name: str, route: tuple[RouteStage, ...] | None, inputs: RouteInputs) -> ComparedRoute:
    return ComparedRoute(name, route or (), route_cost_s(route, inputs) if route else None)
