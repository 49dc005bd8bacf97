"""Groups nodes by their announcements into those that give equal bits for the same rows of exact requests.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarmllm.models.layers import LayerRange, covers
from swarmllm_proto.identifiers import NodeId

CLASSES_MAX: Final = 8
"""Classes in which a route is looked for; how many there are is for others to say."""


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Nodes whose exact rows have equal bits: those of a class, or one node that announces none."""

    kernel_class: str
    node_id: NodeId | None = None

    @classmethod
    def of(cls, node_id: NodeId, kernel_class: str) -> KernelGroup:
        return cls(kernel_class) if kernel_class else cls("", node_id)

    def __str__(self) -> str:
        return self.kernel_class or f"unknown at {self.node_id}"


def alike(
    holders: Mapping[NodeId, Sequence[LayerRange]],
    classes: Mapping[NodeId, str],
    n_layers: int,
    origin: NodeId,
) -> dict[KernelGroup, dict[NodeId, tuple[LayerRange, ...]]]:
    """The holders of each class that has all layers: first that of the origin, then those with most nodes."""
    found: dict[KernelGroup, dict[NodeId, tuple[LayerRange, ...]]] = {}
    for node_id, ranges in holders.items():
        kernel_group = KernelGroup.of(node_id, classes.get(node_id, ""))
        found.setdefault(kernel_group, {})[node_id] = tuple(ranges)
    everything = LayerRange(0, n_layers)
    whole = {
        kernel_group: held
        for kernel_group, held in found.items()
        if covers([layers for ranges in held.values() for layers in ranges], everything)
    }
    first = sorted(whole, key=lambda each: (origin not in whole[each], -len(whole[each]), str(each)))
    return {kernel_group: whole[kernel_group] for kernel_group in first[:CLASSES_MAX]}
