"""The queue of one request's session: bounded for what other nodes send, apart from what this node puts in.

A sender that overruns its part breaks the protocol. A sender for whose bytes there is no room in the byte
budget does not: others may have used it up. What this node's own worker and the origin's side put in
is limited by the tokens asked for, comes in bursts when the processor is busy, and is nobody's fault.

What another node sent also keeps its bytes reserved in the byte budget, until the item after it is asked for:
the worker holds it that long.

`read_job` and `read_prompt` turn a message of another node into an item, or refuse it with the field that is
wrong.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

import numpy as np
import trio

from swarmllm.pipeline.job import ComputeStep, Job
from swarmllm.pipeline.request import RequestContext
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, Grant
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import LayerForward, PipelineError, RemoteGenerateRequest, ReplayRows
from swarmllm_proto.tensors import Tensor, decode_tensor, unpack_rows

SPARE_JOBS: Final = 8
"""Room beyond the window: repeats and credits."""
OWN_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Report:
    """A message that the session's own task sends to the origin."""

    error: PipelineError
    ends: bool


@dataclass(frozen=True, slots=True)
class RelayedJob:
    """A job that this node's worker asks the daemon to send."""

    receiver: NodeId
    header: bytes
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt that this node's worker answers alone."""

    tokens: Tensor


Item: TypeAlias = Job | Report | RelayedJob | GivenPrompt | ReplayRows


class NotFinite(BadTensor):
    """The rows have values that are not finite, which no layer computes from finite rows. `rows`: f32 [n,
    n_embd]."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__("tensor", "numbers that are not finite")
        self.rows = rows

    @property
    def first(self) -> int:
        """Index of the first of them."""
        return int(np.argmin(np.isfinite(self.rows).all(axis=1)))


def read_job(
    context: RequestContext, sender: NodeId, message: LayerForward, payload: memoryview, now_s: float
) -> Job:
    """Raises BadTensor."""
    job = Job(
        sender=sender,
        step=ComputeStep.EMBED if message.step == "embed" else ComputeStep.LAYER,
        stage=message.stage,
        position=message.position,
        n_tokens=message.n_tokens,
        prefill_left=message.prefill_left,
        timings=message.timings,
        since_s=now_s,
        resent=message.resent,
        number=message.number,
        fresh=message.fresh,
        until=message.until,
    )
    if message.until is not None and (message.until < message.stage or not message.prefill_left):
        raise BadTensor("until", "rows that end before the last stage are no token's, and get there")
    if message.step == "embed":
        guesses = message.guesses or ()
        if message.n_tokens != 1 + len(guesses) or message.prefill_left:
            raise BadTensor("n_tokens", "a token is embedded alone, but for guesses")
        for token in (message.token, *guesses):
            if token >= context.n_vocab:
                raise BadTensor("token", f"{token} of a vocabulary of {context.n_vocab}")
        job.token, job.guesses = message.token, guesses
        return job
    if len(message.timings) > message.stage:
        raise BadTensor("timings", "more stages than the job has passed")
    n_given = context.n_given_tokens
    due = (message.n_tokens, context.width(message.stage, message.position, message.n_tokens))
    tensor = unpack_rows(payload, n_rows=message.n_tokens, width=due[1])
    if tensor.dtype != np.float32 or tensor.shape != due:
        raise BadTensor("tensor.shape", f"{tensor.dtype}{tensor.shape} where float32{due} is due")
    if not message.n_tokens:
        raise BadTensor("n_tokens", "no rows")
    if message.position < n_given < message.position + message.n_tokens:
        raise BadTensor("n_tokens", f"more rows than the {n_given} of the prompt")
    if not np.isfinite(tensor).all():
        raise NotFinite(tensor)
    job.tensor = tensor
    return job


def read_prompt(context: RequestContext, message: RemoteGenerateRequest, payload: memoryview) -> Tensor:
    """i32 [n]: the prompt, and what was generated before. Raises BadTensor."""
    tokens = decode_tensor(payload)
    n_due = context.n_given_tokens
    if tokens.dtype != np.int32 or tokens.shape != (n_due,) or message.n_tokens != n_due:
        raise BadTensor("tensor.shape", f"{tokens.dtype}{tokens.shape} where int32({n_due},) is due")
    return tokens


class ReceivedRows:
    """Tracks which rows have come to the stages here by way of the daemons, and which were lost to damage.
    Pure."""

    def __init__(self, n_stages: int) -> None:
        self.n_rows = 0
        """Rows below this have come to some stage here."""
        self._n_expected = [0] * n_stages
        """By stage: the position at which the next rows begin."""
        self._damaged_at: int | None = None
        """Where a job arrived damaged that has not been repeated yet."""
        self._was_damaged = False

    def is_behind_damage(self, stage: int, position: int) -> bool:
        """Whether a chunk left before the origin knew of damage before it: such a chunk comes again."""
        is_ahead = position > self._n_expected[stage] and position != self._damaged_at
        return is_ahead and self._was_damaged

    def add(self, stage: int, position: int, n_tokens: int) -> None:
        if self._damaged_at is not None and position <= self._damaged_at:
            self._damaged_at = None
        self._n_expected[stage] = position + n_tokens
        self.n_rows = max(self.n_rows, position + n_tokens)

    def damaged(self, position: int) -> bool:
        """A job there arrived damaged. False: it comes again anyway, behind one that is to be repeated."""
        if self._damaged_at is not None and position > self._damaged_at:
            return False
        self._damaged_at = position
        self._was_damaged = True
        return True

    def repeated(self) -> None:
        """The origin has repeated the newest token."""
        self._damaged_at = None


class PutResult(Enum):
    """Whether an item was queued."""

    QUEUED = auto()
    """Or dropped, because the request is over."""
    OVERRUN = auto()
    """There were more items than the window allows."""
    NO_ROOM = auto()
    """The byte budget has no room for it, which need not be its sender's doing."""


