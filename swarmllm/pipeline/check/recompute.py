"""Computes a stage's rows again from what came in: by this node's own worker, or by another holder.

Another holder gets an ordinary assignment of a pipeline whose other stages are all at this node, and ordinary
jobs: it cannot tell them from a private pipeline's. Batches are those of the request itself, as far as the
origin knows them, because batches of 64 rows and more round differently from smaller ones.

To measure how much rounding matters in these rows, they are computed a second time in another way: in other
batches, or, where there are fewer than 64 rows or another holder chooses its batches itself, as an exact
request, whose attention rounds differently.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np
import trio

from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.equal_bits import exact_batches
from swarmllm.pipeline.check.sampling import STRETCH_ROWS
from swarmllm.pipeline.check.verdict import Sampled, TokenEvidence
from swarmllm.pipeline.origin.assignment import assign
from swarmllm.pipeline.request import RequestContext, new_request_id
from swarmllm.pipeline.stage.compute import Compute, SampledToken
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import encode_job
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.fingerprints import decode_fingerprint
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import KvType, Sampling, TokenAgain
from swarmllm_proto.swarm import (
    CancelInference,
    JobMessage,
    LayerForward,
    PipelineAssignment,
    PipelineError,
    PrefillProgress,
    Stage,
    StreamingToken,
)
from swarmllm_proto.tensors import Tensor, decode_tensor, encode_tensor

JOB_TIMEOUT_S = 60.0
REPLIES_MAX = 24
"""More than the tokens of a check, which come as fast as they are made."""
ACK_TIMEOUT_S = 10.0
TILED_ROWS = 64
"""Batches of so many rows are computed otherwise than smaller ones, and round otherwise."""


def batches(n_rows: int, n_prompt: int, chunk_tokens: int) -> Iterator[slice]:
    """Of rows [0, n_rows): the prompt's chunks, then rows that were computed one by one."""
    position = 0
    while position < n_rows:
        end = min(n_prompt, position + chunk_tokens) if position < n_prompt else position + STRETCH_ROWS
        end = min(end, n_rows)
        yield slice(position, end)
        position = end


def regrouped(n_rows: int, n_prompt: int, chunk_tokens: int) -> Iterator[slice]:
    """The same rows in larger batches where `batches` has fewer than 64 at once, else in smaller ones."""
    position = 0
    small = chunk_tokens >= TILED_ROWS
    while position < n_rows:
        is_small = small and position < n_prompt
        end = min(position + (STRETCH_ROWS if is_small else 2 * TILED_ROWS), n_rows)
        end = min(end, n_prompt) if is_small else end
        yield slice(position, end)
        position = end


@dataclass(frozen=True, slots=True)
class RecomputeTask:
    """Rows of a stage that are to be computed again."""

    context: RequestContext
    layers: LayerRange
    came_in: Tensor
    """f32 [n, n_embd], from position 0 on; or i32 [n], tokens, where the first layer is among them."""
    n_rows: int
    """At the end, whose results are wanted."""
    chunk_tokens: int
    is_regrouped: bool = False
    """In another way than the request's."""
    kv_type: KvType | None = None
    """Keys and values are to be kept in this way, and all rows to be computed as those of the prompt of an
    exact request; None: as the worker does. Of a task for this node's own worker."""

    def batches(self) -> Iterator[slice]:
        if self.exact_rows:
            n_rows = len(self.came_in)
            return exact_batches(n_rows, n_rows - self.n_after_prompt, self.chunk_tokens)
        grouped = regrouped if self.is_regrouped else batches
        return grouped(len(self.came_in), self.context.n_given_tokens, self.chunk_tokens)

    @property
    def exact_rows(self) -> int:
        """Rows that the request has at most, where they are computed as those of an exact one; 0: not so."""
        if self.kv_type is not None:
            return len(self.came_in)
        return _exact_rows(self.context, len(self.came_in), len(self.came_in), self.is_regrouped)

    @property
    def sampling(self) -> Sampling:
        """What another holder is told."""
        if not self.exact_rows:
            return Sampling()
        asked, n_rows = self.context.sampling, len(self.came_in)
        return Sampling(max_tokens=asked.max_tokens if asked.exact else n_rows, exact=True)

    @property
    def n_after_prompt(self) -> int:
        """Of an exact request: the last so many rows are computed one by one."""
        if self.kv_type is not None:
            return 0
        return max(0, len(self.came_in) - self.context.n_prompt_rows) if self.exact_rows else 0


