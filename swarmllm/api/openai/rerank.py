"""POST /v1/rerank: which documents say most about a question, in llama.cpp's and Jina's shape, or in that
of Hugging Face's TEI where `texts` are sent."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from quart import Blueprint, Response

from swarmllm.api.http.context import current_caller, current_node, current_request_id
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.openai.schema import Body, Json, ModelName, Text
from swarmllm.errors import InvalidRequest

DOCUMENTS_MAX = 1024
Documents = Annotated[list[Text], Meta(min_length=1, max_length=DOCUMENTS_MAX)]


class RerankRequest(Body, frozen=True, kw_only=True):
    """POST /v1/rerank. Either `documents` or `texts`."""

    ignored = frozenset({"user", "truncate", "truncation_direction"})
    refused = frozenset({"max_tokens_per_doc", "max_chunks_per_doc", "rank_fields", "raw_scores"})

    prefers_encoders = True

    model: ModelName = ""
    """"": the only one that can answer."""
    query: Text
    documents: Documents | None = None
    texts: Documents | None = None
    """TEI's name, with its answer: a list of `index` and `score`."""
    top_n: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    """TEI's name of it."""


rerank = Blueprint("rerank", __name__)


@rerank.post("/rerank")
@rerank.post("/reranking")
@rerank.post("/v1/rerank")
@rerank.post("/v1/reranking")
async def answer() -> Response:
    body = await read_request(RerankRequest)
    documents = body.documents or body.texts
    if documents is None or (body.documents and body.texts):
        raise InvalidRequest("send a list of documents (or of texts, for TEI's answer).", field="documents")
    ranked = await current_node().embeddings.rank(
        body.model, body.query, documents, caller=current_caller(), request_id=current_request_id()
    )
    best = sorted(range(len(documents)), key=lambda i: -ranked.scores[i])[: body.top_n]
    shows_text = bool(body.return_documents or body.return_text)
    if body.texts:
        told: object = [
            {"index": i, "score": ranked.scores[i]} | ({"text": documents[i]} if shows_text else {})
            for i in best
        ]
    else:
        results: list[Json] = [
            {"index": i, "relevance_score": ranked.scores[i]}
            | ({"document": {"text": documents[i]}} if shows_text else {})
            for i in best
        ]
        usage = {"prompt_tokens": ranked.n_tokens, "total_tokens": ranked.n_tokens}
        told = {"model": body.model, "object": "list", "usage": usage, "results": results}
    return Response(encode(told), content_type="application/json")
