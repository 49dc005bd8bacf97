"""The requests of this node's clients: one object for each, from its prompt's tokens to its end.

A request goes through attempts, one after the other; a standby is a further one beside the current attempt.
Each has a pipeline, and an id under which the pipeline's stages know it. A request has one state, and an
attempt has the state of its chain (see `lifecycle`).
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np
import trio
from msgspec import UNSET

from swarmllm.errors import ContextFull, InvalidRequest
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.check.statements import Statements
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.lifecycle import REQUEST_LIFECYCLE, RequestEvent, RequestState
from swarmllm.pipeline.origin.pictures import PictureRows
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm.pipeline.request import RequestContext, further_id, request_context
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.reported_loads import ReportedLoad
from swarmllm.pipeline.stage.capacity import HeldCapacity, held_here
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import TELL_PROMPT_TOKENS_MAX, PipelineAssignment, Stage
from swarmllm_proto.tensors import Tensor

RESUMED_MAX: Final = 16
"""Earlier attempts whose stages an attempt may take over; the wire's limit."""
LINGER_S: Final = 15.0
"""For what stages state of an attempt after its end."""
LINGERING_MAX: Final = 256
UNSEEN_S: Final = 1.5
"""Nodes publish a change of load once a second, and it takes time to arrive."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One pipeline that was chosen for a request."""

    request: OriginRequest
    assembly: Assembly
    assignment: PipelineAssignment
    context: RequestContext
    was_rounded: bool = False
    """Rows of earlier tokens were rounded, or rows of this pipeline are."""
    chain: Chain | None = None
    """Where stages on other nodes take part in it, for as long as it is open."""
    assigned_s: float = 0.0
    """When its stages were asked to take part."""
    statements: Statements | None = None
    """Of its stages; None: none is asked to sign for its rows."""

    def __repr__(self) -> str:
        return f"<Attempt {self.id} {self.chain!r}>"

    @property
    def id(self) -> str:
        """Under which its stages know the request."""
        return self.assignment.request_id


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
    """Which of `tokens` stand for rows of pictures."""
    tells_prompt: bool = False
    """The last of several stages may know the prompt where it is another node's."""
    state: RequestState = REQUEST_LIFECYCLE.first
    generated: list[int] = field(default_factory=list)
    """Tokens that the reader has."""
    attempts: list[Attempt] = field(default_factory=list)
    """The latest one last; before it, those whose stages may still hold what it can go on with."""
    current: Attempt | None = None
    """The latest one; None: a route is being chosen."""
    n_attempts: int = 0
    """Attempts that began, without standbys. More than one route may be assigned in one."""
    has_fetched: bool = False
    """A stage rests on KV that another node gave it."""
    n_changes: int = 0
    """How often the swarm had changed when the latest attempt was made (see
    `PipelineOpener.wait_for_change`)."""

    def pass_event(self, event: RequestEvent) -> None:
        """Pass an event through the table. Raises UnknownTransition where it cannot happen."""
        self.state = REQUEST_LIFECYCLE.after(self.state, event)

    def goes_to(self, attempt: Attempt) -> None:
        """It is the current one from now on."""
        self.attempts.append(attempt)
        self.current = attempt

    def taken_over_by(self, standby: Attempt) -> None:
        """A standby has overtaken the current attempt and replaces it. Its stages hold all that is needed."""
        self.attempts[:] = [standby]
        self.current = standby

    @property
    def was_rounded(self) -> bool:
        """Rows were rounded, of the tokens that the reader has or is about to have."""
        return bool(self.attempts) and self.attempts[-1].was_rounded

    @property
    def risked(self) -> frozenset[NodeId]:
        """Of the latest route, the nodes with which there had been no connection."""
        return self.attempts[-1].assembly.untried if self.attempts else frozenset()

    @property
    def rows(self) -> Tensor:
        """i32 [n]: the prompt, and what was generated before."""
        if not self.generated:
            return self.tokens
        return np.concatenate((self.tokens, np.array(self.generated, np.int32)))

    @property
    def broken(self) -> Assembly | None:
        """The pipeline that gave the latest token and broke."""
        return self.attempts[-1].assembly if self.generated and self.attempts else None

    def assignment(
        self, assembly: Assembly, origin: NodeId, *, is_standby: bool = False
    ) -> PipelineAssignment:
        """Of a further attempt, which has this pipeline. A standby's stages compute everything anew."""
        may_resume = self.broken is not None and len(assembly.stages) > 1 and not is_standby
        sampling = self.sampling
        if assembly.stages[-1].node_id == origin:
            # Nobody checks what this node samples.
            sampling = msgspec.structs.replace(sampling, fingerprint_key=None)
        is_first = self.n_attempts == 1 and not self.attempts
        return PipelineAssignment(
            request_id=self.id if is_first else further_id(self.id),
            model_id=self.entry.model_id,
            origin=origin,
            stages=assembly.stages,
            n_prompt_tokens=len(self.tokens),
            sampling=sampling,
            generated=tuple(self.generated),
            resumes=tuple(each.id for each in self.attempts[: -RESUMED_MAX - 1 : -1]) if may_resume else (),
            row_formats=assembly.row_formats or UNSET,
            picture_runs=(self.pictures.runs or UNSET) if self.pictures is not None else UNSET,
        )

    def attempt(self, assembly: Assembly, assignment: PipelineAssignment) -> Attempt:
        """An attempt with this pipeline. No stage has been asked, and it is not the current attempt yet."""
        kernel_class = assembly.kernel_group.kernel_class if assembly.kernel_group is not None else ""
        context = request_context(assignment, self.entry, assignment.origin)
        context = replace(context, conversation=self.conversation, kernel_class=kernel_class)
        was_rounded = self.was_rounded and bool(self.generated)
        was_rounded = was_rounded or "q8_0" in assembly.row_formats
        return Attempt(self, assembly, assignment, context, was_rounded)

    def prompt_for_guesses(self, stages: Sequence[Stage]) -> bytes:
        """Little-endian i32, for the last stage; empty where it is of no use. (What stands for a picture's
        rows are no tokens.)"""
        may_guess = len(stages) > 1 and self.pictures is None and not self.sampling.exact
        if not may_guess or len(self.tokens) > TELL_PROMPT_TOKENS_MAX:
            return b""
        return self.tokens.astype("<i4", copy=False).tobytes()


