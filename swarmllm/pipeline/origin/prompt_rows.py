"""Requests that need only a prompt: its hidden states (embeddings), or the likelihood of its own tokens.

Scores never take the logits of more rows than a worker's batch has room for: the worker keeps only the
reported scores of each row. The last stage is told which tokens to score, so it knows the prompt; no other
request tells a stage the prompt.

Both work like a prefill that never ends: every chunk says that more follows, so the head samples nothing, and
each PrefillProgress brings the rows or scores of a chunk.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import trio
from msgspec import UNSET, UnsetType

from swarmllm.errors import InvalidRequest, RemoteError, SwarmLLMError
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.origin.attempts import Attempts, is_local
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.generation import (
    FetchedPrefix,
    PromptScores,
    Shape,
    SpeculationCounts,
    StageReport,
)
from swarmllm.pipeline.origin.lifecycle import ChainEvent
from swarmllm.pipeline.origin.output import Chunk, InvalidReport
from swarmllm.pipeline.origin.requests import Attempt, OriginRequest, OriginRequests
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm.pipeline.request import RequestContext, exact_chunk_tokens, further_id
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.compute import Compute, ForwardResult, SampledToken
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.codec import decode_scores
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling, Scores
from swarmllm_proto.swarm import PipelineAssignment, PrefillProgress, Stage
from swarmllm_proto.tensors import Tensor, decode_tensor

log = logging.getLogger(__name__)

FREEING_TIMEOUT_S = 1.0
T = TypeVar("T")
Chunked = TypeVar("Chunked", Tensor, Scores)


class PromptChain(Chain, Generic[Chunked]):
    """The origin's side of such a walk over several stages."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._chunks: list[Chunked] = []
        self._n_rows = 0

    async def chunks(self) -> list[Chunked]:
        """Of all rows, in order. Raises SwarmLLMError."""
        await self._wait(lambda: self.is_complete)
        return self._chunks

    def _read(self, message: PrefillProgress, payload: bytes | memoryview) -> Chunked:
        """Raises InvalidReport."""
        raise NotImplementedError

    def next_chunk(self) -> Chunk | None:
        chunk = super().next_chunk()
        return None if chunk is None else chunk._replace(left=chunk.left + 1)

    def _progress(self, message: PrefillProgress, payload: bytes | memoryview) -> None:
        chunk = self._read(message, payload)
        start = message.position - len(chunk)
        if not 0 <= start <= self._n_rows:
            raise InvalidReport(f"rows from {start} on where {self._n_rows} come next")
        if start == self._n_rows:
            self._chunks.append(chunk)
            self._n_rows += len(chunk)
        super()._progress(message, b"")
        if self._n_rows >= self.window.n_tokens:
            self._pass(ChainEvent.LAST)
            self._reader.unpark_all()
            assert self._session is not None
            self._session.stop()


class RowsChain(PromptChain[Tensor]):
    """f32 [n, n_embd] of each chunk."""

    async def all_rows(self) -> Tensor:
        """f32 [n_prompt_tokens, n_embd]. Raises SwarmLLMError."""
        return np.concatenate(await self.chunks())

    def _read(self, message: PrefillProgress, payload: bytes | memoryview) -> Tensor:
        try:
            rows = decode_tensor(payload).copy()
        except ProtocolError as error:
            raise InvalidReport(f"rows that cannot be read: {error}") from None
        is_sound = rows.dtype == np.float32 and rows.ndim == 2 and rows.shape[1] == self.context.n_embd
        if not is_sound or not np.isfinite(rows).all():
            raise InvalidReport(f"rows of {rows.dtype} {rows.shape}, or with numbers that are none")
        return rows


