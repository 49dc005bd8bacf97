"""What waits in a session's queue, and how a message from another node gets there: as a job, or not at all,
with the field that is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from swarmllm.pipeline.job import ComputeStep, Job
from swarmllm.pipeline.stage.walker import RequestContext
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import LayerForward, PipelineError, ReplayRows
from swarmllm_proto.tensors import Tensor, decode_tensor


@dataclass(frozen=True, slots=True)
class Report:
    """To be sent to the origin by the session's own task."""

    error: PipelineError
    ends: bool


@dataclass(frozen=True, slots=True)
class Relay:
    """What this node's worker wants sent."""

    receiver: NodeId
    header: bytes
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """To be answered by this node's worker alone."""

    tokens: Tensor


Item: TypeAlias = Job | Report | Relay | GivenPrompt | ReplayRows


class NotFinite(BadTensor):
    """No layer computes this from what is finite: it came broken."""


def read_job(
    context: RequestContext, sender: NodeId, message: LayerForward, payload: memoryview, now_s: float
) -> Job:
    """Raises BadTensor."""
    job = Job(
        sender=sender,
        step=ComputeStep.EMBED if message.step == "embed" else ComputeStep.LAYER,
        stage=message.stage,
        position=message.position,
        n_tokens=message.n_tokens,
        prefill_left=message.prefill_left,
        timings=message.timings,
        since_s=now_s,
        resent=message.resent,
        until=message.until,
    )
    if message.until is not None and (message.until < message.stage or not message.prefill_left):
        raise BadTensor("until", "rows that end before the last stage are no token's, and get there")
    if message.step == "embed":
        if message.n_tokens != 1 or message.prefill_left:
            raise BadTensor("n_tokens", "a token is embedded alone")
        if message.token >= context.n_vocab:
            raise BadTensor("token", f"{message.token} of a vocabulary of {context.n_vocab}")
        job.token = message.token
        return job
    if len(message.timings) > message.stage:
        raise BadTensor("timings", "more stages than the job has passed")
    tensor = decode_tensor(payload)
    due = (message.n_tokens, context.n_embd)
    if tensor.dtype != np.float32 or tensor.shape != due:
        raise BadTensor("tensor.shape", f"{tensor.dtype}{tensor.shape} where float32{due} is due")
    if not message.n_tokens:
        raise BadTensor("n_tokens", "no rows")
    if not np.isfinite(tensor).all():
        raise NotFinite("tensor", "numbers that are not finite")
    job.tensor = tensor
    return job
