"""POST /v1/embeddings: texts in, vectors out."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from quart import Blueprint, Response

from swarmllm.api.http.context import current_caller, current_node, current_request_id
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.openai.inputs import Inputs, read_inputs
from swarmllm.api.openai.schema import Body, Json, ModelName
from swarmllm.api.output.presets import preset_of
from swarmllm.api.output.swarm_report import embedding_headers


class EmbeddingRequest(Body, frozen=True, kw_only=True):
    """POST /v1/embeddings. `input`: a text, token ids, an object, or a list of these."""

    ignored = frozenset({"user", "truncate", "truncation", "keep_alive", "client_metadata"})
    refused = frozenset({"truncate_prompt_tokens", "input_type", "instruction", "embd_normalize"})
    refused_unless: ClassVar[Mapping[str, tuple[float, ...]]] = {"embd_normalize": (2,)}

    prefers_encoders = True

    model: ModelName = ""
    """"": the only one that can answer."""
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    """Not OpenAI's: over all states (the default), or the last one only. A model of the BERT kind has its
    own, and takes no other."""
    exact: bool | None = None
    """Not OpenAI's: the vectors have the same bits whoever else is served."""
    # accepted and without effect on the answer
    user: str | None = None


embeddings = Blueprint("embeddings", __name__, url_prefix="/v1")


@embeddings.post("/embeddings")
async def embed() -> Response:
    body = await read_request(EmbeddingRequest)
    node = current_node()
    embedded = await node.embeddings.embed(
        body.model,
        await read_inputs(body.model, body.input, "input"),
        body.pooling,
        n_dimensions=body.dimensions,
        is_exact=bool((await preset_of(body.model)).sampling.exact if body.exact is None else body.exact),
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