class ScoresChain(PromptChain[Scores]):
    """For each row the likelihood of the prompt's next token, and the likeliest tokens."""

    def _progress(self, message: PrefillProgress, payload: bytes | memoryview) -> None:
        if is_rows(payload, self.context.n_embd):  # No lie: it has ignored a field that it does not know.
            stage = self.context.view.stages[-1]
            self.fail(RemoteError(f"node {stage.node_id} runs a version that does not score prompts"))
            return
        super()._progress(message, payload)

    def _read(self, message: PrefillProgress, payload: bytes | memoryview) -> Scores:
        n_top = self.context.sampling.top_logprobs
        try:
            scores = decode_scores(payload, self._chunk_tokens, n_top)
        except ProtocolError as error:
            raise InvalidReport(f"scores that cannot be read: {error}") from None
        asked = self.context.scored[max(0, message.position - len(scores)) : message.position]
        if asked != tuple(row[0].token for row in scores):
            raise InvalidReport(f"scores of other tokens than those before {message.position}")
        if any(each.token >= self.context.n_vocab for row in scores for each in row):
            raise InvalidReport("scores of tokens that there are not")
        return scores


def is_rows(payload: bytes | memoryview, n_embd: int) -> bool:
    try:
        rows = decode_tensor(payload)
    except ProtocolError:
        return False
    return rows.dtype == np.float32 and rows.ndim == 2 and rows.shape[1] == n_embd


async def local_chunks(
    compute: Compute, context: RequestContext, tokens: Tensor, chunk_tokens: int
) -> AsyncGenerator[ForwardResult, None]:
    """The same where this node holds every layer, chunk by chunk. Raises SwarmLLMError."""
    try:
        for position in range(0, len(tokens), chunk_tokens):
            yield await compute.forward(
                context.model,
                request_id=context.request_id,
                layers=context.view.layers(0),
                position=position,
                tensor=tokens[position : position + chunk_tokens],
                want="scores" if context.scored else "normed",
                sampling=context.sampling if context.scored else None,
                n_prompt_tokens=len(tokens),
                scored=context.scored[position : position + chunk_tokens],
                exact_rows=context.exact_rows,
            )
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(FREEING_TIMEOUT_S):
            await compute.cancel(context.model.model_id, context.request_id)


async def with_one_retry(request_id: str, attempt: Callable[[set[NodeId]], Awaitable[T]]) -> T:
    """Of the client's request with this id. `attempt` adds to what it is given the node because of which it
    failed."""
    avoid: set[NodeId] = set()
    try:
        return await attempt(avoid)
    except RemoteError as error:
        log.info("rows of request %s are asked for once more: %s", request_id, error.message)
    return await attempt(avoid)


@dataclass(frozen=True, slots=True)
class Rows:
    values: Tensor
    """f32 [n, n_embd]."""
    stages: tuple[Stage, ...]
    """Where they were computed."""


class ScoredPrompt:
    """How likely the tokens of a prompt were, and how that was computed: a generation's source that gives no
    token."""

    is_rebuilt = False
    decode_s = 0.0
    n_generated = 0
    n_cached_tokens = 0
    fetched: FetchedPrefix | None = None
    guesses = SpeculationCounts()
    n_recoveries = 0
    n_rebuilt = 0
    is_exact = True
    recovery_s = 0.0

    def __init__(
        self, values: PromptScores, shape: Shape, route: tuple[StageReport, ...], prefill_s: float
    ) -> None:
        self.values = values
        self.shape = shape
        self.route = route
        self.prefill_s = prefill_s

    async def next(self) -> tuple[SampledToken, bytes]:
        raise SwarmLLMError("no token comes of a prompt that is only scored")


class RouteChooser(Protocol):
    async def __call__(
        self, entry: CatalogueEntry, avoid: Collection[NodeId], request: RequestSize, *, is_exact: bool
    ) -> Assembly:
        """Raises NoPipeline."""
        ...


