"""What the pipeline asks of whoever runs the layers on this node.

`swarmllm.workerpool.WorkerPool` is the one that does; the tests of the state machine bring their own, which
adds numbers instead of running a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.ring import NO_RING, RingHint
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Effort, FinishReason, GenerateDone, Sampling, Token, TokenLogprob
from swarmllm_proto.tensors import Tensor


class SampledToken(Protocol):
    """What `ipc.Token` and `swarm.StreamingToken` have in common."""

    @property
    def index(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]: ...


class ForwardResult(Protocol):
    @property
    def tensor(self) -> Tensor | None: ...
    @property
    def token(self) -> Token | None: ...
    @property
    def piece(self) -> bytes: ...
    @property
    def compute_s(self) -> float: ...
    @property
    def onward(self) -> bool: ...


class LocalGeneration(Protocol):
    """Iterates over (token, bytes to show); afterwards `done` is there."""

    @property
    def done(self) -> GenerateDone | None: ...
    def __aiter__(self) -> AsyncIterator[tuple[Token, bytes]]: ...


class Compute(Protocol):
    """The part of WorkerPool that a request uses; see there for what it raises."""

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]: ...

    def context_sizes(self) -> dict[str, int]: ...

    async def tokenize(
        self,
        model: ModelFile,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
    ) -> Tensor: ...

    async def embed(self, model: ModelFile, tokens: Tensor) -> Tensor: ...

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
    ) -> ForwardResult: ...

    def generate(
        self,
        model: ModelFile,
        *,
        request_id: str,
        tokens: Tensor,
        sampling: Sampling,
        n_generated: int = 0,
        session: str = "",
    ) -> AbstractAsyncContextManager[LocalGeneration]: ...

    async def name_prefix(
        self, model: ModelFile, *, request_id: str, layers: LayerRange, names: bytes, scope: str
    ) -> int: ...

    async def cancel(self, model_id: str, request_id: str) -> None: ...
