"""The requests of this node's users: those that run now, and the latest that have ended.

One account per request serves all observers: metrics and the log when it ends, the dashboard and `swarmllm
top` while it runs. It records what was computed where and how long that took, never the text.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.node.views import RequestCounts
from swarmllm.pipeline.request import further_id, new_request_id

if TYPE_CHECKING:
    from swarmllm.node.metrics import Metrics, Outcome
    from swarmllm.pipeline.origin.generation import Generation, StageReport

log = logging.getLogger("swarmllm.node")

RECENT_MAX = 50
"""Ended requests that are remembered: what fits on a screen or two."""

RequestState = Literal["queued", "prefill", "decode", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One request at one moment, or at its end."""

    id: str
    model: str
    state: RequestState
    started_at: float
    """Seconds since the epoch."""
    elapsed_s: float
    queue_s: float
    first_token_s: float | None
    """From its arrival to its first token."""
    n_prompt_tokens: int
    n_cached_tokens: int
    n_generated: int
    tokens_per_s: float | None
    """Of the decode: tokens after the first, per second."""
    shape: str
    route: tuple[StageReport, ...]
    error: str


class RequestAccount:
    """The account of one client's request; `UserRequests.under_way` keeps it. A request is run by one
    `OriginRequest`, or by several (embeddings: one per text); the account reads its progress from their
    results."""

    def __init__(self, model: str, request_id: str) -> None:
        self.id = request_id
        self.model = model
        self.generation: Generation | None = None
        """Once it has its first token."""
        self._started_at = time.time()
        self._since_s = trio.current_time()
        self._turn_s: float | None = None
        self._first_token_s: float | None = None
        self._end: BaseException | Literal["completed"] | None = None

    @property
    def state(self) -> RequestState:
        if self._end is not None:
            return self.outcome
        if self._turn_s is None:
            return "queued"
        return "prefill" if self.generation is None else "decode"

    @property
    def outcome(self) -> Outcome:
        """Of a request that has ended."""
        if isinstance(self._end, BaseException):
            return "failed" if isinstance(self._end, Exception) else "cancelled"
        return "completed"

    @property
    def elapsed_s(self) -> float:
        return trio.current_time() - self._since_s

    def has_turn(self) -> None:
        self._turn_s = self.elapsed_s

    def first_token(self, generation: Generation) -> float:
        """Seconds since its arrival."""
        self.generation = generation
        self._first_token_s = self.elapsed_s
        return self._first_token_s

    def ended(self, error: BaseException | None) -> None:
        """By `error`, if there is one; a cancellation is one."""
        self._end = error or "completed"

    @property
    def _error(self) -> str:
        match self._end:
            case InvalidRequest():
                return self._end.code  # its words may quote what was asked
            case SwarmLLMError():
                return self._end.message
            case Exception():
                return "internal_error"
        return ""

    def view(self) -> RequestSummary:
        generation, elapsed_s = self.generation, self.elapsed_s
        decode_s = generation.timings.decode_s if generation else 0.0
        n_decoded = generation.n_generated - 1 if generation else 0
        return RequestSummary(
            id=self.id,
            model=self.model,
            state=self.state,
            started_at=self._started_at,
            elapsed_s=elapsed_s,
            queue_s=elapsed_s if self._turn_s is None else self._turn_s,
            first_token_s=self._first_token_s,
            n_prompt_tokens=generation.n_prompt_tokens if generation else 0,
            n_cached_tokens=generation.n_cached_tokens if generation else 0,
            n_generated=generation.n_generated if generation else 0,
            tokens_per_s=n_decoded / decode_s if n_decoded > 0 and decode_s > 0 else None,
            shape=generation.shape if generation else "",
            route=generation.route if generation else (),
            error=self._error,
        )


class UserRequests:
    def __init__(self, metrics: Metrics, began: Callable[[], None]) -> None:
        """`began` is called when a request arrives."""
        self.metrics = metrics
        self._began = began
        self.counts = RequestCounts()
        self._live: dict[str, RequestAccount] = {}
        self._recent: deque[RequestSummary] = deque(maxlen=RECENT_MAX)

    @property
    def generated_tokens(self) -> int:
        """Since the start, those of unfinished answers included."""
        return self.counts.generated_tokens + sum(
            request.generation.n_generated for request in self._live.values() if request.generation
        )

    def live(self) -> tuple[RequestSummary, ...]:
        """Those that wait or run, the oldest first."""
        return tuple(request.view() for request in self._live.values())

    def recent(self) -> tuple[RequestSummary, ...]:
        """Those that have ended, the latest first."""
        return tuple(self._recent)

    @contextmanager
    def under_way(self, model: str, request_id: str = "") -> Iterator[RequestAccount]:
        """From the request's arrival to its end, however it ends. Without an id it gets a new one, and a
        further one where its id is in use here."""
        request_id = request_id or new_request_id()
        request_id = further_id(request_id) if request_id in self._live else request_id
        request = self._live[request_id] = RequestAccount(model, request_id)
        error: BaseException | None = None
        self._began()
        try:
            yield request
        except BaseException as caught:
            error = caught
            raise
        finally:
            del self._live[request_id]
            request.ended(error)
            self._ended(request)

    def first_token(self, request: RequestAccount, generation: Generation) -> None:
        first_token_s = request.first_token(generation)
        self.metrics.first_token(request.model, generation, first_token_s)

    def _ended(self, request: RequestAccount) -> None:
        generation = request.generation
        self._recent.appendleft(request.view())
        self.metrics.ended(request.model, request.outcome, generation, request.elapsed_s)
        self.counts.count(request.outcome)
        if generation is not None:
            self.counts.generated_tokens += generation.n_generated
            log.info("request %s of %s has ended: %s", request.id, request.model, account(generation))


def account(generation: Generation) -> str:
    """One line for the log; nothing of what was said."""
    timings, n_generated = generation.timings, generation.n_generated
    nodes = " ".join(f"{stage.layers}@{stage.nickname or stage.node_id}" for stage in generation.route)
    return (
        f"{generation.n_prompt_tokens} + {n_generated} tokens, {generation.finish_reason or 'left early'}, "
        f"queue {timings.queue_s:.3f} s, prefill {timings.prefill_s:.3f} s, decode {timings.decode_s:.3f} s, "
        f"{generation.shape} {nodes}"
    )
