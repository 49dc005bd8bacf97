"""The worker pool with an ear: what forwards took goes to the observations, for every request that runs here,
ours or another node's.

It sits in front of the pool because everything passes there with its rows and its layers; further up a
walk has lost which layers a time belongs to, and further down nobody knows of routes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Unpack

from swarmllm.pipeline.stage.compute import (
    Compute,
    ForwardCall,
    ForwardResult,
    GenerateCall,
    LocalGeneration,
)
from swarmllm.scheduling.observation import Observations
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import GenerateDone, Token


class ObservedCompute:
    def __init__(self, compute: Compute, observations: Observations) -> None:
        self._compute = compute
        self._observations = observations
        # Nothing is learnt of a model's speed from these.
        self.loaded, self.context_sizes = compute.loaded, compute.context_sizes
        self.tokenize, self.embed = compute.tokenize, compute.embed
        self.check_grammar = compute.check_grammar
        self.name_prefix, self.cancel = compute.name_prefix, compute.cancel
        self.hold, self.resume, self.read_journal = compute.hold, compute.resume, compute.read_journal

    async def forward(self, model: ModelFile, **call: Unpack[ForwardCall]) -> ForwardResult:
        result = await self._compute.forward(model, **call)
        if not result.compute_s:
            return result  # it had come by a link before
        n_rows = len(call["tensor"])
        phase: Literal["decode", "prefill"] = "decode" if n_rows == 1 else "prefill"
        self._observations.observe(model.model_id, phase, result.compute_s, len(call["layers"]), n_rows)
        return result

    @asynccontextmanager
    async def generate(
        self, model: ModelFile, **call: Unpack[GenerateCall]
    ) -> AsyncIterator[LocalGeneration]:
        n_layers = max((layers.end for layers in self.loaded(model.model_id)), default=0)
        first_index = call.get("n_generated", 0)
        async with self._compute.generate(model, **call) as generation:
            yield _ObservedGeneration(generation, self._observations, model.model_id, n_layers, first_index)


class _ObservedGeneration:
    def __init__(
        self,
        generation: LocalGeneration,
        observations: Observations,
        model_id: ModelId,
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
