"""Decides which node fetches which layers of a file that nobody has whole: pure.

At first everybody fetches what it is going to hold. What a node cannot fetch goes to another one that can:
to the node that shares the file, else to the one with most disk space left. Layers that two nodes fetch are
not handed over when one of them fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from swarmllm.models import LayerRange, Manifest, merge, subtract
from swarmllm.node.sharing.share_plan import SharePlan
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import FILE_PARTS_MAX, FilePart


def first_parts(plan: SharePlan, layout: Manifest, own: NodeId) -> tuple[FilePart, ...]:
    """Empty: one node would hold all of it, or nobody could. The node that shares it (`own`) fetches
    something in any case: by the hashes of that, it takes part in finding out which model it is."""
    parts = [_part(part.node_id, layers) for part in plan.parts for layers in part.layers]
    if not plan.is_complete or len({part.node_id for part in parts}) < 2:
        return ()
    if not any(part.node_id == own for part in parts):
        start = layout.n_layers // 2 // layout.cut_alignment * layout.cut_alignment
        parts.append(_part(own, LayerRange(start, start + layout.cut_alignment)))
    return tuple(parts) if len(parts) <= FILE_PARTS_MAX else ()


def hand_over(
    parts: Iterable[FilePart], n_layers: int, gone: Collection[NodeId], takers: Sequence[NodeId]
) -> tuple[FilePart, ...] | None:
    """The parts without those of the nodes that are `gone`; what nobody else fetches, the first of `takers`
    does. None: nobody can."""
    kept = [part for part in parts if part.node_id not in gone]
    left = subtract([LayerRange(0, n_layers)], [layers_of(part) for part in kept])
    if not left:
        return tuple(kept)
    taker = next((node_id for node_id in takers if node_id not in gone), None)
    if taker is None:
        return None
    own = merge([*left, *(layers_of(part) for part in kept if part.node_id == taker)])
    others = [part for part in kept if part.node_id != taker]
    return (*others, *(_part(taker, layers) for layers in own))


def layers_of(part: FilePart) -> LayerRange:
    return LayerRange(part.start, part.end)


def _part(node_id: NodeId, layers: LayerRange) -> FilePart:
    return FilePart(node_id=node_id, start=layers.start, end=layers.end)
