"""Finds the route with the least cost, exactly: a shortest path over (boundary, node).

The layers are a line, so going over the boundaries in order is a topological order, and one min-plus product
of [arriving pieces] x [departing pieces] per boundary is the whole step; numpy does it. What a piece is, and
where a route may change nodes: see `pieces`.

The closing hop makes the path a ring: what the last hop costs depends on the first node. So there is one
search per first node. Most of them never run: a backward search without the closing hop gives a lower bound
for each first node at once, and a first node whose bound is no better than the best ring found cannot win.

Rivals, both measured in bench/scheduling.py: greedy (the cheapest next segment at each boundary) is blind to
where a segment leads; the same search in plain Python gives the same answer, later.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final, NamedTuple

import numpy as np

from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.candidates import CandidatePiece, pieces_of, runnable
from swarmllm.scheduling.cost import CostTable, Indices, RouteInputs, Seconds
from swarmllm.scheduling.route import MAX_STAGES, RouteStage, choose_route
from swarmllm_proto.identifiers import NodeId


def cheapest_route(
    n_layers: int,
    cut_alignment: int,
    holders: Mapping[NodeId, Iterable[LayerRange]],
    inputs: RouteInputs,
    *,
    max_stages: int = MAX_STAGES,
) -> tuple[RouteStage, ...] | None:
    """The route over [0, n_layers) that costs this request least, or None; parameters as in `choose_route`.

    Nodes that are full run as few layers as can be, whatever that costs: none, where there is a route without
    them. They are not left out, because what they say of themselves may be old, and a refusal is better than
    none tried. Should the cheapest route have more than `max_stages` stages, the one with the fewest is the
    answer.
    """
    pieces = _with_room(
        n_layers,
        pieces_of({node: runnable(ranges, n_layers, cut_alignment) for node, ranges in holders.items()}),
        {node_id for node_id in holders if inputs.speeds[node_id].is_full},
    )
    path = _Search(n_layers, pieces, inputs).cheapest()
    if path is None:
        return None
    route = _merged([pieces[i] for i in path])
    if len(route) <= max_stages:
        return route
    candidates: dict[NodeId, list[LayerRange]] = defaultdict(list)
    for piece in pieces:
        candidates[piece.node_id].append(LayerRange(piece.start, piece.end))
    return choose_route(n_layers, cut_alignment, candidates, inputs.origin, max_stages=max_stages)


def route_cost_s(route: Sequence[RouteStage], inputs: RouteInputs) -> float:
    """What this route costs the request."""
    node_ids = [stage.node_id for stage in route]
    return (
        inputs.entry_s(node_ids[0])
        + sum(inputs.layer_s(stage.node_id) * len(stage.layers) for stage in route)
        + sum(inputs.hop_s(a, b) for a, b in itertools.pairwise(node_ids))
        + inputs.closing_s(node_ids[-1], node_ids[0])
        + inputs.exit_s(node_ids[-1])
    )


def part_cost_s(route: Sequence[RouteStage], index: int, node_id: NodeId, inputs: RouteInputs) -> float:
    """Of `route_cost_s` what depends on the node of one stage, if `node_id` ran it."""
    before = route[index - 1].node_id if index else None
    after = route[index + 1].node_id if index + 1 < len(route) else None
    cost_s = inputs.layer_s(node_id) * len(route[index].layers)
    cost_s += inputs.entry_s(node_id) if before is None else inputs.hop_s(before, node_id)
    cost_s += inputs.exit_s(node_id) if after is None else inputs.hop_s(node_id, after)
    if before is None and after is not None:
        cost_s += inputs.closing_s(route[-1].node_id, node_id)
    elif after is None and before is not None:
        cost_s += inputs.closing_s(node_id, route[0].node_id)
    return cost_s


SEARCHED_MAX: Final = 2**21
"""Pairs of pieces between which a route may change that the searches for one route look at, all first nodes
together. Honest swarms need a few searches, because bounds spare the rest. Where nodes say what makes the
bounds useless, the best ring of those that were searched is the answer."""


class _Joint(NamedTuple):
    """The pieces at one boundary. A piece that ends its held range may be followed by any departing piece; a
    piece that could go on is followed only by one that begins a held range."""

    ending: Indices
    departing: Indices
    to_departing: Seconds
    """Hops, [n_departing, n_ending]."""
    through: Indices
    beginning: Indices
    to_beginning: Seconds
    """Hops, [n_beginning, n_through]."""
    staying: Indices
    onward: Indices
    """As many: the same node's next piece."""

    @property
    def n_pairs(self) -> int:
        return self.to_departing.size + self.to_beginning.size


