"""Signs with the node's key, and checks what others signed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from swarmllm.swarm.membership.identity import load_or_create_identity, verify
from swarmllm_proto.identifiers import NodeId, Sign, Verify


@dataclass(frozen=True, slots=True)
class RowSigner:
    node_id: NodeId
    sign: Sign = field(repr=False)
    verify: Verify = field(default=verify, repr=False)


def open_signer(data_dir: Path) -> RowSigner:
    """Blocking. Raises ConfigError as `load_or_create_identity` does."""
    identity = load_or_create_identity(data_dir)
    return RowSigner(identity.node_id, identity.sign)
