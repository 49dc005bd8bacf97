"""Which requests hold KV on this node, and how much is left for one more.

A request holds a slot of its model's worker, and cells for its prompt and for as much of its answer as is
expected: reserving all that it may say would make a node look full that is not. Other nodes read the result
in this node's record; the worker itself remains the one that refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.walker import RequestContext
from swarmllm_proto.identifiers import ModelId

EXPECTED_OUTPUT_TOKENS = 256
"""What a route is chosen for, where a request allows more: few answers use all they may."""


@dataclass(frozen=True, slots=True)
class Held:
    """By one request."""

    model_id: ModelId
    n_prompt_tokens: int
    max_tokens: int

    @property
    def n_kv_tokens(self) -> int:
        return self.n_prompt_tokens + min(self.max_tokens, EXPECTED_OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True)
class Room:
    """Of the model that has least left."""

    slots: int = 0
    """0: nobody has said."""
    free_slots: int = 0
    free_kv_tokens: int = 0

    def lack(self, n_tokens: int) -> str:
        """Why one more request with so many tokens, answer included, does not fit; empty: it does."""
        if self.slots and self.free_slots <= 0:
            return "no free slot"
        if self.slots and self.free_kv_tokens < n_tokens:
            return f"no room for {n_tokens:,} tokens of context: {self.free_kv_tokens:,} free"
        return ""


def held_here(context: RequestContext) -> Held | None:
    """None: other nodes run all of its layers."""
    if not context.view.runs_layers:
        return None
    return Held(context.model.model_id, context.n_prompt_tokens, context.sampling.max_tokens)


def room_left(
    held: Iterable[Held],
    settings: PipelineSettings,
    context_sizes: Mapping[ModelId, int] = MappingProxyType({}),
) -> Room:
    """What is left beside the requests that run. `context_sizes`: KV cells of the models that are loaded
    here, by their ids."""
    slots: Counter[ModelId] = Counter()
    tokens: Counter[ModelId] = Counter()
    for request in held:
        slots[request.model_id] += 1
        tokens[request.model_id] += request.n_kv_tokens
    n_slots = settings.max_requests_per_model
    n_cells = {**dict.fromkeys(tokens, settings.n_ctx), **context_sizes}
    free_cells = [n_ctx - tokens[model_id] for model_id, n_ctx in n_cells.items()]
    return Room(
        slots=n_slots,
        free_slots=max(0, n_slots - max(slots.values(), default=0)),
        free_kv_tokens=max(0, min(free_cells, default=settings.n_ctx)),
    )
