"""The names of a whole prompt's blocks, which nodes only ever make bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

from swarmllm_proto.blocks import extend_block_hashes, root_hash


def block_hashes(model_id: str, start: int, end: int, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Of all complete blocks, for layers [start, end) of a model."""
    return extend_block_hashes(root_hash(model_id, start, end), tokens)
