"""GET /openapi.json: the endpoints as a document for programs.

Bodies of requests are described by the very types that validate them, so the document cannot promise what a
handler refuses. Answers are described by their content type and in docs/http.md, not by a schema: those of
OpenAI, Anthropic and Ollama are specified by their makers, and clients bring them along.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from quart import Blueprint, Response

from swarmllm import __version__
from swarmllm.api.anthropic.messages import CountRequest, MessagesRequest
from swarmllm.api.http.json import encode
from swarmllm.api.llamacpp.completion import NativeCompletion
from swarmllm.api.llamacpp.endpoints import DetokenizeRequest, TemplateRequest, TokenizeRequest
from swarmllm.api.llamacpp.infill import InfillRequest
from swarmllm.api.ollama.endpoints import OllamaChat, OllamaEmbed, OllamaEmbeddings, OllamaGenerate
from swarmllm.api.ollama.models import OllamaCopy, OllamaCreate, OllamaDelete, OllamaPull, OllamaShow
from swarmllm.api.openai.completions import CompletionRequest
from swarmllm.api.openai.embeddings import EmbeddingRequest
from swarmllm.api.openai.rerank import RerankRequest
from swarmllm.api.openai.responses_request import ResponsesRequest
from swarmllm.api.openai.schema import (
    AddModel,
    AliasModel,
    AttachProjector,
    ChatRequest,
    Json,
    LoadModel,
    MakeInvitation,
    PinModel,
    PlanPublished,
    SearchModels,
    ShareModel,
    SharePublished,
    StartDownload,
    UnloadModel,
)
from swarmllm.models.presets import Preset

JSON, EVENTS, LINES, TEXT = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
PAGE, STYLE, SCRIPT, PICTURE = "text/html", "text/css", "text/javascript", "image/svg+xml"
REFERENCE = "#/components/schemas/{name}"
UNKNOWN_FIELDS = (
    "A schema lists the fields that count. Requests for answers may have others: they are ignored and named "
    "in the header x-swarm-ignored, unless the node's configuration says api.strict."
)


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    body: type | None = None
    answers: tuple[str, ...] = (JSON,)
    """Content types of a 200."""
    query: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    """More of the query: whole numbers."""
    is_body_optional: bool = False
    is_list: bool = False
    """What a 200 answers in JSON is an array."""


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", ChatRequest, (JSON, EVENTS)),
    Operation("post", "/v1/chat/completions/input_tokens", "Count a prompt's tokens", ChatRequest),
    Operation("post", "/v1/completions", "Continue a text", CompletionRequest, (JSON, EVENTS)),
    Operation("post", "/v1/responses", "Answer a list of items", ResponsesRequest, (JSON, EVENTS)),
    Operation("post", "/v1/responses/input_tokens", "Count a prompt's tokens", ResponsesRequest),
    Operation("get", "/v1/responses/{response_id}", "An answer that is still kept"),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "What it was asked",
        query=("order", "after"),
        numbers=("limit",),
    ),
    Operation("delete", "/v1/responses/{response_id}", "Forget it"),
    Operation("post", "/v1/embeddings", "Turn texts into vectors", EmbeddingRequest),
    Operation("post", "/v1/rerank", "Rank documents by a question", RerankRequest),
    Operation("get", "/v1/models", "The models this node has a file of"),
    Operation("get", "/v1/models/{name}", "One of them"),
    Operation("post", "/v1/messages", "Answer a conversation (Anthropic)", MessagesRequest, (JSON, EVENTS)),
    Operation("post", "/v1/messages/count_tokens", "Count a prompt's tokens (Anthropic)", CountRequest),
    Operation("post", "/api/chat", "Answer a conversation (Ollama)", OllamaChat, (LINES, JSON)),
    Operation("post", "/api/generate", "Answer a prompt (Ollama)", OllamaGenerate, (LINES, JSON)),
    Operation("post", "/api/embed", "Turn texts into vectors (Ollama)", OllamaEmbed),
    Operation("post", "/api/embeddings", "The same, as it was before (Ollama)", OllamaEmbeddings),
    Operation("get", "/api/tags", "The models this node has a file of (Ollama)"),
    Operation("get", "/api/ps", "Those that can answer now (Ollama)"),
    Operation("post", "/api/show", "Facts about a model (Ollama)", OllamaShow),
    Operation("post", "/api/copy", "A further name for a model (Ollama)", OllamaCopy),
    Operation("post", "/api/create", "A further name with a preset (Ollama)", OllamaCreate, (LINES, JSON)),
    Operation("post", "/api/pull", "Fetch a model from the web (Ollama)", OllamaPull, (LINES, JSON)),
    Operation("delete", "/api/delete", "Forget a model, or one of its names (Ollama)", OllamaDelete),
    Operation("get", "/api/version", "The version of Ollama whose API this is"),
    Operation("post", "/completion", "Continue a text (llama.cpp)", NativeCompletion, (JSON, EVENTS)),
    Operation("post", "/completions", "The same", NativeCompletion, (JSON, EVENTS)),
    Operation("post", "/infill", "What stands between two texts", InfillRequest, (JSON, EVENTS)),
    Operation("post", "/chat/completions", "As with /v1", ChatRequest, (JSON, EVENTS)),
    Operation("post", "/chat/completions/input_tokens", "As with /v1", ChatRequest),
    Operation("get", "/models", "As with /v1"),
    Operation("post", "/embeddings", "As with /v1", EmbeddingRequest),
    Operation("post", "/rerank", "As with /v1", RerankRequest),
    Operation("post", "/reranking", "As with /v1", RerankRequest),
    Operation("post", "/v1/reranking", "As /v1/rerank", RerankRequest),
    Operation("post", "/responses", "As with /v1", ResponsesRequest, (JSON, EVENTS)),
    Operation("post", "/tokenize", "Text to token ids", TokenizeRequest),
    Operation("post", "/detokenize", "Token ids to text", DetokenizeRequest),
    Operation("post", "/apply-template", "A conversation as the model reads it", TemplateRequest),
    Operation("get", "/props", "What holds for every request", query=("model",)),
    Operation("get", "/slots", "What its turns are taken by", is_list=True),
    Operation("get", "/health", "The process lives"),
    Operation(
        "get",
        "/health/ready",
        "What was to be loaded is loaded, or all layers of one model are held; 503 before",
        query=("model",),
    ),
    Operation("get", "/metrics", "Numbers for Prometheus", answers=(TEXT,)),
    Operation("get", "/openapi.json", "This document"),
    Operation("get", "/", "The dashboard", answers=(PAGE,)),
    Operation("get", "/dashboard/{file}", "A file of the dashboard", answers=(STYLE, SCRIPT, PICTURE)),
    Operation("get", "/api/events", "What a dashboard shows, as it changes", answers=(EVENTS,)),
    Operation("get", "/api/admin/stats", "What the node is doing"),
    Operation("get", "/api/admin/peers", "The nodes it is connected to"),
    Operation("get", "/api/admin/peers/{node}", "One node: the link to it, and how far it is trusted"),
    Operation(
        "get",
        "/api/admin/plan",
        "The route a request would take, and why",
        query=("model",),
        numbers=("prompt_tokens", "output_tokens"),
    ),
    Operation("get", "/api/admin/downloads", "Models that come from the web"),
    Operation("post", "/api/admin/downloads", "Fetch a model from the web, or go on with it", StartDownload),
    Operation("get", "/api/admin/downloads/{id}", "How far a download is"),
    Operation("delete", "/api/admin/downloads/{id}", "Stop a download; what has arrived is kept"),
    Operation("post", "/api/admin/downloads/{id}/retry", "Try one again that failed or was cancelled"),
    Operation("post", "/api/admin/downloads/{id}/clear", "Forget one that has ended"),
    Operation("get", "/api/admin/shares", "Models that are shared out over the swarm"),
    Operation("post", "/api/admin/shares", "Ask the others to hold parts of a model", ShareModel),
    Operation(
        "post", "/api/admin/shares/plan", "What sharing a model on the web would come to", PlanPublished
    ),
    Operation(
        "post",
        "/api/admin/shares/published",
        "Share a model on the web of which each node fetches its own layers",
        SharePublished,
    ),
    Operation("get", "/api/admin/shares/{name}", "How far that is"),
    Operation("get", "/api/admin/shares/{name}/plan", "Who would take which layers"),
    Operation("delete", "/api/admin/shares/{name}", "Ask for it no more; the others drop their parts"),
    Operation("get", "/api/admin/config", "Its settings"),
    Operation("get", "/api/admin/join", "How another machine joins the swarm"),
    Operation(
        "post",
        "/api/admin/invitations",
        "Make an invitation, which holds a private swarm's key",
        MakeInvitation,
        is_body_optional=True,
    ),
    Operation("get", "/api/admin/models", "Its models, and those of the swarm"),
    Operation("post", "/api/admin/models", "Make a GGUF file known", AddModel, (LINES,)),
    Operation(
        "post",
        "/api/admin/models/search",
        "Models of the hub, and whether they fit in this swarm",
        SearchModels,
    ),
    Operation("get", "/api/admin/models/{name}/status", "Who holds which layers"),
    Operation(
        "post",
        "/api/admin/models/{name}/load",
        "Make layers ready",
        LoadModel,
        (LINES,),
        is_body_optional=True,
    ),
    Operation("post", "/api/admin/models/{name}/unload", "Drop layers", UnloadModel, is_body_optional=True),
    Operation("post", "/api/admin/models/{name}/verify", "Check every byte that is here", answers=(LINES,)),
    Operation(
        "post",
        "/api/admin/models/{name}/projector",
        "Let it take pictures",
        AttachProjector,
        (LINES,),
    ),
    Operation(
        "post", "/api/admin/models/{name}/pin", "Keep what was fetched", PinModel, is_body_optional=True
    ),
    Operation("post", "/api/admin/models/{name}/alias", "Give it a further name", AliasModel),
    Operation("get", "/api/admin/models/{name}/preset", "What holds for requests to this name"),
    Operation("post", "/api/admin/models/{name}/preset", "Set that", Preset),
    Operation("delete", "/api/admin/models/{name}", "Forget a model, delete what was fetched of it"),
)

openapi = Blueprint("openapi", __name__)


@openapi.get("/openapi.json")
async def document() -> Response:
    return Response(encode(openapi_document()), content_type=JSON)


@cache
def openapi_document() -> Json:
    bodies = list(dict.fromkeys(operation.body for operation in OPERATIONS if operation.body))
    references, schemas = msgspec.json.schema_components(
        bodies, schema_hook=_anything, ref_template=REFERENCE
    )
    by_type = dict(zip(bodies, references, strict=True))
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        described = _operation(operation, by_type.get(operation.body) if operation.body else None)
        paths.setdefault(operation.path, {})[operation.method] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "SwarmLLM",
            "version": __version__,
            "license": {"name": "Apache-2.0"},
            "description": UNKNOWN_FIELDS,
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # The empty one: a node without keys asks for none.
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _anything(kind: type) -> Json:
    """`object` takes whatever JSON there is."""
    if kind is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError


def _operation(operation: Operation, reference: dict[str, Any] | None) -> Json:
    of_json = "array" if operation.is_list else "object"
    content = {
        kind: {"schema": {"type": of_json if kind == JSON else "string"}} for kind in operation.answers
    }
    described: Json = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method}{operation.path}").rstrip("_"),
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {
                "description": "An error that says what was wrong, in the dialect of the endpoint.",
                "content": {JSON: {"schema": {"type": "object", "required": ["error"]}}},
            },
        },
    }
    names = re.findall(r"\{(\w+)\}", operation.path)
    parameters = [_parameter(name, "path") for name in names]
    parameters += [_parameter(name, "query") for name in operation.query]
    parameters += [_parameter(name, "query", "integer") for name in operation.numbers]
    if parameters:
        described["parameters"] = parameters
    if reference is not None:
        body = {"required": not operation.is_body_optional, "content": {JSON: {"schema": reference}}}
        described["requestBody"] = body
    return described


def _parameter(name: str, place: str, kind: str = "string") -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": kind}}
