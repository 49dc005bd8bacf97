"""Embeds texts: the model's states after its final norm, pooled over the text and normalised to length 1.

Any model can be asked; whether its vectors tell anything about meaning is a matter of its training. Each
text is computed alone, in the requests' own order, under one turn: a batch of a thousand does not keep
others from theirs, and memory holds the rows of one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import trio

from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.models import CatalogueEntry
from swarmllm.node.admission import Admission
from swarmllm.node.requests import UserRequests
from swarmllm.pipeline.origin.generation import token_ids
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.request import further_id
from swarmllm.scheduling.tiers import LOCAL, Caller
from swarmllm.workerpool import ModelFile, WorkerPool
from swarmllm_proto.swarm import Stage

Pooling = Literal["mean", "last"]
Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embedded:
    vectors: list[Vector]
    """f32 [n_embd] of length 1, one per text."""
    n_tokens: int
    stages: tuple[Stage, ...]
    """Where the last text was computed."""
    queue_s: float
    tokenize_s: float
    prefill_s: float


class Embeddings:
    def __init__(
        self,
        pool: WorkerPool,
        pipelines: Pipelines,
        admission: Admission,
        find: Callable[[str], Awaitable[CatalogueEntry]],
        requests: UserRequests,
        loaded: Callable[[CatalogueEntry, str, float | None], AbstractAsyncContextManager[None]],
    ) -> None:
        """`find`: the model of a name or id, with what reading a prompt takes. `loaded(entry, name,
        keep_alive_s)`: while somebody can run it."""
        self._pool = pool
        self._pipelines = pipelines
        self._admission = admission
        self._find = find
        self._requests = requests
        self._loaded = loaded

    async def embed(
        self,
        model: str,
        texts: Sequence[str | list[int]],
        pooling: Pooling,
        *,
        n_dimensions: int | None = None,
        caller: Caller = LOCAL,
        request_id: str = "",
        keep_alive_s: float | None = None,
    ) -> Embedded:
        """Texts, or the token ids of texts. `n_dimensions`: as many the vectors are to have. `keep_alive_s`:
        how long a model that was loaded for requests stays; None: as configured.

        Raises ModelNotFound, InvalidRequest naming the text (`input[3]`), ContextFull, Overloaded, and what
        pipelines raise.
        """
        entry = await self._find(model)
        n_embd = entry.manifest.n_embd
        if n_dimensions not in (None, n_embd):
            raise InvalidRequest(
                f"{entry.name} has {n_embd} dimensions, and no fewer that mean anything.", field="dimensions"
            )
        with self._requests.under_way(entry.name, request_id) as request:
            async with self._loaded(entry, model, keep_alive_s), self._admission.turn(caller) as queue_s:
                request.has_turn()
                return await self._all(entry, texts, pooling, queue_s, request.id)

    async def _all(
        self,
        entry: CatalogueEntry,
        texts: Sequence[str | list[int]],
        pooling: Pooling,
        queue_s: float,
        request_id: str,
    ) -> Embedded:
        started_s = trio.current_time()
        fields = [f"input[{i}]" if len(texts) > 1 else "input" for i in range(len(texts))]
        prompts = [await self._tokens(entry, text, field) for text, field in zip(texts, fields, strict=True)]
        tokenized_s = trio.current_time()
        vectors: list[Vector] = []
        stages: tuple[Stage, ...] = ()
        for prompt, field in zip(prompts, fields, strict=True):
            try:
                rows = await self._pipelines.rows(prompt, entry, request_id=further_id(request_id))
            except InvalidRequest as error:
                error.field = field
                raise
            vectors.append(pooled(rows.values, pooling))
            stages = rows.stages
        return Embedded(
            vectors,
            sum(map(len, prompts)),
            stages,
            queue_s=queue_s,
            tokenize_s=tokenized_s - started_s,
            prefill_s=trio.current_time() - tokenized_s,
        )

    async def _tokens(
        self, entry: CatalogueEntry, text: str | list[int], field: str
    ) -> npt.NDArray[np.int32]:
        if isinstance(text, str):
            tokens = await self._pool.tokenize(ModelFile.of(entry), text=text)
        else:
            tokens = token_ids(entry, text, field)
        if not len(tokens):
            raise InvalidRequest("is empty.", field=field)
        return tokens


def pooled(rows: Vector, pooling: Pooling) -> Vector:
    """f32 [n, n_embd] -> f32 [n_embd] of length 1. Raises SwarmLLMError where that cannot be."""
    vector = rows[-1] if pooling == "last" else rows.mean(axis=0, dtype=np.float64)
    length = float(np.linalg.norm(vector))
    if not length:
        raise SwarmLLMError("the model gives a vector without direction")
    return np.asarray(vector / length, np.float32)
