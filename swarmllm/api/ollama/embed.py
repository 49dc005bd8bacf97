"""Ollama's /api/embed, and /api/embeddings as it was before."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from quart import Response

from swarmllm.api.http.context import current_caller, current_node, current_request_id
from swarmllm.api.http.errors import read_body
from swarmllm.api.ollama.endpoints import ollama
from swarmllm.api.ollama.managing import catalogue_name
from swarmllm.api.openai.chat_reply import encode
from swarmllm.api.openai.schema import Body, Json, ModelName, Text
from swarmllm.api.output.swarm_report import embedding_headers
from swarmllm.node.embeddings import Embedded


class OllamaEmbed(Body, frozen=True, kw_only=True):
    """POST /api/embed."""

    model: ModelName
    input: Text | Annotated[list[Text], Meta(max_length=2048)]
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    # accepted and without effect on the answer: a text that is too long is refused, not cut
    truncate: bool | None = None
    options: Json | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddings(Body, frozen=True, kw_only=True):
    """POST /api/embeddings."""

    model: ModelName
    prompt: Text
    options: Json | None = None
    keep_alive: float | str | None = None


@ollama.post("/embed")
async def embed() -> Response:
    body = await read_body(OllamaEmbed, any_type=True)
    texts = [body.input] if isinstance(body.input, str) else body.input
    embedded = await _embedded(body.model, texts, body.dimensions)
    times_s = (embedded.queue_s, embedded.tokenize_s, embedded.prefill_s)
    answer: Json = {
        "model": body.model,
        "embeddings": [vector.tolist() for vector in embedded.vectors],
        "total_duration": round(sum(times_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": embedded.n_tokens,
    }
    return _json(answer, embedded)


@ollama.post("/embeddings")
async def embeddings() -> Response:
    body = await read_body(OllamaEmbeddings, any_type=True)
    embedded = await _embedded(body.model, [body.prompt], None)
    return _json({"embedding": embedded.vectors[0].tolist()}, embedded)


async def _embedded(model: str, texts: list[str], n_dimensions: int | None) -> Embedded:
    name = await catalogue_name(model)
    return await current_node().embeddings.embed(
        name,
        texts,
        "mean",
        n_dimensions=n_dimensions,
        caller=current_caller(),
        request_id=current_request_id(),
    )


def _json(answer: Json, embedded: Embedded) -> Response:
    response = Response(encode(answer), content_type="application/json")
    response.headers.update(embedding_headers(embedded, current_node().node_id))
    return response


__all__ = ["OllamaEmbed", "OllamaEmbeddings", "ollama"]