class _Search:
    """Pieces are numbered in their sorted order; ties go to the lower number, so all nodes agree."""

    def __init__(self, n_layers: int, pieces: Sequence[CandidatePiece], inputs: RouteInputs) -> None:
        node_ids = sorted({piece.node_id for piece in pieces})
        index = {node_id: i for i, node_id in enumerate(node_ids)}
        self._costs = CostTable(inputs, node_ids)
        self._node: Indices = np.array([index[piece.node_id] for piece in pieces], np.intp)
        lengths = np.array([piece.end - piece.start for piece in pieces], np.float64)
        self._compute: Seconds = self._costs.layer[self._node] * lengths
        starting: dict[int, list[int]] = defaultdict(list)
        ending: dict[int, list[int]] = defaultdict(list)
        for i, piece in enumerate(pieces):
            starting[piece.start].append(i)
            ending[piece.end].append(i)
        self._first: Indices = np.array(starting[0], np.intp)
        self._last: Indices = np.array(ending[n_layers], np.intp)
        self.n_searched = 0
        """Rings, each from another first node."""
        self._joints = [
            self._joint(pieces, ending[at], starting[at]) for at in sorted(starting) if at and ending[at]
        ]

    def _joint(
        self, pieces: Sequence[CandidatePiece], arriving: Sequence[int], departing: Sequence[int]
    ) -> _Joint:
        ending: Indices = np.array([i for i in arriving if pieces[i].ends], np.intp)
        through: Indices = np.array([i for i in arriving if not pieces[i].ends], np.intp)
        beginning: Indices = np.array([i for i in departing if pieces[i].begins], np.intp)
        all_departing: Indices = np.array(departing, np.intp)
        next_piece = {pieces[i].node_id: i for i in departing if not pieces[i].begins}
        pairs = [(i, next_piece[pieces[i].node_id]) for i in through if pieces[i].node_id in next_piece]
        staying: Indices = np.array([i for i, _ in pairs], np.intp)
        onward: Indices = np.array([i for _, i in pairs], np.intp)
        to_departing = self._hops(ending, all_departing)
        to_beginning = self._hops(through, beginning)
        return _Joint(ending, all_departing, to_departing, through, beginning, to_beginning, staying, onward)

    def _hops(self, arriving: Indices, departing: Indices) -> Seconds:
        if not len(arriving) or not len(departing):
            return np.empty((len(departing), len(arriving)))
        return self._costs.hop(self._node[arriving], self._node[departing])

    def cheapest(self) -> list[int] | None:
        """Pieces from first to last."""
        if not len(self._first) or not len(self._last):
            return None
        bounds = self._bounds()
        best_s, best = np.inf, None
        n_pairs = 1 + sum(joint.n_pairs for joint in self._joints)
        for first in np.argsort(bounds, kind="stable"):
            if bounds[first] >= best_s or (best is not None and self.n_searched * n_pairs > SEARCHED_MAX):
                break
            self.n_searched += 1
            cost_s, path = self._from(int(first))
            if cost_s < best_s:
                best_s, best = cost_s, path
        return best

    def _bounds(self) -> Seconds:
        """For each first node: no ring from it costs less. [n_nodes], inf where none reaches the end."""
        onward = np.full(len(self._node), np.inf)
        onward[self._last] = self._compute[self._last] + self._costs.exit[self._node[self._last]]
        # A piece arrives at one boundary only.
        least = np.full(len(self._node), np.inf)
        for joint in reversed(self._joints):
            if joint.to_departing.size:
                least[joint.ending] = (joint.to_departing + onward[joint.departing, None]).min(axis=0)
            if joint.to_beginning.size:
                least[joint.through] = (joint.to_beginning + onward[joint.beginning, None]).min(axis=0)
            least[joint.staying] = np.minimum(least[joint.staying], onward[joint.onward])
            for arriving in (joint.ending, joint.through):
                onward[arriving] = self._compute[arriving] + least[arriving]
        bounds: Seconds = np.full(len(self._costs.layer), np.inf)
        np.minimum.at(bounds, self._node[self._first], onward[self._first])
        firsts = np.unique(self._node[self._first])
        closing: Seconds = np.full(len(self._costs.layer), np.inf)
        closing[firsts] = self._costs.closing(np.unique(self._node[self._last]), firsts).min(axis=1)
        # A bound and the cost it bounds add the same numbers in another order.
        return (bounds + closing + self._costs.entry) * (1 - 1e-12)

    def _from(self, first: int) -> tuple[float, list[int]]:
        cost = np.full(len(self._node), np.inf)
        before = np.full(len(self._node), -1, np.intp)
        starts = self._first[self._node[self._first] == first]
        cost[starts] = self._costs.entry[first] + self._compute[starts]
        for joint in self._joints:
            if joint.to_departing.size:
                _arrive(cost, before, joint.ending, joint.departing, joint.to_departing)
            if joint.to_beginning.size:
                _arrive(cost, before, joint.through, joint.beginning, joint.to_beginning)
            if joint.staying.size:
                stays = cost[joint.staying] <= cost[joint.onward]
                staying, onward = joint.staying[stays], joint.onward[stays]
                cost[onward], before[onward] = cost[staying], staying
            cost[joint.departing] += self._compute[joint.departing]
        nodes = self._node[self._last]
        closing = self._costs.closing(nodes, np.array([first], np.intp))[0]
        rings = cost[self._last] + closing + self._costs.exit[nodes]
        at = int(rings.argmin())
        path = [int(self._last[at])]
        while before[path[-1]] >= 0:
            path.append(int(before[path[-1]]))
        return float(rings[at]), path[::-1]


