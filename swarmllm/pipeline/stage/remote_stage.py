"""Generating for another node: the stage's side of `remote`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import trio

from swarmllm.errors import WorkerError
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.walker import RequestContext, Walker
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.ipc import Token
from swarmllm_proto.swarm import RemoteGenerateRequest, StageTiming, StreamingToken
from swarmllm_proto.tensors import Tensor, decode_tensor


def read_prompt(context: RequestContext, message: RemoteGenerateRequest, payload: memoryview) -> Tensor:
    """i32 [n]: the prompt, and what was generated before. Raises BadTensor."""
    tokens = decode_tensor(payload)
    n_due = context.n_given_tokens
    if tokens.dtype != np.int32 or tokens.shape != (n_due,) or message.n_tokens != n_due:
        raise BadTensor("tensor.shape", f"{tokens.dtype}{tokens.shape} where int32({n_due},) is due")
    return tokens


async def generate_for_origin(
    context: RequestContext,
    compute: Compute,
    walker: Walker,
    tokens: Tensor,
    on_token: Callable[[], None],
) -> None:
    """Tell the origin every token, and with the last one how much of the prompt was known here. Raises
    SwarmLLMError."""
    since_s = trio.current_time()
    last: tuple[Token, bytes, StageTiming] | None = None
    async with compute.generate(
        context.model,
        request_id=context.request_id,
        tokens=tokens,
        sampling=context.sampling,
        n_generated=len(context.generated),
    ) as generation:
        async for token, piece in generation:
            now_s = trio.current_time()
            timing = StageTiming(0, token.compute_s, max(0.0, now_s - since_s))
            since_s = now_s
            on_token()
            if token.finish_reason is not None:
                last = token, piece, timing
            else:
                await walker.tell_origin(_told(context, token, timing), piece)
        if last is None:
            raise WorkerError("the worker ended a generation without a reason")
        done = generation.done
    token, piece, timing = last
    n_cached = done.n_cached_tokens if done is not None else 0
    await walker.tell_origin(_told(context, token, timing, n_cached), piece)


def _told(
    context: RequestContext, token: Token, timing: StageTiming, n_cached_tokens: int = 0
) -> StreamingToken:
    return StreamingToken(
        request_id=context.request_id,
        index=token.index,
        token=token.token,
        finish_reason=token.finish_reason,
        timings=(timing,),
        logprobs=token.logprobs,
        n_cached_tokens=n_cached_tokens,
        stopped_by=token.stopped_by,
    )