class SessionQueue:
    def __init__(self, n_stages: int, budget: ByteBudget | None = None) -> None:
        self._foreign_max = 2 * (n_stages + 1) + SPARE_JOBS
        self._n_foreign = 0
        self._budget = budget or ByteBudget()
        self._items: deque[tuple[Item, bool, Grant | None]] = deque()
        self._came = trio.Event()
        self._taken: Grant | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<SessionQueue {len(self._items)} items, {self._n_foreign} of other nodes>"

    def put(
        self, item: Item, *, is_foreign: bool, sender: NodeId | None = None, n_bytes: int = 0
    ) -> PutResult:
        """`sender`: the node that it came from, with so many bytes."""
        if self._is_closed:
            return PutResult.QUEUED
        n_own = len(self._items) - self._n_foreign
        if self._n_foreign >= self._foreign_max if is_foreign else n_own >= OWN_MAX:
            return PutResult.OVERRUN
        grant = None
        if sender is not None and n_bytes:
            grant = self._budget.reserve(sender, BudgetKind.JOBS, n_bytes)
            if grant is None:
                return PutResult.NO_ROOM
        self._items.append((item, is_foreign, grant))
        self._n_foreign += is_foreign
        self._came.set()
        return PutResult.QUEUED

    async def get(self) -> Item:
        """The next item. The one before has been dealt with."""
        self._release_taken()
        if self._items:
            await trio.lowlevel.checkpoint()
        while not self._items:
            self._came = trio.Event()
            await self._came.wait()
        item, is_foreign, self._taken = self._items.popleft()
        self._n_foreign -= is_foreign
        return item

    def close(self) -> None:
        """Give everything up; what still comes is dropped."""
        self._is_closed = True
        self._release_taken()
        for _, _, grant in self._items:
            if grant is not None:
                grant.release()
        self._items.clear()
        self._n_foreign = 0

    @property
    def is_empty(self) -> bool:
        return not self._items

    def _release_taken(self) -> None:
        grant, self._taken = self._taken, None
        if grant is not None:
            grant.release()
