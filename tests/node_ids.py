"""Node ids of the tests, named by letters and in their order.

Of nodes that are alike, A prefers those with the earlier letter: what an origin adds to the cost of a node
depends on both ids, and these were chosen so that it grows from B to F.
"""

from __future__ import annotations

from string import ascii_lowercase
from typing import Final

from swarmllm.swarm.in_memory import network
from swarmllm_proto.identifiers import NodeId


def node_id_named(letter: str) -> NodeId:
    return network.node_id_named(f"{letter}12")


A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z = map(  # noqa: E741
    node_id_named, ascii_lowercase
)
NODE_A: Final = node_id_named("node-a")
"""The node of the tests of the API."""
NODE_B: Final = node_id_named("node-b")
LIAR: Final = node_id_named("liar")
LAST: Final = node_id_named("last")
