"""What the origin calls the blocks of a request, so that its stages can recognise a beginning they computed
before.

Stages of a chain see hidden states, not tokens; without a name they could not tell that two prompts begin
alike. A name is a hash, chained over blocks of 64 tokens (see `swarmllm_proto.blocks`), and it is made with
a secret that never leaves this process: a stage learns that two requests of this node begin alike, which it
would see in the hidden states anyway, and cannot look up a prompt that it guesses. Each stage is told the
names of its own layers only, and those are other ones for every range, so two stages cannot compare notes.
Nor can one node's names be used for another's: a stage keeps them apart by origin, because whoever chose the
names could call wrong rows by a right one.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes, secret_root
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc_kv import join_names
from swarmllm_proto.swarm import DIGEST_SIZE, NAMES_MAX, PipelineAssignment, Stage, StageBlocks
from swarmllm_proto.tensors import Tensor


class PrefixNames:
    """For one request. `secret`: 32 bytes, the same for all requests that are to recognise each other."""

    def __init__(self, secret: bytes, model_id: ModelId, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        self._roots = [secret_root(secret, model_id, stage.start, stage.end) for stage in stages]

    def of_node(self, node_id: NodeId, tokens: Tensor) -> tuple[StageBlocks, ...]:
        """Names of the complete blocks of `tokens`, for each of the node's stages; as many as the messages
        have room for."""
        mine = [index for index, stage in enumerate(self._stages) if stage.node_id == node_id]
        n_blocks = min(len(tokens) // BLOCK_TOKENS, NAMES_MAX // DIGEST_SIZE // max(1, len(mine)))
        if not n_blocks:
            return ()
        known = tokens[: n_blocks * BLOCK_TOKENS]
        return tuple(
            StageBlocks(index, join_names(extend_block_hashes(self._roots[index], known))) for index in mine
        )


def prefix_names(secret: bytes | None, assignment: PipelineAssignment) -> PrefixNames | None:
    """None where nothing is to be shared, or where every row of the prompt is wanted."""
    if secret is None or assignment.wants != "tokens":
        return None
    return PrefixNames(secret, assignment.model_id, assignment.stages)
