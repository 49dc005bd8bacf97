"""The worker pool with an ear: what forwards took goes to the observations, for every request that runs here,
ours or another node's.

It sits in front of the pool because everything passes there with its rows and its layers; further up a
walk has lost which layers a time belongs to, and further down nobody knows of routes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.compute import Compute, ForwardResult, LocalGeneration
from swarmllm.scheduling.observation import Observations
from swarmllm.workerpool.ring import NO_RING, RingHint
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Effort, GenerateDone, Sampling, Token
from swarmllm_proto.tensors import Tensor


class ObservedCompute:
    def __init__(self, compute: Compute, observations: Observations) -> None:
        self._compute = compute
        self._observations = observations

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        return self._compute.loaded(model_id)

    def context_sizes(self) -> dict[str, int]:
        return self._compute.context_sizes()

    async def tokenize(
        self,
        model: ModelFile,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
    ) -> Tensor:
        return await self._compute.tokenize(model, text=text, messages=messages, tools=tools, effort=effort)

    async def embed(self, model: ModelFile, tokens: Tensor) -> Tensor:
        return await self._compute.embed(model, tokens)

    async def forward(
        self,
        model: ModelFile,
        *,
        request_id: str,
        layers: LayerRange,
        position: int,
        tensor: Tensor,
        want: Literal["hidden", "none", "token", "normed"],
        sampling: Sampling | None = None,
        n_prompt_tokens: int = 0,
        generated: tuple[int, ...] = (),
        ring: RingHint = NO_RING,
    ) -> ForwardResult:
        result = await self._compute.forward(
            model,
            request_id=request_id,
            layers=layers,
            position=position,
            tensor=tensor,
            want=want,
            sampling=sampling,
            n_prompt_tokens=n_prompt_tokens,
            generated=generated,
            ring=ring,
        )
        if not result.compute_s:
            return result  # it had come by a link before
        n_rows = len(tensor)
        phase: Literal["decode", "prefill"] = "decode" if n_rows == 1 else "prefill"
        self._observations.observe(model.model_id, phase, result.compute_s, len(layers), n_rows)
        return result

    @asynccontextmanager
    async def generate(
        self,
        model: ModelFile,
        *,
        request_id: str,
        tokens: Tensor,
        sampling: Sampling,
        n_generated: int = 0,
        session: str = "",
    ) -> AsyncIterator[LocalGeneration]:
        n_layers = max((layers.end for layers in self.loaded(model.model_id)), default=0)
        async with self._compute.generate(
            model,
            request_id=request_id,
            tokens=tokens,
            sampling=sampling,
            n_generated=n_generated,
            session=session,
        ) as generation:
            yield _ObservedGeneration(generation, self._observations, model.model_id, n_layers, n_generated)

    async def name_prefix(
        self, model: ModelFile, *, request_id: str, layers: LayerRange, names: bytes, scope: str
    ) -> int:
        return await self._compute.name_prefix(
            model, request_id=request_id, layers=layers, names=names, scope=scope
        )

    async def cancel(self, model_id: str, request_id: str) -> None:
        await self._compute.cancel(model_id, request_id)


class _ObservedGeneration:
    def __init__(
        self,
        generation: LocalGeneration,
        observations: Observations,
        model_id: str,
        n_layers: int,
        first_index: int,
    ) -> None:
        self._generation = generation
        self._observations = observations
        self._model_id = model_id
        self._n_layers = n_layers
        self._first_index = first_index

    @property
    def done(self) -> GenerateDone | None:
        return self._generation.done

    async def __aiter__(self) -> AsyncIterator[tuple[Token, bytes]]:
        async for token, piece in self._generation:
            # The first token's time belongs to the prompt.
            if token.index > self._first_index:
                self._observations.observe(self._model_id, "decode", token.compute_s, self._n_layers, 1)
            yield token, piece
        done = self._generation.done
        if done is not None and done.n_prompt_tokens > 1:
            self._observations.observe(
                self._model_id,
                "prefill",
                done.prefill_s,
                self._n_layers,
                done.n_prompt_tokens + self._first_index,
            )
