"""Makes the text of tokens that a last stage elsewhere gave, by this node's own vocabulary.

The stage's own text and its claim of the end are not used: wrong text beside the right token would pass every
check of its tokens. If it ends the text too early, or goes on after its end, the answer continues on another
pipeline, and the stage is charged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
import numpy as np

from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.generation import TokenSource
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import SampledToken
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import FinishReason, Sampling
from swarmllm_proto.swarm import StreamingToken
from swarmllm_proto.tensors import Tensor
from swarmllm_proto.text_stream import TextStream

MODELS_MAX: Final = 16
"""Whose tokens are remembered."""
GROUP_TOKENS: Final = 1024
"""Tokens that are used often lie close together in most vocabularies."""

log = logging.getLogger(__name__)


class Vocabulary(Protocol):
    """The part of WorkerPool that detokenizes."""

    async def pieces(self, model: ModelFile, tokens: Tensor) -> tuple[bytes, ...]: ...

    async def end_tokens(self, model: ModelFile) -> frozenset[int]: ...


class TokenBytes:
    """The bytes that tokens add to a text. A worker is asked once for each group of tokens, because its
    answer waits for the step that it is computing."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[ModelId, dict[int, tuple[bytes, ...]]] = {}
        """By model and group."""
        self._ends: dict[ModelId, frozenset[int]] = {}

    async def of(self, model: ModelFile, token: int, n_vocab: int) -> bytes:
        """Raises SwarmLLMError."""
        known = self._known.pop(model.model_id, {})
        # The one that was asked for last stands last.
        self._known[model.model_id] = known
        if len(self._known) > MODELS_MAX:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._ends.pop(oldest, None)
        group, at = divmod(token, GROUP_TOKENS)
        if group not in known:
            first = group * GROUP_TOKENS
            tokens = np.arange(first, min(first + GROUP_TOKENS, n_vocab), dtype=np.int32)
            known[group] = await self._vocabulary.pieces(model, tokens)
        return known[group][at]

    async def end(self, model: ModelFile, token: int) -> bool:
        """Whether it ends a text. Raises SwarmLLMError."""
        # No turn of the loop for each token: the reader would fall behind.
        if model.model_id not in self._ends:
            self._ends[model.model_id] = await self._vocabulary.end_tokens(model)
        return token in self._ends[model.model_id]


@dataclass(slots=True)
class Detokenizer:
    """Detokenizes one request, over all its pipelines. The text is a function of the tokens alone, so tokens
    that came before detokenizing began are processed later."""

    sampling: Sampling
    generated: list[int]
    """The request's tokens so far; grows by itself."""
    pieces: TokenBytes
    text: TextStream = field(init=False)
    n_done: int = 0
    """Tokens of which the text has been made."""

    def __post_init__(self) -> None:
        self.text = TextStream(self.sampling.stop)

    async def of(
        self, source: TokenSource | None, token: SampledToken, piece: bytes
    ) -> tuple[SampledToken, bytes]:
        """The newest token, of `source`, with the text and the end that this node makes of it. Raises
        RemoteError where it ends the text and must not, or does not and must."""
        if not isinstance(source, Chain) or not isinstance(token, StreamingToken):
            return token, piece
        view = source.context.view
        if view.is_here(view.last):
            return token, piece
        try:
            finish, spelled = await self._made(source.context, token)
        except SwarmLLMError as error:
            log.warning("request %s: its text is as its last stage says: %s", token.request_id, error.message)
            return token, piece
        if (finish == "stop") != (token.finish_reason == "stop") and finish != "length":
            _refute(source)
        if finish == token.finish_reason and self.text.stopped_by == token.stopped_by:
            return token, spelled
        return msgspec.structs.replace(token, finish_reason=finish, stopped_by=self.text.stopped_by), spelled

    async def _made(
        self, context: RequestContext, token: StreamingToken
    ) -> tuple[FinishReason | None, bytes]:
        model, n_vocab = context.model, context.n_vocab
        if self.n_done > len(self.generated):
            # The newest one was refuted.
            self.text, self.n_done = TextStream(self.sampling.stop), 0
        while self.n_done < len(self.generated):
            self.text.push(await self.pieces.of(model, self.generated[self.n_done], n_vocab))
            self.n_done += 1
        ends = not self.sampling.ignore_eos and await self.pieces.end(model, token.token)
        spelled = self.text.push(await self.pieces.of(model, token.token, n_vocab))
        self.n_done += 1
        is_full = self.n_done >= self.sampling.max_tokens
        # A worker elsewhere whose context is smaller may end the text where it is full.
        is_full |= token.finish_reason == "length"
        if not (self.text.is_stopped or ends or is_full):
            return None, spelled
        spelled += self.text.flush()
        return ("stop" if self.text.is_stopped or ends else "length"), spelled


def _refute(chain: Chain) -> None:
    """Raises RemoteError."""
    view = chain.context.view
    chain.blamed.lied(view.stages[view.last].node_id)
    chain.checked_stage = None
    error = RemoteError("the end of the text is not where the last stage says")
    chain.fail(error)
    # What is complete does not fail by itself.
    chain.failure = chain.failure or error
    raise chain.failure
