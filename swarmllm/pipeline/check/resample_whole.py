"""Has another holder of all layers sample the tokens of a whole model on another node again.

No rows need to be fetched: the tokens are all that there is. The node that samples them again goes on by
itself, so its tokens are comparable up to the first one that differs; after that it begins again with the
tokens that were told. It chooses its batches itself; computing the same as an exact request shows how much
rounding matters.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import numpy as np
import trio

from swarmllm.errors import RemoteError
from swarmllm.pipeline.check.recompute import JOB_TIMEOUT_S, Replies, TokenTask, as_sampled
from swarmllm.pipeline.check.verdict import Sampled
from swarmllm.pipeline.request import new_request_id
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import encode_job
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import (
    PipelineAssignment,
    PipelineError,
    RemoteGenerateRequest,
    Stage,
    StreamingToken,
)
from swarmllm_proto.tensors import Tensor, encode_tensor

BEGINNINGS: Final = 5
"""So often it begins, which costs the prompt again where it is not kept."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the answer, sampled up to the first token that differs."""

    tokens: Tensor
    """i32, the prompt and what was generated before."""
    before: tuple[int, ...]
    reported: tuple[int, ...]
    sampling: Sampling


async def sample_whole_at(
    node_id: NodeId, replies: Replies, router: Router, task: TokenTask
) -> list[Sampled]:
    """In order, as that node samples them. Raises SwarmLLMError."""
    return await _in_parts(task, partial(_at, node_id, replies, router, task))


async def _in_parts(task: TokenTask, give: Callable[[_Part], Awaitable[list[Sampled]]]) -> list[Sampled]:
    evidence, found = task.evidence, list[Sampled]()
    for _ in range(BEGINNINGS):
        before, reported = (
            (*evidence.before, *evidence.reported[: len(found)]),
            evidence.reported[len(found) :],
        )
        if not reported:
            break
        tokens = np.concatenate((evidence.came_in, np.array(before, np.int32)))
        sampling = msgspec.structs.replace(
            task.sampling,
            max_tokens=len(before) + len(reported),
            exact=task.context.sampling.exact != task.is_regrouped,
        )
        newest = await give(_Part(tokens, before, reported, sampling))
        if not newest:
            break
        found += newest
    return found


async def _at(
    node_id: NodeId, replies: Replies, router: Router, task: TokenTask, part: _Part
) -> list[Sampled]:
    assignment = PipelineAssignment(
        request_id=new_request_id(),
        model_id=task.context.model.model_id,
        origin=router.node_id,
        stages=(Stage(node_id=node_id, start=task.layers.start, end=task.layers.end),),
        n_prompt_tokens=task.context.n_prompt_tokens,
        sampling=part.sampling,
        generated=part.before,
    )
    request = RemoteGenerateRequest(request_id=assignment.request_id, n_tokens=len(part.tokens))
    found: list[Sampled] = []
    async with replies.assigned(node_id, router, assignment) as receive:
        await router.send(node_id, *encode_job(request, encode_tensor(part.tokens)))
        with trio.fail_after(JOB_TIMEOUT_S):
            async for sender, message, _ in receive:
                if isinstance(message, PipelineError):
                    raise RemoteError(f"node {node_id} cannot sample the tokens: {message.kind}")
                if sender != node_id or not isinstance(message, StreamingToken):
                    continue
                if message.index != len(part.before) + len(found):
                    raise RemoteError(f"node {node_id} sent another token than the one it was asked for")
                found.append(as_sampled(message))
                is_last = len(found) == len(part.reported) or message.finish_reason is not None
                if is_last or message.token != part.reported[len(found) - 1]:
                    break
    return found
