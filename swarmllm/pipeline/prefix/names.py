"""Names of prompts' beginnings, by which a stage finds rows that it has from an earlier request.

Stages of a chain see hidden states, not tokens; without a name they could not tell that two prompts begin
alike. A name is a hash, chained over blocks of 64 tokens (see `swarmllm_proto.blocks`), and it is made with
a secret that never leaves this process: a stage learns that two requests of this node begin alike, which it
would see in the hidden states anyway, and cannot look up a prompt that it guesses. Each stage is told the
names of its own layers only, and those are other ones for every range, so two stages cannot compare notes.
Nor can one node's names be used for another's: a stage keeps them apart by origin, because an origin that
chose the names could call wrong rows by a right one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio
from blake3 import blake3

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.origin.pictures import PictureMark
from swarmllm.pipeline.request import OriginSide, RequestContext
from swarmllm.pipeline.stage.compute import Compute
from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes, secret_root
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.ipc.kv import join_names
from swarmllm_proto.swarm import DIGEST_SIZE, NAMES_MAX, PipelineAssignment, Stage, StageBlocks
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)
_ROUNDED = b"rows rounded before these layers".ljust(32)
_PICTURE = b"a picture begins in this block".ljust(32)
ANSWER_TIMEOUT_S = 2.0
"""A worker that is busy for longer is not asked any more: computing the prompt is always possible."""


class PrefixNames:
    """The names of one request's blocks. `secret`: 32 bytes, the same for all requests that share
    prefixes."""

    def __init__(
        self,
        secret: bytes,
        model_id: ModelId,
        stages: Sequence[Stage],
        row_formats: Sequence[RowFormat] = (),
        marks: Sequence[PictureMark] = (),
    ) -> None:
        """`row_formats`: how rows come to each stage. What is computed from rounded rows has other names.
        `marks`: of the prompt's pictures; what comes before one of them is named as if it were not there."""
        self._marks = tuple(marks)
        self.model_id = model_id
        self.stages = tuple(stages)
        self._secrets = []
        for index, stage in enumerate(self.stages):
            if row_formats and row_formats[index] == "q8_0":
                secret = blake3(secret, key=_ROUNDED).update(stage.start.to_bytes(4, "little")).digest()
            self._secrets.append(secret)

    def of_node(self, node_id: NodeId, tokens: Tensor) -> tuple[StageBlocks, ...]:
        """Names of the complete blocks of `tokens`, for each of the node's stages; as many as the messages
        have room for."""
        mine = [index for index, stage in enumerate(self.stages) if stage.node_id == node_id]
        n_blocks = min(len(tokens) // BLOCK_TOKENS, NAMES_MAX // DIGEST_SIZE // max(1, len(mine)))
        if not n_blocks:
            return ()
        known = tokens[: n_blocks * BLOCK_TOKENS]
        return tuple(StageBlocks(index, join_names(self.of_stage(index, known))) for index in mine)

    def of_stage(
        self, index: int, tokens: Tensor, layers: tuple[int, int] | None = None
    ) -> tuple[bytes, ...]:
        """Names of all complete blocks of `tokens` in a stage. `layers`: in these, [start, end), of which the
        stage's are a part, and to which rows come as they come to the stage."""
        start, end = layers or (self.stages[index].start, self.stages[index].end)
        root = secret_root(self._secrets[index], self.model_id, start, end)
        return marked_block_hashes(root, tokens, self._marks)

    def rounding(self, index: int) -> bytes:
        """Equal for stages whose rows were rounded at the same layers before."""
        return self._secrets[index]


def marked_block_hashes(root: bytes, tokens: Tensor, marks: Sequence[PictureMark]) -> tuple[bytes, ...]:
    """`extend_block_hashes`, but that the digest of each picture enters the chain before the block in which
    it begins: the ids in the place of its rows, 30 bits each, do not tell pictures of few rows apart well
    enough. Blocks before a picture have the names that they have without it."""
    names: list[bytes] = []
    previous, begin = root, 0
    for mark in marks:
        block = mark.position // BLOCK_TOKENS * BLOCK_TOKENS
        if block >= len(tokens):
            break
        names += extend_block_hashes(previous, tokens[begin:block])
        if block > begin:
            previous, begin = names[-1], block
        place = (mark.position - block).to_bytes(4, "little")
        previous = blake3(previous + mark.digest + place, key=_PICTURE).digest()
    names += extend_block_hashes(previous, tokens[begin:])
    return tuple(names)


def prefix_names(
    secret: bytes | None, assignment: PipelineAssignment, marks: Sequence[PictureMark] = ()
) -> PrefixNames | None:
    """None where nothing is to be shared, or where every row of the prompt is wanted."""
    if secret is None or assignment.wants != "tokens":
        return None
    return PrefixNames(secret, assignment.model_id, assignment.stages, assignment.row_formats or (), marks)


def last_names(side: OriginSide | None, node_id: NodeId) -> tuple[StageBlocks, ...]:
    """The block names that a node gets with the end of a request. None before the first token: the assignment
    brought the prompt's names, and a worker that still computes the prompt would have to answer before it
    hears of the cancellation."""
    return side.prefixes_of(node_id) if side is not None and side.has_begun else ()


async def give_names(compute: Compute, context: RequestContext, prefixes: Sequence[StageBlocks]) -> int:
    """Tell the worker what the request's rows are called in the stages that run here; of how many blocks
    every one of these stages has them. Never raises for a worker that cannot: that is 0."""
    view = context.view
    named = {each.stage: each.names for each in prefixes}
    mine = [stage for stage in range(len(view.stages)) if view.is_here(stage)]
    if not mine or not all(named.get(stage) for stage in mine):
        return 0
    scope = "" if view.origin == view.node_id else view.origin
    try:
        with trio.fail_after(ANSWER_TIMEOUT_S):
            n_blocks = [
                await compute.name_prefix(
                    context.model,
                    request_id=context.request_id,
                    layers=view.layers(stage),
                    names=named[stage],
                    scope=scope,
                )
                for stage in mine
            ]
    except (SwarmLLMError, trio.TooSlowError) as error:
        provoked_by(log, context.view.origin).info(
            "request %s begins at its first token: %s", context.request_id, error
        )
        return 0
    return min(n_blocks)
