"""Decides whether and when a request whose pipeline broke gets another one.

Pure: the clock comes in as `now_s`.

Before its first token nobody has seen anything of a request, so it is tried twice (a few times more where
nodes only refuse it) and then refused with a status that a client understands. After the first token a client
reads along, and a pause is better than an end: the stream looks for another pipeline until its timeout, first
at once, then at growing intervals (the caller also tries when the swarm changes).

Nodes that failed are avoided as long as there are others; when there are none they are asked again, because a
worker that died is started again and a node that was lost may return. Faults of workers count more than
faults of the network: a request that crashes one worker after another must not take down the whole swarm.

`PipelineSpeed` says when a pipeline that works is so much slower than planned that another one is worth its
price. Being slow is no fault: a node may have got other work. It costs no trust, and the request moves only
where other nodes can run it, once the client has waited for as long as a change would cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from swarmllm.errors import (
    ContextFull,
    DeadlineExceeded,
    NodeBusy,
    NodeRefused,
    NodeUnreachable,
    NoPipeline,
    Overloaded,
    RemoteError,
    SwarmLLMError,
    WorkerDied,
    WorkerError,
)
from swarmllm_proto.identifiers import NodeId

FIRST_ATTEMPTS = 2
"""Pipelines for a request without a token."""
FIRST_REFUSALS = 4
"""The same, where the nodes refuse: nothing was computed and nobody was waited for."""
MAX_FAULTS = 3
"""Workers that may fail one after the other, without a token between them."""
MAX_RECOVERIES = 256
"""Per request."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5

_SURVIVABLE = (RemoteError, WorkerError, DeadlineExceeded, NoPipeline, Overloaded, ContextFull)
"""ContextFull: the prompt has been measured here; a stage with less room is not the one to use."""
_NOBODYS_FAULT = (NodeUnreachable, NodeBusy, NodeRefused, DeadlineExceeded, NoPipeline, Overloaded)
"""Nothing has been computed in vain."""
SLOW = 10.0
"""So many times as long as planned."""
SLOW_TOKEN_S = 1.0
"""A token within this time is never slow."""
SLOW_TOKENS = 3
"""A mean over fewer says little."""
SLOW_LOOK_S = 0.25
"""A token of a pipeline that is too slow is looked for as soon."""
SILENT_S = 10.0
"""Nor is a silence up to this."""


@dataclass(slots=True)
class RetryPolicy:
    """The policy of one request. The caller calls `token` for every token and `failed` for every failure of a
    pipeline."""

    timeout_s: float
    """0: a stream ends with its pipeline."""
    avoid: set[NodeId] = field(default_factory=set)
    """Node ids that have failed since the last token; the next pipeline is to do without them."""
    doubted: Counter[NodeId] = field(default_factory=Counter)
    """How many of this request's pipelines broke with a node since the last token, where nobody knows which
    of several is to blame; the next one does without as many as can be spared."""
    n_recoveries: int = 0
    """Pipelines that took over after a token."""
    _has_begun: bool = False
    _n_failures: int = 0
    _n_faults: int = 0
    _since_s: float = 0.0
    _cause: SwarmLLMError | None = None
    """The failure since which nothing has come."""

    @property
    def is_late(self) -> bool:
        """The pipeline that broke before the first token had taken all the time that it may."""
        return not self._has_begun and isinstance(self._cause, DeadlineExceeded)

    @property
    def is_under_way(self) -> bool:
        """Nothing has come since a pipeline broke."""
        return self._cause is not None

    def token(self) -> None:
        if self._cause is not None:
            self.n_recoveries += self._has_begun
            self._cause = None
            self._n_failures = self._n_faults = 0
            self.avoid.clear()
            self.doubted.clear()
        self._has_begun = True

    def failed(self, error: SwarmLLMError, now_s: float) -> float:
        """Returns the time of the next attempt. Raises the client's error where another attempt is
        hopeless."""
        cause = self._cause
        if self._cause is None:
            self._cause, self._since_s = error, now_s
        if isinstance(error, NoPipeline) and self.avoid and self._may_ask_again(cause):
            self.avoid.clear()
            return now_s
        self._n_failures += 1
        if not self._has_begun:
            return self._before_the_first_token(error, cause, now_s)
        if not isinstance(error, _SURVIVABLE) or self.timeout_s <= 0:
            raise error
        self._n_faults += not isinstance(error, _NOBODYS_FAULT)
        if self._n_faults >= MAX_FAULTS or self.n_recoveries >= MAX_RECOVERIES:
            raise error
        until_s = self._since_s + self.timeout_s
        if now_s >= until_s:
            raise self._given_up(error)
        return min(until_s, now_s + self._pause_s())

    def _may_ask_again(self, cause: SwarmLLMError | None) -> bool:
        return self._has_begun or not isinstance(cause, NodeUnreachable | NodeBusy)

    def _before_the_first_token(
        self, error: SwarmLLMError, cause: SwarmLLMError | None, now_s: float
    ) -> float:
        if isinstance(error, NoPipeline) and cause is not None:
            raise cause
        may_retry = isinstance(error, RemoteError | WorkerDied | DeadlineExceeded)
        attempts = FIRST_REFUSALS if isinstance(error, NodeRefused) else FIRST_ATTEMPTS
        if not may_retry or self._n_failures >= attempts:
            raise error
        return now_s

    def _pause_s(self) -> float:
        if self._n_failures == 1 and not isinstance(self._cause, NoPipeline):
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** min(self._n_failures - 1, 16), LONGEST_PAUSE_S)

    def _given_up(self, error: SwarmLLMError) -> SwarmLLMError:
        assert self._cause is not None
        if error is self._cause:
            return error
        return NoPipeline(
            f"the answer broke off ({self._cause.message}), and nobody could go on with it within"
            f" {self.timeout_s:g} s: {error.message}"
        )


@dataclass(frozen=True, slots=True)
class PipelineSpeed:
    """The planned speed of one pipeline."""

    first_s: float
    """To the first token."""
    token_s: float
    """From one token to the next."""
    elsewhere_s: Callable[[Collection[NodeId]], Awaitable[float | None]] | None = None
    """What the request would cost without these nodes, or as many of them as can be spared; None: it cannot
    do without any of them."""

    def is_slow(self, n_tokens: int, elapsed_s: float) -> bool:
        """`n_tokens` after the first took `elapsed_s`."""
        return n_tokens >= SLOW_TOKENS and elapsed_s / n_tokens > max(SLOW_TOKEN_S, SLOW * self.token_s)

    def is_late(self, silent_s: float, has_begun: bool) -> bool:
        """Nothing has come for `silent_s`."""
        return silent_s > max(SILENT_S, SLOW * (self.token_s if has_begun else self.first_s))

    def waited_s(self, n_tokens: int, decode_s: float, silent_s: float, has_begun: bool) -> float:
        """How long a pipeline as slow as this has kept the client waiting; 0 while it is as planned."""
        if self.is_slow(n_tokens, decode_s):
            return decode_s + silent_s
        return silent_s if self.is_late(silent_s, has_begun) else 0.0

    async def is_worth_changing(self, waited_s: float, suspected: Collection[NodeId]) -> bool:
        if waited_s <= 0 or self.elsewhere_s is None:
            return False
        cost_s = await self.elsewhere_s(suspected)
        return cost_s is not None and cost_s <= waited_s
