"""Which held ranges a route is chosen from, where there are more of them than a search has time for.

A search costs one step for each two ranges between which a route may change. Honest swarms stay below
`PAIRS_MAX`: a thousand nodes that hold a twentieth of the model each come to 47,500 if all have the same
cuts, and to four times as many if they have not. Beyond it somebody holds ranges in many cuts, and of each
node only its widest ranges stay. Nodes lose equally: nobody's ranges push out another node's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.pieces import n_pairs, runnable
from swarmllm_proto.identifiers import NodeId

PAIRS_MAX: Final = 2**18
NODE_RANGES: Final = (8, 4, 2, 1)
"""Of each node, tried in turn. Two of each always suffice for 256 nodes, as many as connect."""


def candidates(
    n_layers: int,
    cut_alignment: int,
    holders: Mapping[NodeId, Iterable[LayerRange]],
    whole: Collection[NodeId],
) -> dict[NodeId, list[LayerRange]]:
    """By node id, all that is held, or where that is too much, some of what a pipeline of this model may
    contain. Of the nodes in `whole` everything usable stays."""
    all_held = {node: list(ranges) for node, ranges in holders.items()}
    found = {node: list(runnable(ranges, n_layers, cut_alignment)) for node, ranges in all_held.items()}
    if n_pairs(found.values()) <= PAIRS_MAX:
        return all_held
    for n_ranges in NODE_RANGES:
        found = {
            node: ranges if node in whole else sorted(ranges, key=_widest_first)[:n_ranges]
            for node, ranges in found.items()
        }
        if n_pairs(found.values()) <= PAIRS_MAX:
            break
    return found


def _widest_first(layers: LayerRange) -> tuple[int, int]:
    return -len(layers), layers.start
