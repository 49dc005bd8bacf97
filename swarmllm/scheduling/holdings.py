"""Finds the pipelines that the held ranges form already, complete or not.

Ranges that meet end to end from the first layer to the last are complete pipelines; they are found with the
rule of the fewest stages, until there is none left. What remains is put end to end as far as it
goes: those are pipelines with gaps, to be filled before a new one is begun.

Where two ranges of such a row overlap, the boundary is moved to the turning point, the place at which a
request would rather change nodes: computing is linear in layers, so that is one end of the overlap, the one
that leaves it to the quicker node. A route can use both as they are; without the overlap their nodes have
room for more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.route import usable
from swarmllm_proto.identifiers import NodeId


@dataclass(frozen=True, slots=True, order=True)
class NodeRange:
    """One range of one node; `is_pinned`: it may not be cut down."""

    layers: LayerRange
    node_id: NodeId
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Stages of a pipeline in order, none overlapping; it has gaps unless it `is_complete`."""

    stages: tuple[NodeRange, ...]
    n_layers: int

    @property
    def gaps(self) -> tuple[LayerRange, ...]:
        bounds = [(stage.layers.start, stage.layers.end) for stage in self.stages]
        starts = [0, *(end for _, end in bounds)]
        ends = [*(start for start, _ in bounds), self.n_layers]
        return tuple(LayerRange(*gap) for gap in zip(starts, ends, strict=True) if gap[0] < gap[1])

    @property
    def n_held(self) -> int:
        """Layers."""
        return sum(len(stage.layers) for stage in self.stages)

    @property
    def is_complete(self) -> bool:
        return not self.gaps


def rows_of(
    n_layers: int, cut_alignment: int, held: Iterable[NodeRange], layer_s: Mapping[NodeId, float]
) -> list[Row]:
    """Every held range that a pipeline may contain is in exactly one row; complete rows come first.
    `layer_s`: seconds per layer of each node, for the turning points."""
    left = {
        (item.node_id, layers): item
        for item in sorted(held)
        for layers in usable([item.layers], n_layers, cut_alignment)
    }
    rows = []
    while (stages := _fewest_stages(n_layers, left.values())) is not None:
        for stage in stages:
            del left[stage.node_id, stage.layers]
        rows.append(Row(tuple(stages), n_layers))
    waiting = sorted(left.values())
    while waiting:
        stages = [waiting.pop(0)]
        while (found := _next(stages[-1], waiting, layer_s)) is not None:
            before, after, taken = found
            waiting.remove(taken)
            stages[-1:] = [before, after]
        rows.append(Row(tuple(stages), n_layers))
    return sorted(rows, key=lambda row: (not row.is_complete, row.stages))


def turning_point(before: NodeRange, after: NodeRange, layer_s: Mapping[NodeId, float]) -> int | None:
    """Where a request changes from one of two overlapping ranges to the other; None: it cannot, because
    both are pinned or one holds all of the other."""
    if not before.layers.start < after.layers.start < before.layers.end < after.layers.end:
        return None
    if before.is_pinned:
        return None if after.is_pinned else before.layers.end
    if after.is_pinned or layer_s[after.node_id] < layer_s[before.node_id]:
        return after.layers.start
    return before.layers.end


def _fewest_stages(n_layers: int, held: Iterable[NodeRange]) -> list[NodeRange] | None:
    """Ranges end to end over all layers, as few as can be; ties go to the smaller range, then node id."""
    best: dict[int, tuple[int, NodeRange | None]] = {0: (0, None)}
    for item in sorted(held):
        before = best.get(item.layers.start)
        known = best.get(item.layers.end)
        if before is not None and (known is None or before[0] + 1 < known[0]):
            best[item.layers.end] = (before[0] + 1, item)
    stages: list[NodeRange] = []
    at = n_layers
    while at in best and (last := best[at][1]) is not None:
        stages.append(last)
        at = last.layers.start
    return stages[::-1] or None


def _next(
    last: NodeRange, waiting: Iterable[NodeRange], layer_s: Mapping[NodeId, float]
) -> tuple[NodeRange, NodeRange, NodeRange] | None:
    """(last stage, next stage, which of `waiting` that is): one that begins where the last one ends, else
    one that overlaps it, else the first behind it."""
    options = []
    for item in waiting:
        gap = item.layers.start - last.layers.end
        if gap >= 0:
            options.append(((gap > 0) * (1 + gap), item, last, item))
        elif (at := turning_point(last, item, layer_s)) is not None:
            before = NodeRange(LayerRange(last.layers.start, at), last.node_id, last.is_pinned)
            after = NodeRange(LayerRange(at, item.layers.end), item.node_id, item.is_pinned)
            options.append((1, item, before, after))
    if not options:
        return None
    _, taken, before, after = min(options, key=lambda option: option[:2])
    return before, after, taken
