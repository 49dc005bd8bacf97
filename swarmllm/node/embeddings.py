"""Embeds texts, and ranks documents by their relevance to a question.

Of a model that generates text, a vector is its states after the final norm, pooled over the text and
normalised to length 1. A model of the BERT kind (`manifest.is_text_encoder`) runs whole, on this node, and
pools its states itself.

Any model can be used; whether its vectors are useful depends on its training. Each text is computed alone, in
the requests' own order, under one turn: a batch of a thousand does not keep others from theirs, and memory
holds the rows of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import trio

from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.models import CatalogueEntry
from swarmllm.models.manifest import is_text_encoder
from swarmllm.node.admission import Admission
from swarmllm.node.model_access import RequestModels
from swarmllm.node.user_requests import UserRequests
from swarmllm.pipeline.origin.generation import token_ids
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.request import further_id
from swarmllm.scheduling.tiers import LOCAL, Caller
from swarmllm.workerpool import ModelFile, WorkerPool
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import Stage

Pooling = Literal["mean", "last", "cls"]
Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    vectors: list[Vector]
    """f32 [n_embd] of length 1, one per text."""
    n_tokens: int
    stages: tuple[Stage, ...]
    """Where the last text was computed."""
    queue_s: float
    tokenize_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class RerankResult:
    scores: list[float]
    """The model's own number for each document; the higher, the better it fits."""
    n_tokens: int


@contextmanager
def _blamed_on(field: str) -> Iterator[None]:
    """Reports an error in a text under that text's field. Errors of the model keep their own field."""
    try:
        yield
    except InvalidRequest as error:
        if error.field != "model":
            error.field = field
        raise


class Embeddings:
    def __init__(
        self,
        pool: WorkerPool,
        pipelines: Pipelines,
        admission: Admission,
        requests: UserRequests,
        models: RequestModels,
        node_id: NodeId,
    ) -> None:
        self._pool = pool
        self._pipelines = pipelines
        self._admission = admission
        self._models = models
        self._requests = requests
        self._node_id = node_id

    async def embed(
        self,
        model: str,
        texts: Sequence[str | list[int]],
        pooling: Pooling | None = None,
        *,
        n_dimensions: int | None = None,
        is_exact: bool = False,
        caller: Caller = LOCAL,
        request_id: str = "",
        keep_alive_s: float | None = None,
    ) -> EmbeddingResult:
        """Texts, or the token ids of texts. `pooling` None: the model's own, or over all states.
        `n_dimensions`: as many the vectors are to have. `is_exact`: as `Sampling.exact`; every text
        of a model of the BERT kind is computed alone. `keep_alive_s`: how long a model that was loaded for
        requests stays; None: as configured.

        Raises ModelNotFound, InvalidRequest naming the text (`input[3]`), ContextFull, Overloaded, and what
        pipelines raise.
        """
        entry = await self._models.model_for_embeddings(model)
        n_embd = entry.manifest.n_embd
        if n_dimensions not in (None, n_embd):
            raise InvalidRequest(
                f"{entry.name} has {n_embd} dimensions, and no fewer that mean anything.", field="dimensions"
            )
        with self._requests.under_way(entry.name, request_id) as request:
            if is_text_encoder(entry.manifest):
                async with self._admission.turn(caller) as queue_s:
                    request.has_turn()
                    return await self._encoded(entry, texts, pooling, queue_s)
            async with (
                self._models.loaded(entry, model, keep_alive_s),
                self._admission.turn(caller) as queue_s,
            ):
                request.has_turn()
                return await self._all(
                    entry, texts, pooling or "mean", queue_s, request.id, is_exact=is_exact
                )

    async def rank(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        caller: Caller = LOCAL,
        request_id: str = "",
    ) -> RerankResult:
        """Raises ModelNotFound, InvalidRequest where the model does not rank or a document is too long,
        Overloaded, and what workers raise."""
        entry = await self._models.model_for_embeddings(model)
        if not is_text_encoder(entry.manifest):
            raise InvalidRequest(f"{entry.name} does not rank documents.", field="model")
        with self._requests.under_way(entry.name, request_id) as request:
            async with self._admission.turn(caller):
                request.has_turn()
                scores: list[float] = []
                n_tokens = 0
                for i, document in enumerate(documents):
                    with _blamed_on(f"documents[{i}]"):
                        encoded = await self._pool.encode_text(ModelFile.of(entry), query, document)
                    scores.append(float(encoded.values[0]))
                    n_tokens += encoded.n_tokens
        return RerankResult(scores, n_tokens)

    async def _encoded(
        self,
        entry: CatalogueEntry,
        texts: Sequence[str | list[int]],
        pooling: Pooling | None,
        queue_s: float,
    ) -> EmbeddingResult:
        started_s = trio.current_time()
        vectors: list[Vector] = []
        n_tokens = 0
        for i, text in enumerate(texts):
            field = f"input[{i}]" if len(texts) > 1 else "input"
            given = text if isinstance(text, str) else token_ids(entry, text, field)
            with _blamed_on(field):
                encoded = await self._pool.encode_text(ModelFile.of(entry), given)
            if encoded.pooling == "rank":
                raise InvalidRequest(
                    f"{entry.name} ranks documents (POST /v1/rerank); it gives no vectors.", field="model"
                )
            if pooling not in (None, encoded.pooling) and encoded.pooling != "none":
                raise InvalidRequest(f"{entry.name} pools by itself: {encoded.pooling}.", field="pooling")
            rows = encoded.values if encoded.values.ndim == 2 else encoded.values[None]
            vectors.append(pooled(rows, pooling or "mean" if encoded.pooling == "none" else "last"))
            n_tokens += encoded.n_tokens
        whole = entry.manifest.whole
        stage = Stage(node_id=self._node_id, start=whole.start, end=whole.end)
        took_s = trio.current_time() - started_s
        return EmbeddingResult(vectors, n_tokens, (stage,), queue_s=queue_s, tokenize_s=0.0, prefill_s=took_s)

    async def _all(
        self,
        entry: CatalogueEntry,
        texts: Sequence[str | list[int]],
        pooling: Pooling,
        queue_s: float,
        request_id: str,
        *,
        is_exact: bool,
    ) -> EmbeddingResult:
        started_s = trio.current_time()
        fields = [f"input[{i}]" if len(texts) > 1 else "input" for i in range(len(texts))]
        prompts = [await self._tokens(entry, text, field) for text, field in zip(texts, fields, strict=True)]
        tokenized_s = trio.current_time()
        vectors: list[Vector] = []
        stages: tuple[Stage, ...] = ()
        for prompt, field in zip(prompts, fields, strict=True):
            with _blamed_on(field):
                rows = await self._pipelines.rows(
                    prompt, entry, request_id=further_id(request_id), is_exact=is_exact
                )
            vectors.append(pooled(rows.values, pooling))
            stages = rows.stages
        return EmbeddingResult(
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
    pick = {"last": -1, "cls": 0}
    vector = rows[pick[pooling]] if pooling in pick else rows.mean(axis=0, dtype=np.float64)
    length = float(np.linalg.norm(vector))
    if not length:
        raise SwarmLLMError("the model gives a vector without direction")
    return np.asarray(vector / length, np.float32)
