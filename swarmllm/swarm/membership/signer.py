"""Signs statements about rows with the node's key, and verifies those of other nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from swarmllm.swarm.membership.identity import Identity, load_or_create_identity, verify
from swarmllm_proto.identifiers import NodeId


class RowSigner(Protocol):
    @property
    def node_id(self) -> NodeId: ...

    def sign(self, content: bytes) -> bytes: ...

    def verify(self, node_id: NodeId, content: bytes, signature: bytes) -> bool:
        """Whether the owner of `node_id` signed this. Never raises."""
        ...


class IdentitySigner:
    """Signs with the key of this node's identity."""

    def __init__(self, identity: Identity) -> None:
        self.node_id = identity.node_id
        self.sign = identity.sign

    def verify(self, node_id: NodeId, content: bytes, signature: bytes) -> bool:
        return verify(node_id, content, signature)


def open_signer(data_dir: Path) -> RowSigner:
    """Blocking. Raises ConfigError as `load_or_create_identity` does."""
    return IdentitySigner(load_or_create_identity(data_dir))
