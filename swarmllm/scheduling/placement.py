"""Decides which node holds which layers of a model: the same answer on every node, from the same gossip,
without a leader.

Existing layers stay: a plan from scratch would be better by some measure after every join, and would move
everybody. So the order is: gaps in pipelines that exist are filled; then nodes that hold nothing form new
pipelines, near ones together (`regions_of`), as many as is best (`pipeline_groups`), each node as many layers
as its speed and its memory say (`water_fill`); the remaining nodes double the layers with the fewest holders.
A node that leaves opens one gap; a node that joins changes only its own part.

Nobody is given more than it has room for; what its user loaded ("pinned") is counted and never moved; nodes
that are not trusted are neither counted nor asked. A node that drops layers has to keep the last copy: the
code that acts on the plan ensures this, because only it knows what is ready at that moment.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarmllm.models.layers import LayerRange, merge
from swarmllm.scheduling.coordinates import Coordinate, regions_of
from swarmllm.scheduling.holdings import NodeRange, Row, rows_of
from swarmllm.scheduling.pipeline_groups import best_groups
from swarmllm.scheduling.route import usable
from swarmllm_proto.identifiers import NodeId

CONSISTENT_TICKS = 3
FRAGMENTS_TRIED = 8
"""Pipelines with the smallest gaps that a node which leaves a fragment may help; what helps none of these
rarely helps a larger gap, and a thousand nodes must not try everything with everything."""


def water_fill(n_units: int, capacities: Sequence[int], speeds: Sequence[float]) -> list[int] | None:
    """Units for each node, n_units together, none above its capacity; None where they have no room.

    Parallax (arXiv 2509.26182), phase 1: the level lambda for which sum(min(c_i, lambda F_i)) is the number
    of layers. All nodes below their capacity then take the same time. Nodes reach their capacity in the order
    of c_i / F_i, so one pass finds the level, where the paper bisects. Shares are rounded down to whole
    layers, and what is left goes to the largest remainders.

    `speeds`: units per second, positive. Ties go to the earlier node.
    """
    if sum(capacities) < n_units:
        return None
    level = _level(n_units, capacities, speeds)
    shares = [min(capacity, level * speed) for capacity, speed in zip(capacities, speeds, strict=True)]
    units = [min(capacity, int(share + 1e-9)) for capacity, share in zip(capacities, shares, strict=True)]
    while sum(units) > n_units:
        # Rounding of the level, not of the shares.
        units[max(range(len(units)), key=lambda i: (units[i] - shares[i], -i))] -= 1
    while sum(units) < n_units:
        open_ = [i for i, capacity in enumerate(capacities) if units[i] < capacity]
        units[max(open_, key=lambda i: (shares[i] - units[i], -i))] += 1
    return units


def _level(n_units: int, capacities: Sequence[int], speeds: Sequence[float]) -> float:
    order = sorted(range(len(speeds)), key=lambda i: capacities[i] / speeds[i])
    left, width = float(n_units), sum(speeds)
    level = 0.0
    for i in order:
        level = left / width
        if level * speeds[i] <= capacities[i]:
            break
        left -= capacities[i]
        width = max(width - speeds[i], speeds[i] * 1e-12)
    return level


@dataclass(slots=True)
class Hysteresis:
    """Confirms a decision only when it has stayed the same for a while. Gossip arrives at different times,
    and a momentary gap is often a late record."""

    n_seen: int = 0
    _last: object = None

    def see(self, wish: object) -> bool:
        """Whether this wish has now been seen so many times in a row that it may be acted on."""
        self.n_seen = self.n_seen + 1 if wish == self._last else 1
        self._last = wish
        return self.n_seen >= CONSISTENT_TICKS

    def forget(self) -> None:
        self.n_seen, self._last = 0, None


@dataclass(frozen=True, slots=True)
class ModelShape:
    n_layers: int
    cut_alignment: int
    """As in the manifest; 0: it runs whole only."""
    layer_bytes: int
    """Of the largest layer."""
    embedding_bytes: int = 0
    """Besides its layers, what the node with the first one holds; `head_bytes`: with the last one."""
    head_bytes: int = 0

    @property
    def unit(self) -> int:
        """Layers between two cuts."""
        return self.cut_alignment or self.n_layers

    @property
    def n_units(self) -> int:
        return -(-self.n_layers // self.unit)

    def layers(self, start: int, end: int) -> LayerRange:
        """From units."""
        return LayerRange(start * self.unit, min(end * self.unit, self.n_layers))

    def n_bytes(self, layers: LayerRange) -> int:
        ends = self.embedding_bytes * (layers.start == 0) + self.head_bytes * (layers.end == self.n_layers)
        return len(layers) * self.layer_bytes + ends


@dataclass(frozen=True, slots=True)
class PlacementNode:
    node_id: NodeId
    free_bytes: int
    """For layers of this model, besides what it holds."""
    layer_s: float
    """Per layer and row, measured or estimated; positive."""
    held: tuple[LayerRange, ...] = ()
    """Ready, or being loaded."""
    pinned: tuple[LayerRange, ...] = ()
    """Of those, what is not to be cut down."""
    place: Coordinate | None = None
    takes_part: bool = True
    """It lets the swarm decide what it holds, of this model."""
    is_trusted: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    pipelines: tuple[tuple[NodeRange, ...], ...] = ()
    """Complete ones, as they are when everybody has done what the plan says."""
    targets: dict[NodeId, tuple[LayerRange, ...]] = field(default_factory=dict)
    """What each node should hold, in the fewest ranges; every node that takes part is named."""


def place(shape: ModelShape, nodes: Iterable[PlacementNode], max_pipes: int | None = None) -> Placement:
    """`max_pipes`: no new pipeline is begun where there are as many; None: no limit."""
    planner = _Planner(shape, [node for node in nodes if node.is_trusted])
    planner.fill_gaps(max_pipes)
    planner.begin_pipelines(max_pipes)
    planner.double_the_rarest(max_pipes)
    return planner.placement()


class _Planner:
    def __init__(self, shape: ModelShape, nodes: Sequence[PlacementNode]) -> None:
        self._shape = shape
        self._nodes = {node.node_id: node for node in sorted(nodes, key=lambda node: node.node_id)}
        self._regions = regions_of({node_id: node.place for node_id, node in self._nodes.items()})
        self._free = {
            node_id: max(0, node.free_bytes) if node.takes_part else 0
            for node_id, node in self._nodes.items()
        }
        held = [
            NodeRange(
                layers,
                node.node_id,
                not node.takes_part or any(layers.overlaps(pin) for pin in node.pinned),
            )
            for node in self._nodes.values()
            for layers in node.held
        ]
        self._rows = rows_of(
            shape.n_layers,
            shape.cut_alignment,
            held,
            {node_id: node.layer_s for node_id, node in self._nodes.items()},
        )
        # What no pipeline may contain stays where it is.
        self._others = [
            item for item in held if not usable([item.layers], shape.n_layers, shape.cut_alignment)
        ]
        self._busy = {item.node_id for item in held}

    def fill_gaps(self, max_pipes: int | None) -> None:
        """The pipelines with the smallest gaps first. Where nobody can fill any, the nodes of the smallest
        fragment leave it and help with the others, if that completes one."""
        while True:
            n_filled = self._fill_what_can_be(max_pipes)
            n_complete = sum(row.is_complete for row in self._rows)
            fragments = [
                row
                for row in self._rows
                if not row.is_complete and not all(stage.is_pinned for stage in row.stages)
            ]
            if n_filled or (max_pipes is not None and n_complete >= max_pipes) or not fragments:
                return
            before = (list(self._rows), dict(self._free), set(self._busy))
            for row in sorted(
                fragments, key=lambda row: (sum(len(stage.layers) for stage in row.stages), row.stages)
            ):
                self._dissolve(row)
                if self._fill_what_can_be(max_pipes, FRAGMENTS_TRIED):
                    break
            else:
                self._rows, self._free, self._busy = before
                return

    def _fill_what_can_be(self, max_pipes: int | None, n_tried: int | None = None) -> int:
        """How many pipelines were completed, of all or of the `n_tried` with the smallest gaps."""
        n_complete, n_filled = sum(row.is_complete for row in self._rows), 0
        gapped = [row for row in self._rows if not row.is_complete]
        for row in sorted(gapped, key=lambda row: (sum(map(len, row.gaps)), row.stages))[:n_tried]:
            if max_pipes is not None and n_complete + n_filled >= max_pipes:
                break
            filled = self._filled(row)
            if filled is not None:
                self._rows[self._rows.index(row)] = filled
                n_filled += 1
        return n_filled

    def _dissolve(self, row: Row) -> None:
        """Its stages are to be dropped, but for the pinned ones."""
        kept = tuple(stage for stage in row.stages if stage.is_pinned)
        at = self._rows.index(row)
        self._rows[at : at + 1] = [Row(kept, row.n_layers)] if kept else []
        for stage in row.stages:
            if stage not in kept:
                self._free[stage.node_id] += self._shape.n_bytes(stage.layers)
        self._busy = {item.node_id for item in self._all_held()}

    def begin_pipelines(self, max_pipes: int | None) -> None:
        """In the region with most room first, then with who is left of all regions. Whom the best number of
        pipelines leaves over may still be enough for more of them, and idle nodes serve nobody."""
        regions = sorted(set(self._regions.values()))
        room = {number: sum(self._free[node_id] for node_id in self._idle(number)) for number in regions}
        for number in (*sorted(regions, key=lambda number: (-room[number], number)), None):
            while self._begin_in(number, max_pipes):
                pass

    def _begin_in(self, region: int | None, max_pipes: int | None) -> bool:
        n_complete = sum(row.is_complete for row in self._rows)
        most = None if max_pipes is None else max(0, max_pipes - n_complete)
        began = False
        for group in self._groups(self._idle(region), most):
            stages = self._laid_out(group, 0, self._shape.n_units)
            if stages is not None:
                self._take(stages)
                self._rows.append(Row(tuple(stages), self._shape.n_layers))
                began = True
        return began

    def double_the_rarest(self, max_pipes: int | None) -> None:
        """Only what is in a complete pipeline: a second copy of a fragment serves nobody. Where the number of
        pipelines is limited, up to one copy more than that: the standby."""
        stages = [stage for row in self._rows if row.is_complete for stage in row.stages]
        copies = dict.fromkeys({stage.layers for stage in stages}, 0)
        for layers in copies:
            copies[layers] = sum(layers in item.layers for item in self._all_held())
        for node_id in self._idle(None):
            fits = [
                layers
                for layers, n_copies in copies.items()
                if self._shape.n_bytes(layers) <= self._free[node_id]
                and (max_pipes is None or n_copies <= max_pipes)
            ]
            if fits:
                rarest = min(fits, key=lambda layers: (copies[layers], -len(layers), layers))
                copies[rarest] += 1
                self._take([stage := NodeRange(rarest, node_id)])
                self._others.append(stage)

    def placement(self) -> Placement:
        targets: dict[NodeId, list[LayerRange]] = {node_id: [] for node_id in self._nodes}
        for item in self._all_held():
            targets[item.node_id].append(item.layers)
        return Placement(
            tuple(sorted(row.stages for row in self._rows if row.is_complete)),
            {node_id: merge(ranges) for node_id, ranges in targets.items()},
        )

    def _all_held(self) -> list[NodeRange]:
        return [*(stage for row in self._rows for stage in row.stages), *self._others]

    def _idle(self, region: int | None) -> list[NodeId]:
        """Nodes with room that hold nothing, of one region or of all."""
        return [
            node_id
            for node_id, free in self._free.items()
            if free > 0 and node_id not in self._busy and region in (None, self._regions[node_id])
        ]

    def _groups(self, node_ids: Sequence[NodeId], most: int | None) -> list[list[NodeId]]:
        shape, unit_bytes = self._shape, self._shape.unit * self._shape.layer_bytes
        whole_bytes = shape.n_bytes(LayerRange(0, shape.n_layers))
        demand = shape.n_units
        demand += -(-shape.embedding_bytes // unit_bytes) + -(-shape.head_bytes // unit_bytes)
        sizes = [
            demand if self._free[node_id] >= whole_bytes else self._free[node_id] // unit_bytes
            for node_id in node_ids
        ]
        return [[node_ids[i] for i in group] for group in best_groups(sizes, demand, most)]

    def _filled(self, row: Row) -> Row | None:
        """The row without gaps, its new stages taken; None where they cannot be filled."""
        stages = list(row.stages)
        before = dict(self._free)
        for gap in row.gaps:
            unit = self._shape.unit
            new = self._cover(stages, gap.start // unit, -(-gap.end // unit))
            if new is None:
                self._free = before
                return None
            stages += new
            for stage in new:
                self._free[stage.node_id] -= self._shape.n_bytes(stage.layers)
        self._busy |= {stage.node_id for stage in stages}
        return Row(tuple(sorted(stages)), row.n_layers)

    def _cover(self, row: Sequence[NodeRange], start: int, end: int) -> list[NodeRange] | None:
        """Those next to the gap first, each from its own side, so that what it gets is one range with what it
        has; then idle nodes near the pipeline, the roomiest first: as few as can do it."""
        unit = self._shape.unit
        edges = (start * unit, min(end * unit, self._shape.n_layers))
        before = [stage.node_id for stage in row if stage.layers.end == edges[0]]
        after = [stage.node_id for stage in row if stage.layers.start == edges[1]]
        helping = {stage.node_id for stage in row}
        here = {self._regions[node_id] for node_id in helping}
        idle = sorted(
            self._idle(None),
            key=lambda n: (n in helping, self._regions[n] not in here, -self._free[n], n),
        )
        beside = [node_id for node_id in (*before, *after) if self._free[node_id] > 0]
        candidates = list(dict.fromkeys([*beside, *idle]))
        room = list(itertools.accumulate(self._free[n] // self._shape.layer_bytes for n in candidates))
        enough = bisect.bisect_left(room, edges[1] - edges[0]) + 1
        # The ends of the model take room too: one or two nodes more than the layers alone need.
        for n_nodes in range(enough, min(enough + 3, len(candidates)) + 1):
            new = self._laid_out(candidates[:n_nodes], start, end, before, after)
            if new is not None:
                return new
        return None

    def _laid_out(
        self,
        node_ids: Sequence[NodeId],
        start: int,
        end: int,
        first: Sequence[NodeId] = (),
        last: Sequence[NodeId] = (),
    ) -> list[NodeRange] | None:
        """Units [start, end) over the nodes, near ones next to each other; `first` and `last` keep to their
        end, unless there is no other way. None where they have no room."""
        for node_id in node_ids if len(node_ids) == 1 else ():
            # Exactly: the last unit may have fewer layers than others.
            if self._shape.n_bytes(self._shape.layers(start, end)) <= self._free[node_id]:
                return self._stages([node_id], [end - start], start)
        order = sorted(
            node_ids, key=lambda n: (n not in first, n in last and n not in first, self._regions[n], n)
        )
        for attempt in (order, self._roomy_at_ends(order, first, last), self._roomy_at_ends(order)):
            while attempt:
                units = self._shares(attempt, start, end)
                if units is None:
                    break
                if all(units):
                    return self._stages(attempt, units, start)
                attempt = [node_id for node_id, share in zip(attempt, units, strict=True) if share]
        return None

    def _roomy_at_ends(
        self, node_ids: Sequence[NodeId], first: Sequence[NodeId] = (), last: Sequence[NodeId] = ()
    ) -> list[NodeId]:
        """With the roomiest nodes at those ends where nobody has to be, for the embedding and the head."""
        ahead = [node_id for node_id in node_ids if node_id in first]
        behind = [node_id for node_id in node_ids if node_id in last and node_id not in first]
        roomy = sorted({*node_ids} - {*ahead, *behind}, key=lambda n: (-self._free[n], n))
        ahead, roomy = (ahead, roomy) if ahead else (roomy[:1], roomy[1:])
        behind, roomy = (behind, roomy) if behind else (roomy[:1], roomy[1:])
        return [*ahead, *roomy, *behind]

    def _shares(self, node_ids: Sequence[NodeId], start: int, end: int) -> list[int] | None:
        shape = self._shape
        unit_bytes = shape.unit * shape.layer_bytes
        capacities = []
        for i, node_id in enumerate(node_ids):
            ends = shape.embedding_bytes * (i == 0 and start == 0)
            ends += shape.head_bytes * (i == len(node_ids) - 1 and end == shape.n_units)
            capacities.append(max(0, (self._free[node_id] - ends) // unit_bytes))
        speeds = [1 / self._nodes[node_id].layer_s for node_id in node_ids]
        return water_fill(end - start, capacities, speeds)

    def _stages(self, node_ids: Sequence[NodeId], units: Sequence[int], start: int) -> list[NodeRange]:
        stages = []
        for node_id, share in zip(node_ids, units, strict=True):
            stages.append(NodeRange(self._shape.layers(start, start + share), node_id))
            start += share
        return stages

    def _take(self, stages: Iterable[NodeRange]) -> None:
        for stage in stages:
            self._free[stage.node_id] -= self._shape.n_bytes(stage.layers)
            self._busy.add(stage.node_id)
