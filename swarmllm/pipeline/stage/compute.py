"""The interface through which the pipeline computes layers on this node.

`swarmllm.workerpool.WorkerPool` implements it; the tests of the state machine have one that adds numbers
instead of running a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NotRequired, Protocol, TypedDict, Unpack

from msgspec import UnsetType

from swarmllm.models.layers import LayerRange
from swarmllm.models.projector import Projector
from swarmllm.pictures import Medium, Picture
from swarmllm.workerpool.encoders import EncodedPicture
from swarmllm.workerpool.forward_result import Want
from swarmllm.workerpool.ring import RingHint
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import (
    Effort,
    FinishReason,
    GenerateDone,
    KeptRows,
    KvType,
    Sampling,
    Scores,
    TextPlace,
    Token,
    TokenLogprob,
    TokensAgain,
)
from swarmllm_proto.picture_runs import PictureRun
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
    @property
    def stopped_by(self) -> int | None: ...
    @property
    def fingerprint(self) -> bytes | UnsetType: ...


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
    def scores(self) -> Scores: ...
    @property
    def onward(self) -> bool: ...
    @property
    def again(self) -> TokensAgain: ...


class LocalGeneration(Protocol):
    """Iterates over (token, bytes to show); afterwards `done` is there."""

    @property
    def done(self) -> GenerateDone | None: ...
    def __aiter__(self) -> AsyncIterator[tuple[Token, bytes]]: ...


class ForwardCall(TypedDict):
    """The arguments of a forward; see `WorkerPool.forward`."""

    request_id: str
    layers: LayerRange
    position: int
    tensor: Tensor
    want: Want
    sampling: NotRequired[Sampling | None]
    n_prompt_tokens: NotRequired[int]
    generated: NotRequired[tuple[int, ...]]
    scored: NotRequired[tuple[int, ...]]
    ring: NotRequired[RingHint]
    rounded: NotRequired[bool]
    exact_rows: NotRequired[int]
    kv_type: NotRequired[KvType | None]
    picture_runs: NotRequired[tuple[PictureRun, ...]]
    owner: NotRequired[str]


class GenerateCall(TypedDict):
    """The arguments of a generation."""

    request_id: str
    tokens: Tensor
    sampling: Sampling
    n_generated: NotRequired[int]
    session: NotRequired[str]
    own_kv: NotRequired[bool]
    clients_of: NotRequired[str]
    owner: NotRequired[str]


class Compute(Protocol):
    """The part of WorkerPool that a request uses; see there for what it raises."""

    def loaded(self, model_id: ModelId) -> tuple[LayerRange, ...]: ...

    def context_sizes(self) -> dict[ModelId, int]: ...

    def cut(self, model_id: ModelId, layers: LayerRange, *, if_idle: bool = False) -> None: ...

    def kernel_class(self, model_id: ModelId) -> str: ...

    async def tokenize(
        self,
        model: ModelFile,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
        template: str = "",
        place: TextPlace = "whole",
    ) -> Tensor: ...

    async def apply_template(
        self,
        model: ModelFile,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
        template: str = "",
    ) -> str: ...

    async def encode_picture(
        self, model: ModelFile, projector: Projector, picture: Medium, *, is_kept: bool = True
    ) -> EncodedPicture: ...

    async def recode_picture(self, picture: Picture, *, side_max: int = 0) -> bytes: ...

    def can_recode_now(self) -> bool: ...

    async def detokenize(self, model: ModelFile, tokens: Tensor) -> str: ...

    async def pieces(self, model: ModelFile, tokens: Tensor) -> tuple[bytes, ...]: ...

    async def end_tokens(self, model: ModelFile) -> frozenset[int]: ...

    async def check_grammar(self, model: ModelFile, sampling: Sampling) -> None: ...

    async def embed(self, model: ModelFile, tokens: Tensor) -> Tensor: ...

    async def forward(self, model: ModelFile, **call: Unpack[ForwardCall]) -> ForwardResult: ...

    def generate(
        self, model: ModelFile, **call: Unpack[GenerateCall]
    ) -> AbstractAsyncContextManager[LocalGeneration]: ...

    async def name_prefix(
        self, model: ModelFile, *, request_id: str, layers: LayerRange, names: bytes, scope: str
    ) -> int: ...

    async def cancel(self, model_id: ModelId, request_id: str) -> None: ...

    async def hold(self, model_id: ModelId, request_id: str, hold_s: float) -> None: ...

    async def resume(
        self,
        model: ModelFile,
        *,
        request_id: str,
        resumes: str,
        n_rows: int,
        ranges: Sequence[LayerRange],
    ) -> tuple[KeptRows, ...]: ...

    async def read_journal(
        self, model: ModelFile, *, request_id: str, end: int, position: int, n_rows: int
    ) -> Tensor: ...