def _exact_rows(context: RequestContext, n_silent: int, n_rows: int, is_regrouped: bool) -> int:
    """Rows that there are at most, where they are computed as those of an exact request; 0: not so.
    `n_silent`: those that give no token."""
    if not is_regrouped:
        return context.exact_rows
    # Of too few rows no other batches round otherwise.
    return n_rows if not context.exact_rows and n_silent < TILED_ROWS else 0


async def compute_here(compute: Compute, task: RecomputeTask) -> Tensor:
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
                n_prompt_tokens=len(task.came_in) - task.n_after_prompt,
                exact_rows=task.exact_rows,
                kv_type=task.kv_type,
            )
            if result.tensor is None:
                raise RemoteError("the worker gave no rows")
            results.append(np.array(result.tensor))
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(ACK_TIMEOUT_S):
            await compute.cancel(model.model_id, request_id)
    return np.concatenate(results)[-task.n_rows :]


@dataclass(frozen=True, slots=True)
class TokenTask:
    """Tokens of a last stage that are to be sampled again."""

    context: RequestContext
    evidence: TokenEvidence
    chunk_tokens: int
    is_regrouped: bool = False
    """The rows before the tokens, in another way than the request's."""

    @property
    def layers(self) -> LayerRange:
        return self.context.view.layers(self.context.view.last)

    @property
    def sampling(self) -> Sampling:
        """As asked for, but nothing ends it, and the likeliest tokens are told."""
        sampling, max_tokens = self.context.sampling, 2**20
        if self.exact_rows:
            # There is room for no more rows of an exact request than it had itself.
            n_tokens = len(self.evidence.before) + len(self.evidence.reported)
            max_tokens = sampling.max_tokens if sampling.exact else n_tokens + 1
        return msgspec.structs.replace(
            sampling,
            exact=self.exact_rows > 0,
            max_tokens=max_tokens,
            stop=(),
            logprobs=True,
            top_logprobs=20,
        )

    @property
    def exact_rows(self) -> int:
        """As of RecomputeTask."""
        return _exact_rows(self.context, self.n_silent, len(self.rows), self.is_regrouped)

    @property
    def rows(self) -> Tensor:
        """All that came in, f32 [n, n_embd], or where the stage has all layers the tokens, i32 [n]."""
        evidence = self.evidence
        if evidence.came_in.ndim > 1:
            return evidence.came_in
        return np.concatenate(
            (evidence.came_in, np.array([*evidence.before, *evidence.reported[:-1]], np.int32))
        )

    @property
    def is_whole(self) -> bool:
        """The stage has all layers."""
        return self.evidence.came_in.ndim == 1

    @property
    def n_silent(self) -> int:
        """Rows before the first that gave one of the tokens."""
        return len(self.rows) - len(self.evidence.reported)

    def silent_batches(self) -> Iterator[slice]:
        """Of these."""
        if self.exact_rows:
            return exact_batches(self.n_silent, self.context.n_prompt_rows, self.chunk_tokens)
        grouped = regrouped if self.is_regrouped else batches
        return grouped(self.n_silent, self.context.n_given_tokens, self.chunk_tokens)

    def batches(self) -> Iterator[slice]:
        """The first rows give no token, each of the rest gives one."""
        yield from self.silent_batches()
        yield from (slice(at, at + 1) for at in range(self.n_silent, len(self.rows)))

    def samples(self, part: slice) -> bool:
        return bool(part.start >= self.n_silent)


