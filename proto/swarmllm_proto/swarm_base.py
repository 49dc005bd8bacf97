"""What all messages between nodes are made of (see `swarm`)."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from swarmllm_proto.identifiers import Digest as Digest
from swarmllm_proto.identifiers import ModelId as ModelId
from swarmllm_proto.identifiers import NodeId as NodeId

WIRE_VERSION: Final = 1
"""The `v` of every message. A reader ignores fields it does not know and refuses another version."""

DIGEST_SIZE: Final = 32
"""BLAKE3's."""
NAMES_MAX: Final = 32768
"""Bytes of names in one list: 1024 blocks, half of a job message's header."""

ShortText = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TensorName = Annotated[str, Meta(max_length=512)]
