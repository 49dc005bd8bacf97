"""What else could have been chosen in the place of a route, and what it would have cost.

Another holder of a stage's layers is put into the route. A node that holds only some of them cannot stand in
for the stage; what it would cost is the best route through one of its ranges: the same search where nobody
else holds those layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmllm.models.layers import LayerRange, covers, subtract
from swarmllm.scheduling.cheapest import cheapest_route, part_cost_s, route_cost_s
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.pieces import pieces_of, runnable
from swarmllm.scheduling.route import RouteStage
from swarmllm_proto.identifiers import NodeId

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
    circumstances: RouteInputs,
) -> tuple[Alternative, ...]:
    stage = route[index]
    cost_s = part_cost_s(route, index, stage.node_id, circumstances)
    found = []
    for node_id, ranges in allowed.items():
        if node_id != stage.node_id and covers(ranges, stage.layers):
            extra_s = part_cost_s(route, index, node_id, circumstances) - cost_s
            is_full = circumstances.speeds[node_id].is_full
            found.append(Alternative(node_id, stage.layers, extra_s, is_full))
    return _best(found)


def _best(found: Iterable[Alternative]) -> tuple[Alternative, ...]:
    order = sorted(found, key=lambda other: (other.is_full, other.extra_s, other.node_id, other.layers))
    return tuple(order[:MAX_ALTERNATIVES])


class OtherCuts:
    """What routes would cost through ranges that have some layers of a stage, but not all."""

    def __init__(
        self, n_layers: int, cut_alignment: int, allowed: Holders, circumstances: RouteInputs
    ) -> None:
        self._n_layers = n_layers
        self._cut_alignment = cut_alignment
        self._allowed = allowed
        self._known = circumstances
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
    n_layers: int, cut_alignment: int, allowed: Holders, circumstances: RouteInputs
) -> tuple[RouteStage, ...] | None:
    """The cheapest route that is not all at home: one in which some piece of home is not used. Of many pieces
    the longest are tried."""
    home = circumstances.origin
    held = {node: runnable(ranges, n_layers, cut_alignment) for node, ranges in allowed.items()}
    pieces = sorted(
        (LayerRange(piece.start, piece.end) for piece in pieces_of(held) if piece.node_id == home),
        key=lambda layers: (-len(layers), layers.start),
    )
    routes = [
        cheapest_route(
            n_layers, cut_alignment, {**allowed, home: subtract(allowed[home], [piece])}, circumstances
        )
        for piece in pieces[:MAX_SEARCHES]
    ]
    return min(
        (route for route in routes if route is not None),
        key=lambda route: route_cost_s(route, circumstances),
        default=None,
    )


def is_at_home(route: Sequence[RouteStage], circumstances: RouteInputs) -> bool:
    return all(stage.node_id == circumstances.origin for stage in route)
