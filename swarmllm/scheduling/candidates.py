"""Selects the parts of held ranges that a search for a route looks at.

A route may run any part of a held range between two allowed cuts. Few of those parts have to be looked at.
Computing is linear in layers, so giving layers of two neighbouring stages to the quicker node never makes a
route slower, and the boundary can move until the range of the first node ends or that of the second begins.
So ranges are cut into pieces where some node's range begins or ends, and a route changes nodes only where
its first node's range ends or its second node's begins.

(A stage that is only there because two nodes are nearer to it than to each other could be placed anywhere.
It is placed at such a boundary, too.)

A search costs one step for each two ranges between which a route may change. Honest swarms stay below
`PAIRS_MAX`: a thousand nodes that hold a twentieth of the model each come to 47,500 if all have the same
cuts, and to four times as many if they have not. Beyond it somebody holds ranges in many cuts, and of each
node only its widest ranges stay. Nodes lose equally: nobody's ranges push out another node's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from swarmllm.models.layers import LayerRange, merge
from swarmllm_proto.identifiers import NodeId

PAIRS_MAX: Final = 2**18
NODE_RANGES: Final = (8, 4, 2, 1)
"""Of each node, tried in turn. Two of each always suffice for 256 nodes, as many as connect."""


class CandidatePiece(NamedTuple):
    """Layers [start, end) on one node; `begins` and `ends`: its held range begins or ends with it."""

    start: int
    end: int
    node_id: NodeId
    begins: bool
    ends: bool


def runnable(ranges: Iterable[LayerRange], n_layers: int, cut_alignment: int) -> tuple[LayerRange, ...]:
    """The widest ranges that a pipeline of this model may contain, and with them every part of theirs between
    allowed cuts; in order, and no two of them meet.

    `cut_alignment`: cuts are allowed at multiples of it, 0 forbids any.
    """
    if cut_alignment == 0:
        whole = LayerRange(0, n_layers)
        return (whole,) if whole in ranges else ()
    aligned = []
    for layers in ranges:
        start, end = layers.start, layers.end
        if end > n_layers:
            continue
        start += -start % cut_alignment
        if end < n_layers:
            end -= end % cut_alignment
        if start < end:
            aligned.append(layers if (start, end) == (layers.start, layers.end) else LayerRange(start, end))
    return merge(aligned) if len(aligned) > 1 else tuple(aligned)


def pieces_of(held: Mapping[NodeId, Iterable[LayerRange]]) -> list[CandidatePiece]:
    """In order; no two ranges of a node in `held` may meet (see `runnable`)."""
    ranges = [(layers.start, layers.end, node_id) for node_id, each in held.items() for layers in each]
    bounds = sorted({at for start, end, _ in ranges for at in (start, end)})
    pieces = []
    for start, end, node_id in ranges:
        first, last = bisect_left(bounds, start), bisect_left(bounds, end)
        pieces += [
            CandidatePiece(bounds[at], bounds[at + 1], node_id, at == first, at + 1 == last)
            for at in range(first, last)
        ]
    return sorted(pieces)


def n_pairs(held: Iterable[Iterable[LayerRange]]) -> int:
    """How often a route may change from one range to another: the steps of a search."""
    starting: Counter[int] = Counter()
    ending: Counter[int] = Counter()
    for ranges in held:
        for layers in ranges:
            starting[layers.start] += 1
            ending[layers.end] += 1
    n_found = n_open = 0
    for at in sorted(starting.keys() | ending.keys()):
        n_through = n_open - ending[at]
        n_found += ending[at] * (starting[at] + n_through) + n_through * starting[at]
        n_open += starting[at] - ending[at]
    return n_found


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
