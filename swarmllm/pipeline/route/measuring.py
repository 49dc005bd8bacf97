"""Measures how fast nodes and hops are, from the requests that pass here.

`ObservedCompute` sits in front of the worker pool: it tells the observations what each forward took, for
every request that runs here, of this node or of another one. Everything passes there with its rows and its
layers.

`learn` infers what a hop takes besides travelling and computing (framing, queues, wake-ups, a worker's turn):
the time from one token to the next, less what the stages computed, less half a round trip per hop. It learns
only from requests that had their nodes to themselves, because waiting for others is load, which routes count
already; and only where every round trip was measured, because a guess would pass for handling.

`measure` is what an origin learns of its peers' speed from a pipeline that has given tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, Literal, Unpack

from swarmllm.models.projector import Projector
from swarmllm.pictures import Medium, Picture
from swarmllm.pipeline.origin.generation import TokenSource
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.stage.compute import (
    Compute,
    ForwardCall,
    ForwardResult,
    GenerateCall,
    LocalGeneration,
)
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.speeds import (
    HANDLING_S,
    LEAST_TOKENS,
    Observations,
    PeerSpeeds,
    StageTime,
    layer_times,
)
from swarmllm.swarm.peers.trust import Note, TrustEvent
from swarmllm.workerpool.encoders import EncodedPicture
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import Effort, GenerateDone, Token
from swarmllm_proto.swarm import Stage

FEW_ROWS = 64
HOP_TOKENS = 16
"""A mean over fewer says little of a hop."""


class ObservedCompute:
    def __init__(self, compute: Compute, observations: Observations) -> None:
        self._compute = compute
        self._observations = observations
        # Nothing is learnt of a model's speed from these.
        self.loaded, self.context_sizes = compute.loaded, compute.context_sizes
        self.kernel_class, self.cut = compute.kernel_class, compute.cut
        self.tokenize, self.embed = compute.tokenize, compute.embed
        self.check_grammar, self.detokenize = compute.check_grammar, compute.detokenize
        self.pieces, self.end_tokens = compute.pieces, compute.end_tokens
        self.name_prefix, self.cancel = compute.name_prefix, compute.cancel
        self.hold, self.resume, self.read_journal = compute.hold, compute.resume, compute.read_journal

    async def apply_template(
        self,
        model: ModelFile,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
        template: str = "",
    ) -> str:
        return await self._compute.apply_template(model, messages, tools, effort, template)

    async def encode_picture(
        self, model: ModelFile, projector: Projector, picture: Medium, *, is_kept: bool = True
    ) -> EncodedPicture:
        return await self._compute.encode_picture(model, projector, picture, is_kept=is_kept)

    async def recode_picture(self, picture: Picture, *, side_max: int = 0) -> bytes:
        return await self._compute.recode_picture(picture, side_max=side_max)

    def can_recode_now(self) -> bool:
        return self._compute.can_recode_now()

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
        if done is None:
            return
        # Rows that were there already took no time; a few rows take as long as many.
        n_rows = done.n_prompt_tokens + self._first_index - done.n_cached_tokens
        if n_rows > 1 and (not done.n_cached_tokens or n_rows >= FEW_ROWS):
            self._observations.observe(self._model_id, "prefill", done.prefill_s, self._n_layers, n_rows)


def idle_network_s(stages: Sequence[Stage], known: RouteInputs) -> float | None:
    """How long one token is on the network of the ring of these stages, by measured round trips; None where a
    node is busy or a pair was not measured, and nothing can be learned of hops."""
    node_ids = [stage.node_id for stage in stages]
    if any(known.speeds[node_id].n_active for node_id in node_ids):
        return None
    rtts_s = [known.measured_rtt_s(a, b) for a, b in pairwise([*node_ids, node_ids[0]])]
    known_s = [rtt_s for rtt_s in rtts_s if rtt_s is not None]
    return sum(known_s) / 2 if len(known_s) == len(rtts_s) else None


def learn(observations: Observations, source: TokenSource, network_s: float | None) -> None:
    """From a pipeline that has answered; `network_s`: `idle_network_s` when it was chosen."""
    if network_s is None or source.shape != "chain" or source.n_generated < HOP_TOKENS:
        return
    route = source.route
    node_ids = [stage.node_id for stage in route]
    n_hops = sum(a != b for a, b in pairwise([*node_ids, node_ids[0]]))
    if n_hops:
        spent_s = sum(stage.overhead_s + stage.network_s for stage in route)
        observations.observe_hop(max(0.0, spent_s - network_s) / n_hops)


def measure(
    speeds: PeerSpeeds,
    source: TokenSource,
    assembly: Assembly,
    model_id: ModelId,
    here: NodeId,
    announced_s: Callable[[NodeId], float | None],
    note: Note,
    now_s: float,
) -> None:
    """From the first pipeline of a stream. `announced_s`: what a node says now that a layer takes for a row,
    because an honest one that has become slow has said so meanwhile."""
    n_decoded = source.n_generated - 1
    if n_decoded < LEAST_TOKENS:
        return
    route = source.route
    stages = [
        StageTime(stage.node_id, len(stage.layers), stage.compute_s)
        for stage in route
        if stage.node_id != here
    ]
    here_s = sum(stage.compute_s + stage.overhead_s for stage in route if stage.node_id == here)
    token_s = source.decode_s / n_decoded
    spent_s = token_s - here_s - assembly.travel_s
    for node_id, layer_s in layer_times(stages, spent_s, HANDLING_S * len(stages)).items():
        was_alone = all(stage.node_id == node_id for stage in stages)
        # Others that run there slow it down, as it has announced and as routes count already.
        alone_s = layer_s / (1 + assembly.n_active.get(node_id, 0))
        said_s = announced_s(node_id)
        if speeds.observe(model_id, node_id, alone_s, now_s, announced_s=said_s, was_alone=was_alone):
            note(
                node_id,
                TrustEvent.OVERSTATED,
                f"a layer takes {alone_s:.2g} s, it announces {said_s or 0:.2g} s",
            )


def travel_s(
    node_ids: Sequence[NodeId], rtt_s: Callable[[NodeId, NodeId], float], handling_s: float
) -> float:
    """What one token is expected to take along the ring of these stages besides being computed."""
    hops = [(a, b) for a, b in pairwise([*node_ids, *node_ids[:1]]) if a != b]
    return sum(rtt_s(a, b) / 2 + handling_s for a, b in hops)
