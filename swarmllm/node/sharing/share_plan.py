"""Forecasts how a model would be shared out: who takes which layers, how fast, after how long.

The nodes will make the same plan once the model is in this node's record; here it is made beforehand from the
current records, as if all nodes that accept this node's shares took part already. Records are believed about
capacity and speed, as in the plan: a liar makes the forecast wrong, and then fails to deliver. No I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from swarmllm.models import LayerRange, Manifest, merge, subtract
from swarmllm.node.placing.accepted_shares import accepts
from swarmllm.node.placing.plan import NO_NODE, plan_of, shape_of
from swarmllm.pipeline.route.inputs import NetworkDistances, OwnLoad, route_inputs, workload
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.holdings import NodeRange
from swarmllm.scheduling.speeds import Observations
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import NodeCapability, NodeRecord


@dataclass(frozen=True, slots=True)
class SharePart:
    node_id: NodeId
    layers: tuple[LayerRange, ...]
    """Empty: it takes part, and nothing is left for it or it has no room."""
    n_bytes: int
    """Of their weights in memory."""
    fetch_bytes: int
    """Of these, what is not on its disk yet."""
    room_bytes: int
    """That it has for the model, what it holds of it included."""


@dataclass(frozen=True, slots=True)
class SharePlan:
    model_id: ModelId
    size_bytes: int
    """In memory, on one node."""
    is_complete: bool
    """The parts cover every layer."""
    parts: tuple[SharePart, ...]
    """Of all that take part, in the order of their layers."""
    tokens_per_s: float | None
    """Expected of one request on the best pipeline; None: there is none."""
    transfer_s: float
    """Until everybody has its layers, over lines of the measured speed, or of 1 Gbit/s."""
    is_transfer_measured: bool
    refusing: tuple[NodeId, ...]
    """Connected nodes that do not accept what this node shares."""


def plan_share(
    manifest: Manifest,
    own: NodeId,
    records: Mapping[NodeId, NodeRecord],
    max_pipes: int | None,
    own_room: tuple[int, int],
) -> SharePlan:
    """`records`: of this node and of those that are connected and trusted. `own_room`: bytes of memory and of
    disk that this node would give."""
    model_id, shape = manifest.model_id, shape_of(manifest)
    refusing = tuple(
        node_id
        for node_id, record in sorted(records.items())
        if node_id != own and not _takes_part(record, model_id, own)
    )
    supposed = {
        node_id: _taking_part(record, model_id, own_room if node_id == own else None)
        if node_id not in refusing
        else record
        for node_id, record in records.items()
    }
    placement = plan_of(manifest, supposed, max_pipes)
    parts = []
    for node_id, layers in placement.targets.items():
        here = _on_disk(records[node_id], model_id)
        n_bytes = sum(map(shape.n_bytes, layers))
        fetch_bytes = sum(map(shape.n_bytes, subtract(layers, here)))
        held = merge(LayerRange(*pair) for pair in _held(records[node_id], model_id))
        room_bytes = supposed[node_id].capability.placing_free_bytes + sum(map(shape.n_bytes, held))
        parts.append(SharePart(node_id, layers, n_bytes, fetch_bytes, room_bytes))
    parts.sort(key=lambda part: (not part.layers, part.layers, part.node_id))
    lines = route_inputs(
        NO_NODE,
        manifest,
        workload(manifest, 0, 1),
        supposed,
        {node_id: record.capability for node_id, record in supposed.items()},
        NetworkDistances(),
        Observations(),
        OwnLoad(),
    )
    step_s = min((_step_s(stages, lines) for stages in placement.pipelines), default=None)
    fetching = {part.node_id: part.fetch_bytes for part in parts if part.fetch_bytes and part.node_id != own}
    return SharePlan(
        model_id,
        shape.n_bytes(manifest.whole),
        bool(placement.pipelines),
        tuple(parts),
        1 / step_s if step_s else None,
        _transfer_s(fetching, own, lines),
        all((own, n) in lines.pair_bytes_per_s or (n, own) in lines.pair_bytes_per_s for n in fetching),
        refusing,
    )


def _takes_part(record: NodeRecord, model_id: ModelId, own: NodeId) -> bool:
    return model_id in record.capability.placed_models or accepts(record.capability, own)


def _taking_part(record: NodeRecord, model_id: ModelId, room: tuple[int, int] | None) -> NodeRecord:
    said = record.capability
    changes: dict[str, object] = {"placed_models": tuple({*said.placed_models, model_id})}
    if room is not None:
        changes |= {"placing_free_bytes": room[0], "placing_free_disk_bytes": room[1]}
    capability: NodeCapability = msgspec.structs.replace(said, **changes)
    return msgspec.structs.replace(record, capability=capability)


def _held(record: NodeRecord, model_id: ModelId) -> tuple[tuple[int, int], ...]:
    return next((each.ranges for each in record.models if each.model_id == model_id), ())


def _on_disk(record: NodeRecord, model_id: ModelId) -> tuple[LayerRange, ...]:
    said = [each for each in record.files if each.model_id == model_id]
    return merge(LayerRange(*pair) for each in said for pair in each.layers)


def _step_s(stages: tuple[NodeRange, ...], lines: RouteInputs) -> float:
    """One token of one request, as routes count it."""
    way = [stage.node_id for stage in stages]
    compute_s = sum(len(stage.layers) * lines.layer_s(stage.node_id) for stage in stages)
    hops_s = sum(lines.hop_s(a, b) for a, b in itertools.pairwise(way))
    return compute_s + hops_s + lines.closing_s(way[-1], way[0])


def _transfer_s(fetching: Mapping[NodeId, int], own: NodeId, lines: RouteInputs) -> float:
    """All fetch at once from this node, whose line they have between them."""
    if not fetching:
        return 0.0
    rates = {node_id: lines.bytes_per_s(own, node_id) for node_id in fetching}
    alone_s = max(n_bytes / rates[node_id] for node_id, n_bytes in fetching.items())
    return max(alone_s, sum(fetching.values()) / max(rates.values()))
