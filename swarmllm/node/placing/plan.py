"""Decides which layers of a model this node should hold, and the next step towards that: pure.

All inputs of a plan come from records, this node's own included, so that all nodes plan from the same data.
Speeds change with every forward; they are rounded to powers of the square root of two, or the plan would
change with them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from msgspec import UNSET

from swarmllm.models import LayerRange, Manifest, covers, merge, subtract
from swarmllm.node.placing.accepted_shares import accepts
from swarmllm.pipeline.route.inputs import NetworkDistances, OwnLoad, route_inputs
from swarmllm.scheduling.coordinates import Coordinate
from swarmllm.scheduling.cost import Workload
from swarmllm.scheduling.placement import ModelShape, Placement, PlacementNode, place
from swarmllm.scheduling.speeds import Observations
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce

NO_NODE = NodeId("")
QUICKEST_S, SLOWEST_S = 1e-7, 100.0
"""Per layer and row: beyond, a node is wrong about itself or lies."""

HELD_MAX = 1024
"""Ranges that a plan counts, all nodes together. Each node's share is the same: its widest ones. A plan takes
half a second with that, and ten times as long with four times as many."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next; at most one of the two."""

    load: LayerRange | None = None
    drop: LayerRange | None = None
    waits_for: str = ""
    """Why nothing can be done, though something should."""


def shape_of(manifest: Manifest) -> ModelShape:
    sizes = dict.fromkeys(("layer", "embedding", "head", "header"), 0)
    for shard in manifest.shards:
        sizes[shard.kind] = max(sizes[shard.kind], shard.size_bytes)
    tied = sizes["embedding"] if manifest.tied_embedding else 0
    return ModelShape(
        manifest.n_layers,
        manifest.cut_alignment,
        max(1, sizes["layer"]),
        sizes["embedding"],
        sizes["head"] + tied,
    )