class OriginRequests:
    """The requests that run, and the one index of their attempts."""

    def __init__(self) -> None:
        self._requests: dict[OriginRequest, None] = {}
        """In the order in which they came."""
        self._attempts: dict[str, Attempt] = {}
        """By their ids: the open ones in which other nodes take part, and the lingering ones."""
        self._lingering: deque[tuple[float, Attempt]] = deque()
        """Until when each is known, by trio's clock: attempts that are over, of whose stages some may still
        state what they sent."""

    def __len__(self) -> int:
        """An attempt beside the current one of its request counts as one more."""
        return len(self._requests) + len(self._beside())

    def held(self) -> list[HeldCapacity]:
        """By them on this node."""
        current = (each.current for each in self._requests if each.current is not None)
        return [*filter(None, (held_here(each.context) for each in (*current, *self._beside())))]

    @contextmanager
    def under_way(self, request: OriginRequest) -> Iterator[None]:
        self._requests[request] = None
        try:
            yield
        finally:
            del self._requests[request]

    def opened(self, attempt: Attempt, chain: Chain) -> None:
        """Other nodes are asked to take part in it."""
        attempt.chain, attempt.assigned_s = chain, trio.current_time()
        self._attempts[attempt.id] = attempt

    def closed(self, attempt: Attempt) -> None:
        """It is over. Late statements of its stages are taken for a while."""
        attempt.chain, now_s = None, trio.current_time()
        if attempt.statements is None:
            self._forget(attempt)
        else:
            self._lingering.append((now_s + LINGER_S, attempt))
        while self._lingering and (self._lingering[0][0] <= now_s or len(self._lingering) > LINGERING_MAX):
            self._forget(self._lingering.popleft()[1])

    def _forget(self, attempt: Attempt) -> None:
        if self._attempts.get(attempt.id) is attempt:
            del self._attempts[attempt.id]

    def attempt(self, attempt_id: str) -> Attempt | None:
        """One that is open or lingers."""
        return self._attempts.get(attempt_id)

    def chain(self, attempt_id: str) -> Chain | None:
        """Of the open attempt that other nodes know under this id."""
        attempt = self._attempts.get(attempt_id)
        return attempt.chain if attempt is not None else None

    def open_attempts(self) -> list[Attempt]:
        """In which other nodes take part."""
        return [attempt for attempt in self._attempts.values() if attempt.chain is not None]

    def chains(self) -> list[Chain]:
        return [attempt.chain for attempt in self._attempts.values() if attempt.chain is not None]

    def just_sent(
        self, reported: Mapping[NodeId, ReportedLoad], besides: OriginRequest | None
    ) -> Counter[NodeId]:
        """By node id: attempts that others have had for so short a time that their records need not say so;
        of a node that has reported its load itself, the one that it accepted then and those that were
        assigned later. `besides`: a request that does not count."""
        unseen_s = trio.current_time() - UNSEEN_S

        def is_unseen(attempt: Attempt, chain: Chain, node_id: NodeId) -> bool:
            if (load := reported.get(node_id)) is None:
                return chain.began_s > unseen_s
            return attempt.request.id == load.request_id or attempt.assigned_s > load.at_s

        return Counter(
            stage.node_id
            for attempt in self.open_attempts()
            if attempt.request is not besides and (chain := attempt.chain) is not None
            for stage in attempt.context.view.stages
            if is_unseen(attempt, chain, stage.node_id)
        )

    def _beside(self) -> list[Attempt]:
        """Standbys, and attempts that a standby has overtaken."""
        return [each for each in self.open_attempts() if each is not each.request.current]


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
