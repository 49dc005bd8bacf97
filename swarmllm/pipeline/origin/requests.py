"""The requests of this node's clients: one object for each, from its prompt's tokens to its end.

A request goes through attempts, one after the other. Each has a pipeline, and an id under which the
pipeline's stages know it. Where a request stands is one state, and where its latest attempt stands is the
state of its chain (see `lifecycle`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from msgspec import UNSET

from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.lifecycle import REQUEST_LIFECYCLE, RequestEvent, RequestState
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm.pipeline.request import RequestContext, further_id
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.stage.capacity import HeldCapacity, held_here
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineAssignment
from swarmllm_proto.tensors import Tensor

RESUMED_MAX: Final = 16
"""Earlier attempts whose stages an attempt may take over; the wire's limit."""


class Attempt(NamedTuple):
    """A pipeline that was chosen for a request, and the id under which its stages know the request."""

    request_id: str
    assembly: Assembly


@dataclass(slots=True, eq=False)
class OriginRequest:
    id: str
    """Of the first attempt; the client's."""
    entry: CatalogueEntry
    tokens: Tensor
    """i32 [n_prompt_tokens]."""
    sampling: Sampling
    recovery: RetryPolicy = field(default_factory=lambda: RetryPolicy(0.0))
    """Says whether there is another attempt, and which nodes it avoids."""
    conversation: str = ""
    is_exact: bool = False
    """Its rows may not be rounded on the way."""
    was_rounded: bool = False
    """Rows were, of the tokens that the reader has or is about to have."""
    known_as: str = ""
    """The id of the latest attempt that has a route; before that, the request's own."""
    state: RequestState = REQUEST_LIFECYCLE.first
    generated: list[int] = field(default_factory=list)
    """Tokens that the reader has."""
    tried: list[Attempt] = field(default_factory=list)
    """The latest one, and those whose stages may still hold what it can go on with."""
    n_attempts: int = 0
    context: RequestContext | None = None
    """Of the latest attempt, once it has a route."""
    chain: Chain | None = None
    """Of the latest attempt, where stages on other nodes take part in it, for as long as it is open."""
    n_changes: int = 0
    """Of the swarm, when the latest attempt was made: what has changed since is not to be waited for."""

    def __post_init__(self) -> None:
        self.known_as = self.known_as or self.id

    def passes(self, event: RequestEvent) -> None:
        """The event happens. Raises UnknownTransition where it cannot."""
        self.state = REQUEST_LIFECYCLE.after(self.state, event)

    @property
    def held(self) -> HeldCapacity | None:
        """By it on this node; None: no route yet, or others run all of it."""
        return held_here(self.context) if self.context is not None else None

    @property
    def rows(self) -> Tensor:
        """i32 [n]: the prompt, and what was generated before."""
        if not self.generated:
            return self.tokens
        return np.concatenate((self.tokens, np.array(self.generated, np.int32)))

    @property
    def broken(self) -> Assembly | None:
        """The pipeline that gave the latest token and broke."""
        return self.tried[-1].assembly if self.generated and self.tried else None

    def assignment(self, assembly: Assembly, origin: NodeId) -> PipelineAssignment:
        """Of the next attempt, which has this pipeline."""
        may_resume = self.broken is not None and len(assembly.stages) > 1
        self.was_rounded &= bool(self.generated)
        self.was_rounded |= "q8_0" in assembly.row_formats
        return PipelineAssignment(
            request_id=self.id if self.n_attempts == 1 else further_id(self.id),
            model_id=self.entry.model_id,
            origin=origin,
            stages=assembly.stages,
            n_prompt_tokens=len(self.tokens),
            sampling=self.sampling,
            generated=tuple(self.generated),
            resumes=tuple(each.request_id for each in self.tried[: -RESUMED_MAX - 1 : -1])
            if may_resume
            else (),
            row_formats=assembly.row_formats or UNSET,
        )


class OriginRequests:
    """Those that run."""

    def __init__(self) -> None:
        self._by_id: dict[str, OriginRequest] = {}
        """By `known_as`."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[OriginRequest]:
        return iter(self._by_id.values())

    @contextmanager
    def under_way(self, request: OriginRequest) -> Iterator[None]:
        self._by_id[request.known_as] = request
        try:
            yield
        finally:
            del self._by_id[request.known_as]

    def attempts(self, request: OriginRequest, context: RequestContext) -> None:
        """Other nodes know it under this attempt's id from now on."""
        del self._by_id[request.known_as]
        request.context, request.known_as = context, context.request_id
        self._by_id[request.known_as] = request

    def chain(self, request_id: str) -> Chain | None:
        """The attempt that other nodes know under this id."""
        request = self._by_id.get(request_id)
        return request.chain if request is not None else None

    def chains(self) -> list[Chain]:
        return [request.chain for request in self if request.chain is not None]