class PromptRows:
    def __init__(
        self,
        node_id: NodeId,
        pool: Compute,
        settings: PipelineSettings,
        requests: OriginRequests,
        attempts: Attempts,
        assembly_for: RouteChooser,
    ) -> None:
        self._node_id = node_id
        self._pool = pool
        self._settings = settings
        self._requests = requests
        self._attempts = attempts
        self._assembly_for = assembly_for

    async def rows(self, request_id: str, tokens: Tensor, entry: CatalogueEntry, sampling: Sampling) -> Rows:
        """f32 [n, n_embd] of i32 [n]. Raises SwarmLLMError."""

        async def attempt(avoid: set[NodeId]) -> Rows:
            attempt = await self._attempt(request_id, tokens, entry, sampling, avoid)
            context = attempt.context
            with self._requests.under_way(attempt.request):
                if is_local(context):
                    async with aclosing(self._local(context, tokens)) as chunks:
                        values = np.concatenate([chunk.tensor async for chunk in chunks])
                else:
                    async with self._attempts.open_chain(attempt, RowsChain) as chain:
                        values = await chain.all_rows()
                return Rows(values, attempt.assembly.stages)

        return await with_one_retry(request_id, attempt)

    async def score(
        self, request_id: str, tokens: Tensor, entry: CatalogueEntry, sampling: Sampling, field: str
    ) -> ScoredPrompt:
        """Each token of i32 [n] but the first, and `sampling.top_logprobs` of the likeliest in its place.
        Raises SwarmLLMError; InvalidRequest, too, where no token of a prompt is to leave this node."""
        first = await self._pool.detokenize(ModelFile.of(entry), tokens[:1])
        scored = tuple(tokens[1:].tolist())
        # A prompt of one token goes through the model, too, so that nobody has to deal with no rows at all.
        rows, scored = (tokens[:-1], scored) if scored else (tokens, tuple(tokens.tolist()))

        async def attempt(avoid: set[NodeId]) -> ScoredPrompt:
            attempt = await self._attempt(request_id, rows, entry, sampling, avoid, scored)
            context = attempt.context
            if self._settings.local_embedding_privacy and not context.view.is_here(context.view.last):
                raise InvalidRequest(
                    "cannot be scored: the node of the last layers would have to be told its tokens, and"
                    " inference.local_embedding_privacy keeps them here.",
                    field=field,
                )
            started_s = trio.current_time()
            with self._requests.under_way(attempt.request):
                if is_local(context):
                    async with aclosing(self._local(context, rows)) as chunks:
                        parts = [chunk.scores async for chunk in chunks]
                    prefill_s = trio.current_time() - started_s
                    nickname = self._attempts.nickname(self._node_id)
                    layers = context.view.layers(0)
                    route: tuple[StageReport, ...] = (
                        StageReport(self._node_id, nickname, layers, prefill_s=prefill_s),
                    )
                else:
                    async with self._attempts.open_chain(attempt, ScoresChain) as chain:
                        parts = await chain.chunks()
                    prefill_s, route = trio.current_time() - started_s, chain.route
            others = tuple(row for part in parts for row in part) if len(tokens) > 1 else ()
            shape: Shape = "local" if is_local(context) else "chain"
            return ScoredPrompt(PromptScores(first, others), shape, route, prefill_s)

        return await with_one_retry(request_id, attempt)

    def _local(self, context: RequestContext, tokens: Tensor) -> AsyncGenerator[ForwardResult, None]:
        chunk_tokens = self._settings.prefill_chunk_tokens
        if context.sampling.exact:
            chunk_tokens = exact_chunk_tokens(chunk_tokens)
        return local_chunks(self._pool, context, tokens, chunk_tokens)

    async def _attempt(
        self,
        request_id: str,
        tokens: Tensor,
        entry: CatalogueEntry,
        sampling: Sampling,
        avoid: set[NodeId],
        scored: tuple[int, ...] | UnsetType = UNSET,
    ) -> Attempt:
        """Of which nobody has been asked. Raises NoPipeline."""
        size = RequestSize(len(tokens), 0)
        assembly = await self._assembly_for(entry, avoid, size, is_exact=sampling.exact)
        assignment = PipelineAssignment(
            request_id=further_id(request_id),
            model_id=entry.model_id,
            origin=self._node_id,
            stages=assembly.stages,
            n_prompt_tokens=len(tokens),
            sampling=sampling,
            wants="normed",
            scored=scored,
        )
        policy = RetryPolicy(0.0, avoid=avoid)
        request = OriginRequest(
            assignment.request_id, entry, tokens, sampling, policy, is_exact=sampling.exact
        )
        attempt = request.attempt(assembly, assignment)
        request.goes_to(attempt)
        return attempt
