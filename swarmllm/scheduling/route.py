"""Which node runs which layers of one request, from who holds what.

The rule is simple: fewest stages; among those, the most layers at home. A route that stays on the origin is
a single stage with every layer at home, so it always wins; otherwise every stage fewer saves one hop per
token. It knows nothing of speed and load: `cheapest` does, and decides what requests do. This rule says
whether there is a route at all, and is the rival in every plan.

A held range is taken whole or not at all, because a loaded segment cannot run part of itself (libllama runs
a model to its end). So two holders fit together only where their ranges meet at a common boundary. Ranges
of one node that meet are one stage: their hidden states never leave its worker.

The search goes once over the ranges in order of their start, which is a topological order: every range that
ends where another starts has been visited before. Equal routes are told apart by their node ids, so all
nodes agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmllm.models.layers import LayerRange
from swarmllm_proto.identifiers import NodeId

MAX_STAGES = 256
"""An assignment and the stage index of a job carry no more."""


@dataclass(frozen=True, slots=True)
class RouteStage:
    """One node's part of a route: a range that is one or several of the ranges it holds, end to end."""

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

    `holders`: by node id, the ranges that it can run, each as one loaded segment. `cut_alignment`: cuts are
    allowed at multiples of it, 0 forbids any. Nodes that must not be used are left out by the caller.
    """
    by_start: dict[int, set[tuple[NodeId, int]]] = defaultdict(set)
    for node_id, ranges in holders.items():
        for layers in usable(ranges, n_layers, cut_alignment):
            by_start[layers.start].add((node_id, layers.end))
    best: dict[tuple[int, NodeId | None], _Path] = {}
    reached: dict[int, list[NodeId]] = defaultdict(list)
    for start in sorted(by_start):
        before: list[tuple[NodeId | None, _Path]] = [(last, best[start, last]) for last in reached[start]]
        if start == 0:
            before = [(None, _Path(0, 0, (), ()))]
        for node_id, end in sorted(by_start[start]):
            n_remote = 0 if node_id == origin else end - start
            for last, path in before:
                longer = _extend(path, node_id, start, n_remote, new_stage=last != node_id)
                known = best.get((end, node_id))
                if longer.n_stages > max_stages or (known is not None and known <= longer):
                    continue
                if known is None:
                    reached[end].append(node_id)
                best[end, node_id] = longer
    finished = [best[n_layers, node_id] for node_id in reached[n_layers]]
    return _stages(min(finished), n_layers) if finished else None


def is_complete(
    n_layers: int, cut_alignment: int, holders: Mapping[NodeId, Iterable[LayerRange]], origin: NodeId
) -> bool:
    """Whether `choose_route` finds one, for less."""
    pairs = {
        (layers.start, layers.end)
        for ranges in holders.values()
        for layers in usable(ranges, n_layers, cut_alignment)
    }
    fewest = {0: 0}
    for start, end in sorted(pairs):
        if start in fewest:
            fewest[end] = min(fewest.get(end, MAX_STAGES + 1), fewest[start] + 1)
    if n_layers not in fewest:
        return False
    # Ranges of one node that meet are one stage: who has too many ranges may still have few enough stages.
    return (
        fewest[n_layers] <= MAX_STAGES
        or choose_route(n_layers, cut_alignment, holders, origin, max_stages=MAX_STAGES) is not None
    )


def usable(ranges: Iterable[LayerRange], n_layers: int, cut_alignment: int) -> list[LayerRange]:
    """Those ranges that a pipeline of this model may contain."""
    if cut_alignment == 0:
        return [layers for layers in ranges if (layers.start, layers.end) == (0, n_layers)]
    return [
        layers
        for layers in ranges
        if 0 <= layers.start < layers.end <= n_layers
        and layers.start % cut_alignment == 0
        and (layers.end == n_layers or layers.end % cut_alignment == 0)
    ]


def composes(ranges: Iterable[LayerRange], layers: LayerRange) -> bool:
    """Whether some of `ranges`, whole and end to end, are exactly `layers`."""
    boundaries = {layers.start}
    for held in sorted(ranges):
        if held.start in boundaries and held.end <= layers.end:
            boundaries.add(held.end)
    return layers.end in boundaries


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


def _extend(path: _Path, node_id: NodeId, start: int, n_remote: int, *, new_stage: bool) -> _Path:
    return _Path(
        path.n_stages + new_stage,
        path.n_remote_layers + n_remote,
        (*path.node_ids, node_id) if new_stage else path.node_ids,
        (*path.starts, start) if new_stage else path.starts,
    )


def _stages(path: _Path, n_layers: int) -> tuple[RouteStage, ...]:
    ends: Sequence[int] = (*path.starts[1:], n_layers)
    return tuple(
        RouteStage(node_id, LayerRange(start, end))
        for node_id, start, end in zip(path.node_ids, path.starts, ends, strict=True)
    )
