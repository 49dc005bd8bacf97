"""What the last stage says of every row of a prompt, instead of tokens: the row after the final norm, which
embeddings are made of, or how likely the prompt's next token was.

The same walk as a prefill that never comes to its end: every chunk says that more is to follow, so the head
samples nothing, and each PrefillProgress brings what has passed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeVar

import numpy as np
import trio

from swarmllm.errors import RemoteError
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.lifecycle import ChainEvent
from swarmllm.pipeline.origin.output import BrokenPromise, Chunk
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import Compute, ForwardResult
from swarmllm_proto.codec import decode_scores
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Scores
from swarmllm_proto.swarm import PrefillProgress
from swarmllm_proto.tensors import Tensor, decode_tensor

log = logging.getLogger(__name__)

FREEING_TIMEOUT_S = 1.0
T = TypeVar("T")
Chunked = TypeVar("Chunked", Tensor, Scores)


class PromptChain(Chain, Generic[Chunked]):
    """The origin's side of such a walk over several stages."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._chunks: list[Chunked] = []
        self._n_rows = 0

    async def chunks(self) -> list[Chunked]:
        """Of all rows, in order. Raises SwarmLLMError."""
        await self._wait(lambda: self.is_complete)
        return self._chunks

    def _read(self, message: PrefillProgress, payload: bytes | memoryview) -> Chunked:
        """Raises BrokenPromise."""
        raise NotImplementedError

    def next_chunk(self) -> Chunk | None:
        chunk = super().next_chunk()
        return None if chunk is None else chunk._replace(left=chunk.left + 1)

    def _progress(self, message: PrefillProgress, payload: bytes | memoryview) -> None:
        chunk = self._read(message, payload)
        start = message.position - len(chunk)
        if not 0 <= start <= self._n_rows:
            raise BrokenPromise(f"rows from {start} on where {self._n_rows} come next")
        if start == self._n_rows:
            self._chunks.append(chunk)
            self._n_rows += len(chunk)
        super()._progress(message, b"")
        if self._n_rows >= self.window.n_tokens:
            self._pass(ChainEvent.LAST)
            self._reader.unpark_all()
            assert self._session is not None
            self._session.stop()


class RowsChain(PromptChain[Tensor]):
    """f32 [n, n_embd] of each chunk."""

    async def all_rows(self) -> Tensor:
        """f32 [n_prompt_tokens, n_embd]. Raises SwarmLLMError."""
        return np.concatenate(await self.chunks())

    def _read(self, message: PrefillProgress, payload: bytes | memoryview) -> Tensor:
        try:
            rows = decode_tensor(payload).copy()
        except ProtocolError as error:
            raise BrokenPromise(f"rows that cannot be read: {error}") from None
        is_sound = rows.dtype == np.float32 and rows.ndim == 2 and rows.shape[1] == self.context.n_embd
        if not is_sound or not np.isfinite(rows).all():
            raise BrokenPromise(f"rows of {rows.dtype} {rows.shape}, or with numbers that are none")
        return rows


class ScoresChain(PromptChain[Scores]):
    """Of each row how likely the prompt's next token was, and which were likeliest."""

    def _progress(self, message: PrefillProgress, payload: bytes | memoryview) -> None:
        if is_rows(payload, self.context.n_embd):  # No lie: it has ignored a field that it does not know.
            stage = self.context.view.stages[-1]
            self.fail(RemoteError(f"node {stage.node_id} runs a version that does not score prompts"))
            return
        super()._progress(message, payload)

    def _read(self, message: PrefillProgress, payload: bytes | memoryview) -> Scores:
        n_top = self.context.sampling.top_logprobs
        try:
            scores = decode_scores(payload, self._chunk_tokens, n_top)
        except ProtocolError as error:
            raise BrokenPromise(f"scores that cannot be read: {error}") from None
        asked = self.context.scored[max(0, message.position - len(scores)) : message.position]
        if asked != tuple(row[0].token for row in scores):
            raise BrokenPromise(f"scores of other tokens than those before {message.position}")
        if any(each.token >= self.context.n_vocab for row in scores for each in row):
            raise BrokenPromise("scores of tokens that there are not")
        return scores


def is_rows(payload: bytes | memoryview, n_embd: int) -> bool:
    try:
        rows = decode_tensor(payload)
    except ProtocolError:
        return False
    return rows.dtype == np.float32 and rows.ndim == 2 and rows.shape[1] == n_embd


async def local_chunks(
    compute: Compute, context: RequestContext, tokens: Tensor, chunk_tokens: int
) -> AsyncGenerator[ForwardResult, None]:
    """The same where this node holds every layer, chunk by chunk. Raises SwarmLLMError."""
    try:
        for position in range(0, len(tokens), chunk_tokens):
            yield await compute.forward(
                context.model,
                request_id=context.request_id,
                layers=context.view.layers(0),
                position=position,
                tensor=tokens[position : position + chunk_tokens],
                want="scores" if context.scored else "normed",
                sampling=context.sampling if context.scored else None,
                n_prompt_tokens=len(tokens),
                scored=context.scored[position : position + chunk_tokens],
            )
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(FREEING_TIMEOUT_S):
            await compute.cancel(context.model.model_id, context.request_id)


async def with_one_retry(request_id: str, attempt: Callable[[set[NodeId]], Awaitable[T]]) -> T:
    """Of the client's request with this id. `attempt` adds to what it is given the node because of which it
    failed."""
    avoid: set[NodeId] = set()
    try:
        return await attempt(avoid)
    except RemoteError as error:
        log.info("rows of request %s are asked for once more: %s", request_id, error.message)
    return await attempt(avoid)
