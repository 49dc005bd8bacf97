"""The requests of this node's clients: one object for each, from its prompt's tokens to its end.

A request goes through attempts, one after the other. Each has a pipeline, and an id under which the
pipeline's stages know it. A request has one state, and its latest attempt has the state of its chain (see
`lifecycle`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from swarmllm.errors import ContextFull, InvalidRequest
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.lifecycle import REQUEST_LIFECYCLE, RequestEvent, RequestState
from swarmllm.pipeline.origin.pictures import PictureRows
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm.pipeline.request import RequestContext, further_id
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.stage.capacity import HeldCapacity, held_here
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import TELL_PROMPT_TOKENS_MAX, PipelineAssignment, Stage
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
    pictures: PictureRows | None = None
    """What of `tokens` are ids of rows."""
    tells_prompt: bool = False
    """The last of several stages may know the prompt where it is another node's."""
    was_rounded: bool = False
    """Rows were, of the tokens that the reader has or is about to have."""
    known_as: str = ""
    """The id of the latest attempt that has a route; before that, the request's own."""
    state: RequestState = REQUEST_LIFECYCLE.first
    generated: list[int] = field(default_factory=list)
    """Tokens that the reader has."""
    tried: list[Attempt] = field(default_factory=list)
    """The latest one, and those whose stages may still hold what it can go on with."""
    risked: frozenset[NodeId] = frozenset()
    """Of the latest route, the nodes with which there had been no connection."""
    n_attempts: int = 0
    context: RequestContext | None = None
    """Of the latest attempt, once it has a route."""
    chain: Chain | None = None
    """Of the latest attempt, where stages on other nodes take part in it, for as long as it is open."""
    assigned_s: float = 0.0
    """When its stages were asked to take part."""
    n_changes: int = 0
    """Of the swarm, when the latest attempt was made: what has changed since is not to be waited for."""

    def __post_init__(self) -> None:
        self.known_as = self.known_as or self.id

    def passes(self, event: RequestEvent) -> None:
        """The event happens. Raises UnknownTransition where it cannot."""
        self.state = REQUEST_LIFECYCLE.after(self.state, event)

    def beside(self) -> OriginRequest:
        """The same request for an attempt at a standby, while the latest attempt goes on."""
        return OriginRequest(
            self.id,
            self.entry,
            self.tokens,
            self.sampling,
            self.recovery,
            is_exact=self.is_exact,
            pictures=self.pictures,
            tells_prompt=self.tells_prompt,
            was_rounded=self.was_rounded,
            known_as=further_id(self.id),
            generated=self.generated,
            n_attempts=self.n_attempts + 1,
            n_changes=self.n_changes,
        )

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
        sampling = self.sampling
        if assembly.stages[-1].node_id == origin:
            # Nobody checks what this node samples.
            sampling = msgspec.structs.replace(sampling, fingerprint_key=None)
        return PipelineAssignment(
            request_id=self.id if self.n_attempts == 1 and not self.tried else further_id(self.id),
            model_id=self.entry.model_id,
            origin=origin,
            stages=assembly.stages,
            n_prompt_tokens=len(self.tokens),
            sampling=sampling,
            generated=tuple(self.generated),
            resumes=tuple(each.request_id for each in self.tried[: -RESUMED_MAX - 1 : -1])
            if may_resume
            else (),
            row_formats=assembly.row_formats or UNSET,
            picture_runs=(self.pictures.runs or UNSET) if self.pictures is not None else UNSET,
        )

    def prompt_for_guesses(self, stages: Sequence[Stage]) -> bytes:
        """Little-endian i32, for the last stage; empty where it is of no use. (What stands for a picture's
        rows are no tokens.)"""
        may_guess = len(stages) > 1 and self.pictures is None and not self.sampling.exact
        if not may_guess or len(self.tokens) > TELL_PROMPT_TOKENS_MAX:
            return b""
        return self.tokens.astype("<i4", copy=False).tobytes()


class OriginRequests:
    """The requests that run."""

    def __init__(self) -> None:
        self._by_id: dict[str, OriginRequest] = {}
        """By `known_as`."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[OriginRequest]:
        return iter(self._by_id.values())

    def held(self) -> list[HeldCapacity]:
        """By them on this node."""
        return [*filter(None, (request.held for request in self))]

    @contextmanager
    def under_way(self, request: OriginRequest) -> Iterator[None]:
        self.add(request)
        try:
            yield
        finally:
            self.remove(request)

    def add(self, request: OriginRequest) -> None:
        self._by_id[request.known_as] = request

    def remove(self, request: OriginRequest) -> None:
        del self._by_id[request.known_as]

    def exchange(self, one: OriginRequest, other: OriginRequest) -> None:
        """Each has the other's latest attempt from now on."""
        one.known_as, other.known_as = other.known_as, one.known_as
        one.context, other.context = other.context, one.context
        one.chain, other.chain = other.chain, one.chain
        one.assigned_s, other.assigned_s = other.assigned_s, one.assigned_s
        one.tried, other.tried = other.tried, one.tried
        one.was_rounded, other.was_rounded = other.was_rounded, one.was_rounded
        self.add(one)
        self.add(other)

    def closed(self, chain: Chain) -> None:
        """This attempt is over."""
        request = self._by_id.get(chain.context.request_id)
        if request is not None and request.chain is chain:
            request.chain = None

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


def fit(n_prompt_tokens: int, sampling: Sampling, entry: CatalogueEntry, n_ctx: int, field: str) -> Sampling:
    """With a seed, and with no more tokens than there is room for in `n_ctx` cells. Raises InvalidRequest and
    ContextFull for the prompt, which is the request's `field`."""
    if not n_prompt_tokens:
        raise InvalidRequest("the prompt has no tokens", field=field)
    limit = min(n_ctx, entry.manifest.context_length or n_ctx)
    if n_prompt_tokens >= limit:
        raise ContextFull(
            f"the prompt is too large: it has {n_prompt_tokens} tokens, which exceeds the available context"
            f" size; {entry.name} has room for {limit} here, answer included",
            field=field,
            n_prompt_tokens=n_prompt_tokens,
            n_ctx=limit,
        )
    # A pipeline that goes on with this request after a failure has to draw the same random numbers.
    seed = secrets.randbelow(2**32) if sampling.seed is None else sampling.seed
    max_tokens = min(sampling.max_tokens, limit - n_prompt_tokens)
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed)
