"""POST /v1/embeddings: texts in, vectors out; and the fields that take texts or token ids."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from quart import Blueprint, Response

from swarmllm.api.http.context import current_caller, current_node, current_request_id
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.openai.schema import Body, Json, ModelName, Text
from swarmllm.api.output.swarm_report import embedding_headers
from swarmllm.errors import InvalidRequest

TEXTS_MAX = 2048
"""OpenAI's."""
TOKEN_MAX = 2**31


def texts_of(value: str | list[Any], field: str) -> list[str | list[int]]:
    """What a field holds that may be a text, token ids, or a list of texts or of lists of token ids.

    Raises InvalidRequest."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if len(value) > TEXTS_MAX:
        raise InvalidRequest(f"{len(value)} texts, at most {TEXTS_MAX} at once.", field=field)
    for i, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and _is_tokens(item)):
            raise InvalidRequest("can be a text or a list of token ids.", field=f"{field}[{i}]")
    return value


def _is_tokens(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int and 0 <= item < TOKEN_MAX for item in value)


class EmbeddingRequest(Body, frozen=True, kw_only=True):
    """POST /v1/embeddings. `input`: a text, texts, token ids, or lists of token ids."""

    ignored = frozenset({"user", "truncate", "truncation", "keep_alive", "client_metadata"})
    refused = frozenset({"truncate_prompt_tokens", "input_type", "instruction", "embd_normalize"})

    model: ModelName = ""
    """"": the only one that can answer."""
    input: Text | Annotated[list[Any], Meta(min_length=1, max_length=2**20)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    pooling: Literal["mean", "last"] | None = None
    """Not OpenAI's: over all states (the default), or the last one only."""
    # accepted and without effect on the answer
    user: str | None = None


embeddings = Blueprint("embeddings", __name__, url_prefix="/v1")


@embeddings.post("/embeddings")
async def embed() -> Response:
    body = await read_request(EmbeddingRequest)
    node = current_node()
    embedded = await node.embeddings.embed(
        body.model,
        texts_of(body.input, "input"),
        body.pooling or "mean",
        n_dimensions=body.dimensions,
        caller=current_caller(),
        request_id=current_request_id(),
    )
    listed = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, vector in enumerate(embedded.vectors)
    ]
    usage = {"prompt_tokens": embedded.n_tokens, "total_tokens": embedded.n_tokens}
    answer: Json = {"object": "list", "data": listed, "model": body.model, "usage": usage}
    response = Response(encode(answer), content_type="application/json")
    response.headers.update(embedding_headers(embedded, node.node_id))
    return response


def _encoded(vector: np.ndarray, form: str | None) -> object:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
