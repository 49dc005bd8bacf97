"""The route with the least cost, exactly: a shortest path over (boundary, node).

The layers are a line, so going over the boundaries in order is a topological order, and one min-plus product
of [arriving segments] x [departing segments] per boundary is the whole step; numpy does it.

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
from typing import Final

import numpy as np

from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.cost import CostTable, Indices, RouteInputs, Seconds
from swarmllm.scheduling.route import MAX_STAGES, RouteStage, choose_route, usable
from swarmllm_proto.identifiers import NodeId


def cheapest_route(
    n_layers: int,
    cut_alignment: int,
    holders: Mapping[NodeId, Iterable[LayerRange]],
    circumstances: RouteInputs,
    *,
    max_stages: int = MAX_STAGES,
) -> tuple[RouteStage, ...] | None:
    """The route over [0, n_layers) that costs this request least, or None; parameters as in `choose_route`.

    Nodes that are full run as few layers as can be, whatever that costs: none, where there is a route without
    them. They are not left out, because what they say of themselves may be old, and a refusal is better than
    none tried. Should the cheapest route have more than `max_stages` stages, the one with the fewest is the
    answer.
    """
    segments = _with_room(
        n_layers,
        sorted(
            {
                (layers.start, layers.end, node_id)
                for node_id, ranges in holders.items()
                for layers in usable(ranges, n_layers, cut_alignment)
            }
        ),
        {node_id for node_id in holders if circumstances.speeds[node_id].is_full},
    )
    path = _Search(n_layers, segments, circumstances).cheapest()
    if path is None:
        return None
    route = _merged([segments[i] for i in path])
    if len(route) <= max_stages:
        return route
    candidates: dict[NodeId, list[LayerRange]] = defaultdict(list)
    for start, end, node_id in segments:
        candidates[node_id].append(LayerRange(start, end))
    return choose_route(n_layers, cut_alignment, candidates, circumstances.origin, max_stages=max_stages)


def route_cost_s(route: Sequence[RouteStage], circumstances: RouteInputs) -> float:
    """What this route costs the request."""
    node_ids = [stage.node_id for stage in route]
    return (
        circumstances.entry_s(node_ids[0])
        + sum(circumstances.layer_s(stage.node_id) * len(stage.layers) for stage in route)
        + sum(circumstances.hop_s(a, b) for a, b in itertools.pairwise(node_ids))
        + circumstances.closing_s(node_ids[-1], node_ids[0])
        + circumstances.exit_s(node_ids[-1])
    )


def part_cost_s(
    route: Sequence[RouteStage], index: int, node_id: NodeId, circumstances: RouteInputs
) -> float:
    """Of `route_cost_s` what depends on the node of one stage, if `node_id` ran it."""
    before = route[index - 1].node_id if index else None
    after = route[index + 1].node_id if index + 1 < len(route) else None
    cost_s = circumstances.layer_s(node_id) * len(route[index].layers)
    cost_s += circumstances.entry_s(node_id) if before is None else circumstances.hop_s(before, node_id)
    cost_s += circumstances.exit_s(node_id) if after is None else circumstances.hop_s(node_id, after)
    if before is None and after is not None:
        cost_s += circumstances.closing_s(route[-1].node_id, node_id)
    elif after is None and before is not None:
        cost_s += circumstances.closing_s(node_id, route[0].node_id)
    return cost_s


SEARCHED_MAX: Final = 2**20
"""Pairs of meeting segments that the searches for one route look at, all first nodes together. Honest swarms
need a few searches, because bounds spare the rest. Where nodes say what makes the bounds useless, the best
ring of those that were searched is the answer."""


class _Search:
    """Segments are counted in their sorted order; ties go to the lower number, so all nodes agree."""

    def __init__(
        self, n_layers: int, segments: Sequence[tuple[int, int, NodeId]], circumstances: RouteInputs
    ) -> None:
        node_ids = sorted({node_id for _, _, node_id in segments})
        index = {node_id: i for i, node_id in enumerate(node_ids)}
        self._costs = CostTable(circumstances, node_ids)
        self._node: Indices = np.array([index[node_id] for _, _, node_id in segments], np.intp)
        lengths = np.array([end - start for start, end, _ in segments], np.float64)
        self._compute: Seconds = self._costs.layer[self._node] * lengths
        starting: dict[int, list[int]] = defaultdict(list)
        ending: dict[int, list[int]] = defaultdict(list)
        for i, (start, end, _) in enumerate(segments):
            starting[start].append(i)
            ending[end].append(i)
        self._first: Indices = np.array(starting[0], np.intp)
        self._last: Indices = np.array(ending[n_layers], np.intp)
        self.n_searched = 0
        """Rings, each from another first node."""
        self._joints = [
            (np.array(ending[at], np.intp), np.array(starting[at], np.intp))
            for at in sorted(starting)
            if at and ending[at]
        ]
        self._hops = [
            self._costs.hop(self._node[arriving], self._node[departing])
            for arriving, departing in self._joints
        ]

    def cheapest(self) -> list[int] | None:
        """Segments from first to last."""
        if not len(self._first) or not len(self._last):
            return None
        bounds = self._bounds()
        best_s, best = np.inf, None
        n_pairs = 1 + sum(len(arriving) * len(departing) for arriving, departing in self._joints)
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
        for (arriving, departing), hop in zip(reversed(self._joints), reversed(self._hops), strict=True):
            onward[arriving] = self._compute[arriving] + (hop + onward[departing, None]).min(axis=0)
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
        for (arriving, departing), hop in zip(self._joints, self._hops, strict=True):
            ways = hop + cost[arriving]
            chosen = ways.argmin(axis=1)
            cost[departing] = ways[np.arange(len(departing)), chosen] + self._compute[departing]
            before[departing] = arriving[chosen]
        nodes = self._node[self._last]
        closing = self._costs.closing(nodes, np.array([first], np.intp))[0]
        rings = cost[self._last] + closing + self._costs.exit[nodes]
        at = int(rings.argmin())
        path = [int(self._last[at])]
        while before[path[-1]] >= 0:
            path.append(int(before[path[-1]]))
        return float(rings[at]), path[::-1]


def _with_room(
    n_layers: int, segments: Sequence[tuple[int, int, NodeId]], full: Set[NodeId]
) -> Sequence[tuple[int, int, NodeId]]:
    """Of the sorted segments those that are in a route with the fewest layers on nodes of `full`. Every route
    made of them is such a route."""
    if not full:
        return segments
    n_full = [end - start if node_id in full else 0 for start, end, node_id in segments]
    fewest_before, fewest_after = {0: 0}, {n_layers: 0}
    for (start, end, _), n_more in zip(segments, n_full, strict=True):
        if start in fewest_before:
            n_ahead = fewest_before[start] + n_more
            fewest_before[end] = min(n_ahead, fewest_before.get(end, n_ahead))
    for (start, end, _), n_more in zip(reversed(segments), reversed(n_full), strict=True):
        if end in fewest_after:
            n_behind = fewest_after[end] + n_more
            fewest_after[start] = min(n_behind, fewest_after.get(start, n_behind))
    return [
        segment
        for segment, n_more in zip(segments, n_full, strict=True)
        if segment[0] in fewest_before
        and segment[1] in fewest_after
        and fewest_before[segment[0]] + n_more + fewest_after[segment[1]] == fewest_before[n_layers]
    ]


def _merged(path: Sequence[tuple[int, int, NodeId]]) -> tuple[RouteStage, ...]:
    """Ranges of one node that meet are one stage."""
    stages: list[RouteStage] = []
    for start, end, node_id in path:
        if stages and stages[-1].node_id == node_id:
            stages[-1] = RouteStage(node_id, LayerRange(stages[-1].layers.start, end))
        else:
            stages.append(RouteStage(node_id, LayerRange(start, end)))
    return tuple(stages)