def plan_of(
    manifest: Manifest,
    records: Mapping[NodeId, NodeRecord],
    max_pipes: int | None,
    *,
    is_first: bool = False,
) -> Placement:
    """`records`: of this node and of those that are connected and trusted. `is_first`: of a model
    that is placed for the first time; then the plan is the one by which the first of them began to load."""
    model_id = manifest.model_id
    said = {
        node_id: announced
        for node_id, record in records.items()
        for announced in record.models
        if announced.model_id == model_id
    }
    involved = {
        node_id: record
        for node_id, record in records.items()
        if node_id in said or model_id in record.capability.placed_models
    }
    speeds = route_inputs(
        NO_NODE,
        manifest,
        Workload(),
        involved,
        {node_id: record.capability for node_id, record in involved.items()},
        NetworkDistances(),
        Observations(),
        OwnLoad(),
    ).speeds
    n_ranges = max(1, HELD_MAX // max(1, len(involved)))
    shape = shape_of(manifest)
    nodes = [
        _node(record, said.get(node_id), model_id, speeds[node_id].decode_s, n_ranges, shape)
        for node_id, record in involved.items()
    ]
    if is_first:
        nodes = [_with_nothing(node, shape) for node in nodes]
    if not covers([layers for node in nodes for layers in node.held], manifest.whole):
        nodes = [_with_fetched(node, involved[node.node_id], model_id, shape) for node in nodes]
    return place(shape, nodes, max_pipes)


def ready_layers(model_id: ModelId, records: Mapping[NodeId, NodeRecord]) -> tuple[LayerRange, ...]:
    """That some node holds; none of a model that is placed for the first time."""
    said = [each for record in records.values() for each in record.models if each.model_id == model_id]
    return merge(LayerRange(*pair) for each in said for pair in each.ranges)


def all_take_part(
    model_id: ModelId, records: Mapping[NodeId, NodeRecord], writers: Collection[NodeId]
) -> bool:
    """Whether all that accept a model which `writers` share have said so: no later news of them can change
    the first plan."""
    return all(
        model_id in record.capability.placed_models
        or not any(accepts(record.capability, writer) for writer in writers)
        for record in records.values()
    )


def is_followed(model_id: ModelId, records: Mapping[NodeId, NodeRecord], plan: Placement) -> bool:
    """Whether all that is held or being loaded is a part of the plan."""
    return all(
        covers(plan.targets.get(node_id, ()), LayerRange(*pair))
        for node_id, record in records.items()
        for announced in record.models
        if announced.model_id == model_id
        for pair in (*announced.ranges, *announced.loading)
    )


def next_step(
    held: tuple[LayerRange, ...],
    target: tuple[LayerRange, ...],
    pinned: tuple[LayerRange, ...],
    elsewhere: Iterable[LayerRange],
    free_bytes: int,
    shape: ModelShape,
) -> Step:
    """From what is held to what is wanted. `elsewhere`: what other connected nodes have ready; what none of
    them has is the last copy, and stays. `pinned` stays in any case. Loading comes first, so that there is
    never less in the swarm than before; where there is no room, dropping does."""
    wanted = subtract(target, held)
    surplus = subtract(subtract(held, target), pinned)
    safe = [layers for layers in surplus if covers(elsewhere, layers)]
    for layers in wanted:
        if shape.n_bytes(layers) <= free_bytes:
            return Step(load=layers)
    if safe:
        return Step(drop=safe[0])
    if wanted:
        return Step(waits_for=f"room for {wanted[0]}")
    if surplus:
        return Step(waits_for=f"another holder of {surplus[0]}")
    return Step()


def _node(
    record: NodeRecord,
    announced: ShardAnnounce | None,
    model_id: ModelId,
    layer_s: float,
    n_ranges: int,
    shape: ModelShape,
) -> PlacementNode:
    said, takes_part = record.capability, model_id in record.capability.placed_models
    held: tuple[LayerRange, ...] = ()
    pinned: tuple[LayerRange, ...] = ()
    if announced is not None:
        held = _widest((*announced.ranges, *announced.loading), n_ranges)
        pinned = _widest(announced.pinned, n_ranges)
    where = said.coordinate
    return PlacementNode(
        record.node_id,
        _room_bytes(record, held, model_id, shape),
        2 ** (round(2 * math.log2(min(SLOWEST_S, max(QUICKEST_S, layer_s)))) / 2),
        held,
        pinned,
        Coordinate(where.position_s, where.height_s, where.error) if where is not None else None,
        takes_part,
    )


def _with_nothing(node: PlacementNode, shape: ModelShape) -> PlacementNode:
    """Before it began to load. Else those that begin a moment later would find room for a further layer
    beside the layers that it is loading, and plan otherwise than it did."""
    n_bytes = sum(map(shape.n_bytes, node.held))
    return replace(node, held=(), pinned=(), free_bytes=node.free_bytes + n_bytes)


def _with_fetched(
    node: PlacementNode, record: NodeRecord, model_id: ModelId, shape: ModelShape
) -> PlacementNode:
    """Of a model that is not complete yet: a node that has fetched a part of it, and has room for that,
    counts as if it held it. Else the plan would change while the first nodes load, and ask for others, for
    which the disk has no room beside what was fetched."""
    on_disk = _on_disk(record, model_id)
    fetched = subtract(on_disk, list(node.held))
    n_bytes = sum(map(shape.n_bytes, fetched))
    is_whole = sum(map(len, on_disk)) == shape.n_layers
    if not (fetched and node.takes_part) or is_whole or n_bytes > node.free_bytes:
        return node
    return replace(node, held=merge([*node.held, *fetched]), free_bytes=node.free_bytes - n_bytes)


def _on_disk(record: NodeRecord, model_id: ModelId) -> tuple[LayerRange, ...]:
    said = [each for each in record.files if each.model_id == model_id]
    return merge(LayerRange(*pair) for each in said for pair in each.layers)


def _room_bytes(record: NodeRecord, held: Iterable[LayerRange], model_id: ModelId, shape: ModelShape) -> int:
    """Of memory, or of disk where that is less: what is on the disk already takes none."""
    said = record.capability
    if said.placing_free_disk_bytes is UNSET:
        return said.placing_free_bytes
    here_bytes = sum(map(shape.n_bytes, subtract(_on_disk(record, model_id), list(held))))
    return min(said.placing_free_bytes, said.placing_free_disk_bytes + here_bytes)


def _widest(pairs: Iterable[tuple[int, int]], n_ranges: int) -> tuple[LayerRange, ...]:
    """In the fewest ranges; where there are too many, those with most layers."""
    merged = merge(LayerRange(*pair) for pair in pairs)
    if len(merged) <= n_ranges:
        return merged
    return tuple(sorted(sorted(merged, key=lambda layers: (-len(layers), layers.start))[:n_ranges]))
