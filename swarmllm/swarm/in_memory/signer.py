"""Signatures in a swarm in one process: no node has a key, and any code that knows a node's id can make
them.
"""

from __future__ import annotations

from blake3 import blake3

from swarmllm_proto.identifiers import NodeId

SIGNATURE_BYTES = 64


def in_memory_signature(node_id: NodeId, content: bytes) -> bytes:
    return blake3(node_id.encode() + content).digest(length=SIGNATURE_BYTES)


def is_in_memory_signature(node_id: NodeId, content: bytes, signature: bytes) -> bool:
    return signature == in_memory_signature(node_id, content)


class InMemorySigner:
    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id

    def sign(self, content: bytes) -> bytes:
        return in_memory_signature(self.node_id, content)

    def verify(self, node_id: NodeId, content: bytes, signature: bytes) -> bool:
        return is_in_memory_signature(node_id, content, signature)
