"""Finds the route of one request: the node that runs each layer.

The rule is simple: fewest stages; among those, the most layers at home. A route that stays on the origin is a
single stage with every layer at home, so it always wins; otherwise every stage fewer saves one hop per token.
It ignores speed and load: `cheapest` uses them, and chooses the routes of requests. This rule finds out
whether there is a route at all, and is the alternative shown in every plan.

Of a held range any part between two allowed cuts may be used (see `pieces`). Ranges of one node that meet are
one stage: their hidden states never leave its worker.

The search goes once over the boundaries in order. Only two paths can lead to a node: the best of all, or the
best that already ends at that node. Ties are broken by node ids, so all nodes agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.candidates import pieces_of, runnable
from swarmllm_proto.identifiers import NodeId

MAX_STAGES = 256
"""An assignment and the stage index of a job carry no more."""


@dataclass(frozen=True, slots=True)
class RouteStage:
    """One node's part of a route: layers that it holds, or part of them."""

    node_id: NodeId
    layers: LayerRange


@dataclass(frozen=True, slots=True, order=True)
class _Path:
    """A way from layer 0 to some boundary; the order of the fields is the order of preference."""

    n_stages: int
    n_remote_layers: int
    node_ids: tuple[NodeId, ...]
    starts: tuple[int, ...]


def choose_route(
    n_layers: int,
    cut_alignment: int,
    holders: Mapping[NodeId, Iterable[LayerRange]],
    origin: NodeId,
    *,
    max_stages: int = MAX_STAGES,
) -> tuple[RouteStage, ...] | None:
    """The best route that covers [0, n_layers) exactly once, or None.

    `holders`: by node id, the ranges that it holds. `cut_alignment`: cuts are allowed at multiples of it, 0
    forbids any. Nodes that must not be used are left out by the caller.
    """
    held = {node: runnable(ranges, n_layers, cut_alignment) for node, ranges in holders.items()}
    at: dict[int, dict[NodeId, _Path]] = defaultdict(dict)
    """By boundary and the node that runs the layer before it."""
    for start, pieces in groupby(pieces_of(held), key=attrgetter("start")):
        arrived = at.pop(start, {})
        best = min(arrived.values(), default=None) if start else _Path(0, 0, (), ())
        if best is None:
            continue
        for piece in pieces:
            n_remote = 0 if piece.node_id == origin else piece.end - start
            paths = [_extend(best, piece.node_id, start, n_remote)]
            if piece.node_id in arrived:
                paths.append(_extend(arrived[piece.node_id], piece.node_id, start, n_remote))
            longer = min(paths)
            if longer.n_stages <= max_stages:
                at[piece.end][piece.node_id] = longer
    finished = at[n_layers].values()
    return _stages(min(finished), n_layers) if finished else None


def is_complete(n_layers: int, cut_alignment: int, holders: Mapping[NodeId, Iterable[LayerRange]]) -> bool:
    """Whether `choose_route` finds one, for less."""
    reach: dict[int, int] = {}
    for ranges in holders.values():
        for layers in runnable(ranges, n_layers, cut_alignment):
            reach[layers.start] = max(layers.end, reach.get(layers.start, 0))
    starts = sorted(reach)
    n_stages = covered = farthest = i = 0
    while covered < n_layers:
        while i < len(starts) and starts[i] <= covered:
            farthest = max(farthest, reach[starts[i]])
            i += 1
        if farthest == covered or n_stages == MAX_STAGES:
            return False
        n_stages, covered = n_stages + 1, farthest
    return True


def usable(ranges: Iterable[LayerRange], n_layers: int, cut_alignment: int) -> list[LayerRange]:
    """Those ranges that a pipeline of this model may contain as they are."""
    if cut_alignment == 0:
        return [layers for layers in ranges if (layers.start, layers.end) == (0, n_layers)]
    return [
        layers
        for layers in ranges
        if 0 <= layers.start < layers.end <= n_layers
        and layers.start % cut_alignment == 0
        and (layers.end == n_layers or layers.end % cut_alignment == 0)
    ]


def missing_layers(n_layers: int, ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """What of [0, n_layers) nobody holds."""
    missing: list[LayerRange] = []
    covered = 0
    for layers in sorted(ranges, key=lambda layers: layers.start):
        if layers.start >= n_layers:
            break
        if layers.start > covered:
            missing.append(LayerRange(covered, layers.start))
        covered = max(covered, layers.end)
    if covered < n_layers:
        missing.append(LayerRange(covered, n_layers))
    return tuple(missing)


def _extend(path: _Path, node_id: NodeId, start: int, n_remote: int) -> _Path:
    is_new = path.node_ids[-1:] != (node_id,)
    return _Path(
        path.n_stages + is_new,
        path.n_remote_layers + n_remote,
        (*path.node_ids, node_id) if is_new else path.node_ids,
        (*path.starts, start) if is_new else path.starts,
    )


def _stages(path: _Path, n_layers: int) -> tuple[RouteStage, ...]:
    ends: Sequence[int] = (*path.starts[1:], n_layers)
    return tuple(
        RouteStage(node_id, LayerRange(start, end))
        for node_id, start, end in zip(path.node_ids, path.starts, ends, strict=True)
    )
