"""Requests for what the model makes of a prompt alone: its rows, or how likely its own tokens were.

Scores never take the logits of more rows than a worker's batch has room for: the worker keeps of each row
what is told, and lets go of the rest. The last stage has to be told which tokens to score, so it knows the
prompt, as no stage does otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import trio
from msgspec import UNSET, UnsetType

from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.origin.attempts import Attempts, is_local
from swarmllm.pipeline.origin.embedding_rows import RowsChain, ScoresChain, local_chunks, with_one_retry
from swarmllm.pipeline.origin.generation import Guesses, PromptScores, Shape, StageReport
from swarmllm.pipeline.origin.requests import OriginRequest, OriginRequests
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm.pipeline.request import RequestContext, further_id, request_context
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.compute import Compute, ForwardResult, SampledToken
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineAssignment, Stage
from swarmllm_proto.tensors import Tensor


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
    guesses = Guesses()
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
        self, entry: CatalogueEntry, avoid: Collection[NodeId], request: RequestSize
    ) -> tuple[Stage, ...]:
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
        stages_for: RouteChooser,
    ) -> None:
        self._node_id = node_id
        self._pool = pool
        self._settings = settings
        self._requests = requests
        self._attempts = attempts
        self._stages_for = stages_for

    async def rows(self, request_id: str, tokens: Tensor, entry: CatalogueEntry, sampling: Sampling) -> Rows:
        """f32 [n, n_embd] of i32 [n]. Raises SwarmLLMError."""

        async def attempt(avoid: set[NodeId]) -> Rows:
            assignment = await self._assignment(request_id, tokens, entry, sampling, avoid)
            request, context = self._request(assignment, tokens, entry, avoid)
            with self._requests.under_way(request):
                if is_local(context):
                    async with aclosing(self._local(context, tokens)) as chunks:
                        values = np.concatenate([chunk.tensor async for chunk in chunks])
                else:
                    async with self._attempts.open_chain(request, assignment, RowsChain) as chain:
                        values = await chain.all_rows()
                return Rows(values, assignment.stages)

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
            assignment = await self._assignment(request_id, rows, entry, sampling, avoid, scored)
            request, context = self._request(assignment, rows, entry, avoid)
            if self._settings.local_embedding_privacy and not context.view.is_here(context.view.last):
                raise InvalidRequest(
                    "cannot be scored: the node of the last layers would have to be told its tokens, and"
                    " inference.local_embedding_privacy keeps them here.",
                    field=field,
                )
            started_s = trio.current_time()
            with self._requests.under_way(request):
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
                    async with self._attempts.open_chain(request, assignment, ScoresChain) as chain:
                        parts = await chain.chunks()
                    prefill_s, route = trio.current_time() - started_s, chain.route
            others = tuple(row for part in parts for row in part) if len(tokens) > 1 else ()
            shape: Shape = "local" if is_local(context) else "chain"
            return ScoredPrompt(PromptScores(first, others), shape, route, prefill_s)

        return await with_one_retry(request_id, attempt)

    def _local(self, context: RequestContext, tokens: Tensor) -> AsyncGenerator[ForwardResult, None]:
        return local_chunks(self._pool, context, tokens, self._settings.prefill_chunk_tokens)

    async def _assignment(
        self,
        request_id: str,
        tokens: Tensor,
        entry: CatalogueEntry,
        sampling: Sampling,
        avoid: set[NodeId],
        scored: tuple[int, ...] | UnsetType = UNSET,
    ) -> PipelineAssignment:
        return PipelineAssignment(
            request_id=further_id(request_id),
            model_id=entry.model_id,
            origin=self._node_id,
            stages=await self._stages_for(entry, avoid, RequestSize(len(tokens), 0)),
            n_prompt_tokens=len(tokens),
            sampling=sampling,
            wants="normed",
            scored=scored,
        )

    def _request(
        self, assignment: PipelineAssignment, tokens: Tensor, entry: CatalogueEntry, avoid: set[NodeId]
    ) -> tuple[OriginRequest, RequestContext]:
        policy = RetryPolicy(0.0, avoid=avoid)
        request = OriginRequest(assignment.request_id, entry, tokens, assignment.sampling, policy)
        request.context = context = request_context(assignment, entry, self._node_id)
        return request, context
