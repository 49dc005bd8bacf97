"""Signatures in a swarm in one process: no node has a key, and any code that knows a node's id can make
them.
"""

from __future__ import annotations

from blake3 import blake3

from swarmllm.swarm.membership.signer import RowSigner
from swarmllm_proto.identifiers import NodeId

SIGNATURE_BYTES = 64


def in_memory_signature(node_id: NodeId, content: bytes) -> bytes:
    return blake3(node_id.encode() + content).digest(length=SIGNATURE_BYTES)


def is_in_memory_signature(node_id: NodeId, content: bytes, signature: bytes) -> bool:
    return signature == in_memory_signature(node_id, content)


def in_memory_signer(node_id: NodeId) -> RowSigner:
    return RowSigner(node_id, lambda content: in_memory_signature(node_id, content), is_in_memory_signature)