def _arrive(cost: Seconds, before: Indices, arriving: Indices, departing: Indices, hops: Seconds) -> None:
    """Where a hop is cheaper than what is known, it counts."""
    ways = hops + cost[arriving]
    chosen = ways.argmin(axis=1)
    least = ways[np.arange(len(departing)), chosen]
    is_less = least < cost[departing]
    found = departing[is_less]
    cost[found], before[found] = least[is_less], arriving[chosen[is_less]]


def _with_room(
    n_layers: int, pieces: Sequence[CandidatePiece], full: Set[NodeId]
) -> Sequence[CandidatePiece]:
    """Of the sorted pieces those that are in a route with the fewest layers on nodes of `full`. Every route
    made of them is such a route."""
    if not full:
        return pieces
    n_full = [piece.end - piece.start if piece.node_id in full else 0 for piece in pieces]
    fewest_before, fewest_after = {0: 0}, {n_layers: 0}
    for piece, n_more in zip(pieces, n_full, strict=True):
        if piece.start in fewest_before:
            n_ahead = fewest_before[piece.start] + n_more
            fewest_before[piece.end] = min(n_ahead, fewest_before.get(piece.end, n_ahead))
    for piece, n_more in zip(reversed(pieces), reversed(n_full), strict=True):
        if piece.end in fewest_after:
            n_behind = fewest_after[piece.end] + n_more
            fewest_after[piece.start] = min(n_behind, fewest_after.get(piece.start, n_behind))
    return [
        piece
        for piece, n_more in zip(pieces, n_full, strict=True)
        if piece.start in fewest_before
        and piece.end in fewest_after
        and fewest_before[piece.start] + n_more + fewest_after[piece.end] == fewest_before[n_layers]
    ]


def _merged(path: Sequence[CandidatePiece]) -> tuple[RouteStage, ...]:
    """Pieces of one node that meet are one stage."""
    stages: list[RouteStage] = []
    for piece in path:
        if stages and stages[-1].node_id == piece.node_id:
            stages[-1] = RouteStage(piece.node_id, LayerRange(stages[-1].layers.start, piece.end))
        else:
            stages.append(RouteStage(piece.node_id, LayerRange(piece.start, piece.end)))
    return tuple(stages)
