"""Decides which nodes have the projector of a model: pure, the same on every node from the same gossip.

A projector runs as a whole, beside whatever layers a node holds, and a node with one encodes pictures for
all. So nothing is balanced: there should be enough holders that one may leave, and a node that has one keeps
it. Where there are too few, the nodes with most room take it. A node that took it by this plan drops it when
there are enough others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from swarmllm_proto.identifiers import NodeId

HOLDERS_WANTED: Final = 2


@dataclass(frozen=True, slots=True)
class ProjectorNode:
    """A trusted node, as its record says."""

    node_id: NodeId
    free_bytes: int
    """For models that are placed there."""
    has_it: bool
    takes_part: bool
    """It lets the swarm decide what it holds of this model."""


def takers(nodes: Sequence[ProjectorNode], size_bytes: int, n_wanted: int) -> tuple[NodeId, ...]:
    """Who takes it, by room and then by node id; nobody where nobody has it. `size_bytes`: of its file, and
    about the memory that it takes."""
    holders = [node for node in nodes if node.has_it]
    if not holders or len(holders) >= n_wanted:
        return ()
    able = [node for node in nodes if node.takes_part and not node.has_it and node.free_bytes >= size_bytes]
    able.sort(key=lambda node: (-node.free_bytes, node.node_id))
    return tuple(node.node_id for node in able[: n_wanted - len(holders)])


def next_act(
    me: NodeId, nodes: Sequence[ProjectorNode], size_bytes: int, n_wanted: int, *, took_it: bool
) -> Literal["", "take", "drop"]:
    """What node `me` should do. `took_it`: it has it by this plan. Of several that may drop it, the one with
    the largest node id does, so that it never goes from all of them at once."""
    if me in takers(nodes, size_bytes, n_wanted):
        return "take"
    holders = sorted(node.node_id for node in nodes if node.has_it)
    return "drop" if took_it and len(holders) > n_wanted and holders[-1] == me else ""
