"""Computes a stage's rows again from what came in: by this node's own worker, or by another holder.

Another holder gets an ordinary assignment of a pipeline whose other stages are all at this node, and ordinary
jobs: it cannot tell them from a private pipeline's. Batches are those of the request itself, as far as the
origin knows them, because batches of 64 rows and more round otherwise than smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import trio

from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.sampling import STRETCH_ROWS
from swarmllm.pipeline.origin.assignment import assign
from swarmllm.pipeline.request_id import new_request_id
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.walker import RequestContext
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import encode_job
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import CancelInference, LayerForward, PipelineAssignment, Stage
from swarmllm_proto.tensors import Tensor, decode_tensor, encode_tensor

JOB_TIMEOUT_S = 60.0
ACK_TIMEOUT_S = 10.0


def batches(n_rows: int, n_prompt: int, chunk_tokens: int) -> Iterator[slice]:
    """Of rows [0, n_rows): the prompt's chunks, then rows that were computed one by one."""
    position = 0
    while position < n_rows:
        end = min(n_prompt, position + chunk_tokens) if position < n_prompt else position + STRETCH_ROWS
        end = min(end, n_rows)
        yield slice(position, end)
        position = end


@dataclass(frozen=True, slots=True)
class Task:
    """Rows of a stage that are to be computed again."""

    context: RequestContext
    layers: LayerRange
    came_in: Tensor
    """f32 [n, n_embd], from position 0 on; or i32 [n], tokens, where the first layer is among them."""
    n_rows: int
    """At the end, whose results are wanted."""
    chunk_tokens: int

    def batches(self) -> Iterator[slice]:
        return batches(len(self.came_in), self.context.n_given_tokens, self.chunk_tokens)


async def compute_here(compute: Compute, task: Task) -> Tensor:
    """f32 [n_rows, n_embd]. Raises SwarmLLMError."""
    model, request_id = task.context.model, new_request_id()
    results: list[Tensor] = []
    try:
        for part in task.batches():
            result = await compute.forward(
                model,
                request_id=request_id,
                layers=task.layers,
                position=part.start,
                tensor=task.came_in[part],
                want="hidden",
                n_prompt_tokens=len(task.came_in),
            )
            if result.tensor is None:
                raise RemoteError("the worker gave no rows")
            results.append(np.array(result.tensor))
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(ACK_TIMEOUT_S):
            await compute.cancel(model.model_id, request_id)
    return np.concatenate(results)[-task.n_rows :]


@dataclass(slots=True)
class Replies:
    """What other holders send back, by request."""

    _waiting: dict[str, trio.MemorySendChannel[tuple[NodeId, LayerForward, bytes]]] = field(
        default_factory=dict
    )

    def take(self, sender: NodeId, message: LayerForward, payload: memoryview) -> bool:
        """False: nobody waits for it."""
        channel = self._waiting.get(message.request_id)
        if channel is None:
            return False
        try:
            channel.send_nowait((sender, message, bytes(payload)))
        except trio.WouldBlock:
            return False
        return True

    async def compute_at(self, node_id: NodeId, router: Router, task: Task) -> Tensor:
        """f32 [n_rows, n_embd], as that node computes them. Raises SwarmLLMError."""
        assignment, index = _private_pipeline(router.node_id, node_id, task)
        request_id = assignment.request_id
        await assign(router, assignment, timeout_s=ACK_TIMEOUT_S)
        send, receive = trio.open_memory_channel[tuple[NodeId, LayerForward, bytes]](1)
        self._waiting[request_id] = send
        results: list[Tensor] = []
        try:
            for part in task.batches():
                rows = task.came_in[part]
                job = LayerForward(
                    request_id=request_id,
                    step="layer",
                    stage=index,
                    position=part.start,
                    n_tokens=len(rows),
                    prefill_left=max(1, len(task.came_in) - part.stop),
                )
                await router.send(node_id, *encode_job(job, encode_tensor(rows)))
                with trio.fail_after(JOB_TIMEOUT_S):
                    results.append(_rows_of(job, rows.shape, node_id, *await receive.receive()))
        except trio.TooSlowError:
            raise RemoteError(f"node {node_id} did not compute the rows in time") from None
        finally:
            del self._waiting[request_id]
            with trio.CancelScope(shield=True), trio.move_on_after(ACK_TIMEOUT_S), suppress(SwarmLLMError):
                await router.send(node_id, *encode_job(CancelInference(request_id=request_id)))
        return np.concatenate(results)[-task.n_rows :]


def _private_pipeline(here: NodeId, node_id: NodeId, task: Task) -> tuple[PipelineAssignment, int]:
    """With the index of the other node's stage."""
    layers, n_layers = task.layers, task.context.view.stages[-1].end
    stages = [
        Stage(node_id=node, start=start, end=end)
        for node, start, end in (
            (here, 0, layers.start),
            (node_id, layers.start, layers.end),
            (here, layers.end, n_layers),
        )
        if start < end
    ]
    assignment = PipelineAssignment(
        request_id=new_request_id(),
        model_id=task.context.model.model_id,
        origin=here,
        stages=tuple(stages),
        n_prompt_tokens=len(task.came_in),
        sampling=Sampling(),
    )
    return assignment, int(layers.start > 0)


def _rows_of(
    job: LayerForward,
    shape: tuple[int, ...],
    node_id: NodeId,
    sender: NodeId,
    answer: LayerForward,
    payload: bytes,
) -> Tensor:
    if sender != node_id or answer.position != job.position or answer.n_tokens != job.n_tokens:
        raise RemoteError(f"node {node_id} sent other rows than those it was asked for")
    try:
        rows = decode_tensor(payload)
    except BadTensor as error:
        raise RemoteError(f"node {node_id} sent what is no tensor: {error}") from None
    if rows.dtype != np.float32 or rows.shape != shape:
        raise RemoteError(f"node {node_id} sent rows of another shape")
    return rows