async def sample_here(compute: Compute, task: TokenTask) -> list[Sampled]:
    """In order, all in one call, each after the tokens that were told. Raises SwarmLLMError."""
    model, request_id, n_silent, rows = task.context.model, new_request_id(), task.n_silent, task.rows
    layers, n_prompt, sampling = task.layers, task.context.n_prompt_tokens, task.sampling
    exact_rows = task.exact_rows
    try:
        for part in task.silent_batches():
            await compute.forward(
                model,
                request_id=request_id,
                layers=layers,
                position=part.start,
                tensor=rows[part],
                want="none",
                n_prompt_tokens=n_prompt,
                exact_rows=exact_rows,
            )
        result = await compute.forward(
            model,
            request_id=request_id,
            layers=layers,
            position=n_silent,
            tensor=rows[n_silent:],
            want="again",
            sampling=sampling,
            n_prompt_tokens=n_prompt,
            generated=task.evidence.before,
            scored=task.evidence.reported,
            exact_rows=exact_rows,
        )
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(ACK_TIMEOUT_S):
            await compute.cancel(model.model_id, request_id)
    return [sampled_again(each) for each in result.again]


def sampled_again(again: TokenAgain) -> Sampled:
    """What this node's worker said."""
    likeliest = tuple((each.token, each.logprob) for each in again.logprobs[1:])
    reported_logprob = again.logprobs[0].logprob if again.logprobs else None
    values = _fingerprint(again.fingerprint)
    return Sampled(again.token, likeliest, again.ends, values, reported_logprob, again.apart)


def as_sampled(token: SampledToken) -> Sampled:
    """What another holder said, who was asked for the likeliest tokens too."""
    likeliest = tuple((each.token, each.logprob) for each in token.logprobs[1:])
    return Sampled(
        token.token, likeliest, token.finish_reason == "stop", _fingerprint(token.fingerprint or b"")
    )


def _fingerprint(data: bytes) -> Tensor | None:
    try:
        return decode_fingerprint(data)
    except ValueError:
        return None


Reply = tuple[NodeId, JobMessage, bytes]


@dataclass(slots=True)
class Replies:
    """The answers of other holders, by request."""

    _waiting: dict[str, trio.MemorySendChannel[Reply]] = field(default_factory=dict)
    """By the id of the check's own assignment, which belongs to no client's request."""

    def take(self, sender: NodeId, message: JobMessage, payload: memoryview) -> bool:
        """False: nobody waits for it."""
        channel = self._waiting.get(message.request_id)
        if channel is None:
            return False
        try:
            channel.send_nowait((sender, message, bytes(payload)))
        except trio.WouldBlock:
            return False
        return True

    @asynccontextmanager
    async def assigned(
        self, node_id: NodeId, router: Router, assignment: PipelineAssignment
    ) -> AsyncIterator[trio.MemoryReceiveChannel[Reply]]:
        """What comes of an assignment, which is cancelled at the end. Raises SwarmLLMError, also for a
        TooSlowError inside."""
        await assign(router, assignment, timeout_s=ACK_TIMEOUT_S)
        request_id = assignment.request_id
        self._waiting[request_id], receive = trio.open_memory_channel[Reply](REPLIES_MAX)
        try:
            yield receive
        except trio.TooSlowError:
            raise RemoteError(f"node {node_id} did not compute the rows in time") from None
        finally:
            del self._waiting[request_id]
            with trio.CancelScope(shield=True), trio.move_on_after(ACK_TIMEOUT_S), suppress(SwarmLLMError):
                await router.send(node_id, *encode_job(CancelInference(request_id=request_id)))

    async def compute_at(self, node_id: NodeId, router: Router, task: RecomputeTask) -> Tensor:
        """f32 [n_rows, n_embd], as that node computes them. Raises SwarmLLMError."""
        assignment, index = _private_pipeline(router.node_id, node_id, task)
        results: list[Tensor] = []
        async with self.assigned(node_id, router, assignment) as receive:
            for part in task.batches():
                rows = task.came_in[part]
                job = LayerForward(
                    request_id=assignment.request_id,
                    step="layer",
                    stage=index,
                    position=part.start,
                    n_tokens=len(rows),
                    prefill_left=max(1, len(task.came_in) - part.stop),
                )
                await router.send(node_id, *encode_job(job, encode_tensor(rows)))
                with trio.fail_after(JOB_TIMEOUT_S):
                    results.append(_rows_of(job, rows.shape, node_id, *await receive.receive()))
        return np.concatenate(results)[-task.n_rows :]

    async def sample_at(self, node_id: NodeId, router: Router, task: TokenTask) -> list[Sampled]:
        """In order, as that node samples them. Raises SwarmLLMError."""
        came_in = task.evidence.came_in
        assignment, index = _private_pipeline(router.node_id, node_id, task)
        found: list[Sampled] = []
        async with self.assigned(node_id, router, assignment) as receive:
            for part in task.batches():
                rows, samples = came_in[part], task.samples(part)
                job = LayerForward(
                    request_id=assignment.request_id,
                    step="layer",
                    stage=index,
                    position=part.start,
                    n_tokens=len(rows),
                    prefill_left=0 if samples else max(1, task.context.n_given_tokens - part.stop),
                )
                await router.send(node_id, *encode_job(job, encode_tensor(rows)))
                with trio.fail_after(JOB_TIMEOUT_S):
                    if samples:
                        found.append(await _next_token(receive, node_id, part.stop))
                        if found[-1].is_end:
                            break
                    else:
                        await _progress(receive, node_id, part.stop)
        return found


