"""A prompt's rows after the final norm, instead of tokens: what embeddings are made of.

The same walk as a prefill that never comes to its end: every chunk says that more is to follow, so the head
samples nothing, and each PrefillProgress brings the rows that have passed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from swarmllm.errors import RemoteError
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.lifecycle import ChainEvent
from swarmllm.pipeline.origin.output import BrokenPromise, Chunk
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import Compute
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import PrefillProgress, Stage
from swarmllm_proto.tensors import Tensor, decode_tensor

log = logging.getLogger(__name__)

FREEING_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Rows:
    values: Tensor
    """f32 [n, n_embd]."""
    stages: tuple[Stage, ...]
    """Where they were computed."""


class RowsChain(Chain):
    """The origin's side of such a walk over several stages; `all_rows` once it has been started."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._rows: list[Tensor] = []
        self._n_rows = 0

    async def all_rows(self) -> Tensor:
        """f32 [n_prompt_tokens, n_embd]. Raises SwarmLLMError."""
        await self._wait(lambda: self.is_complete)
        return np.concatenate(self._rows)

    def next_chunk(self) -> Chunk | None:
        chunk = super().next_chunk()
        return None if chunk is None else chunk._replace(left=chunk.left + 1)

    def _progress(self, message: PrefillProgress, payload: bytes | memoryview) -> None:
        try:
            rows = decode_tensor(payload).copy()
        except ProtocolError as error:
            raise BrokenPromise(f"rows that cannot be read: {error}") from None
        is_sound = rows.dtype == np.float32 and rows.ndim == 2 and rows.shape[1] == self.context.n_embd
        if not is_sound or not np.isfinite(rows).all():
            raise BrokenPromise(f"rows of {rows.dtype} {rows.shape}, or with numbers that are none")
        start = message.position - len(rows)
        if not 0 <= start <= self._n_rows:
            raise BrokenPromise(f"rows from {start} on where {self._n_rows} come next")
        if start == self._n_rows:
            self._rows.append(rows)
            self._n_rows += len(rows)
        super()._progress(message, b"")
        if self._n_rows >= self.window.n_tokens:
            self._pass(ChainEvent.LAST)
            self._reader.unpark_all()
            assert self._session is not None
            self._session.stop()


async def local_rows(compute: Compute, context: RequestContext, tokens: Tensor, chunk_tokens: int) -> Tensor:
    """The same where this node holds every layer. Raises SwarmLLMError."""
    rows: list[Tensor] = []
    try:
        for position in range(0, len(tokens), chunk_tokens):
            result = await compute.forward(
                context.model,
                request_id=context.request_id,
                layers=context.view.layers(0),
                position=position,
                tensor=tokens[position : position + chunk_tokens],
                want="normed",
                n_prompt_tokens=len(tokens),
            )
            assert result.tensor is not None
            rows.append(result.tensor)
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(FREEING_TIMEOUT_S):
            await compute.cancel(context.model.model_id, context.request_id)
    return np.concatenate(rows)


async def with_one_retry(request_id: str, attempt: Callable[[set[NodeId]], Awaitable[Rows]]) -> Rows:
    """Of the client's request with this id. `attempt` adds to what it is given the node because of which it
    failed."""
    avoid: set[NodeId] = set()
    try:
        return await attempt(avoid)
    except RemoteError as error:
        log.info("rows of request %s are asked for once more: %s", request_id, error.message)
    return await attempt(avoid)