async def _progress(receive: trio.MemoryReceiveChannel[Reply], node_id: NodeId, position: int) -> None:
    while True:
        sender, message, _ = await receive.receive()
        if isinstance(message, PipelineError):
            raise RemoteError(f"node {node_id} cannot compute the rows: {message.kind}")
        if sender == node_id and isinstance(message, PrefillProgress) and message.position >= position:
            return


async def _next_token(receive: trio.MemoryReceiveChannel[Reply], node_id: NodeId, position: int) -> Sampled:
    """For the row at `position`. It comes for the origin, or for the first stage, which is here too."""
    while True:
        sender, message, _ = await receive.receive()
        if isinstance(message, PipelineError):
            raise RemoteError(f"node {node_id} cannot sample the tokens: {message.kind}")
        if sender == node_id and isinstance(message, StreamingToken):
            return as_sampled(message)
        if not isinstance(message, LayerForward) or message.step != "embed":
            continue
        if sender == node_id and message.position == position:
            return Sampled(message.token)


def _private_pipeline(
    here: NodeId, node_id: NodeId, task: RecomputeTask | TokenTask
) -> tuple[PipelineAssignment, int]:
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
    sampling = task.sampling
    if isinstance(task, RecomputeTask):
        n_prompt = len(task.came_in) - task.n_after_prompt
        # Of what a stage that is not the last one is told of the tokens, their number is all that counts.
        generated = (0,) * task.n_after_prompt
    else:
        n_prompt, generated = task.context.n_prompt_tokens, task.evidence.before
    assignment = PipelineAssignment(
        request_id=new_request_id(),
        model_id=task.context.model.model_id,
        origin=here,
        stages=tuple(stages),
        n_prompt_tokens=n_prompt,
        sampling=sampling,
        generated=generated,
    )
    return assignment, int(layers.start > 0)


def _rows_of(
    job: LayerForward,
    shape: tuple[int, ...],
    node_id: NodeId,
    sender: NodeId,
    answer: JobMessage,
    payload: bytes,
) -> Tensor:
    if not isinstance(answer, LayerForward):
        raise RemoteError(f"node {node_id} cannot compute the rows")
    if sender != node_id or answer.position != job.position or answer.n_tokens != job.n_tokens:
        raise RemoteError(f"node {node_id} sent other rows than those it was asked for")
    try:
        rows = decode_tensor(payload)
    except BadTensor as error:
        raise RemoteError(f"node {node_id} sent what is no tensor: {error}") from None
    if rows.dtype != np.float32 or rows.shape != shape:
        raise RemoteError(f"node {node_id} sent rows of another shape")
    return rows
