"""Ollama's API: chat, generate, embed, tags, ps and version.

Requests become the same calls as OpenAI's, answers are worded Ollama's way: newline-delimited JSON that
streams unless told not to, durations in nanoseconds, names with a tag (`guide:latest`). Options that only say
how a machine should compute (`num_gpu`, `num_thread` ...) are accepted and change nothing: here the node's
configuration decides. Options that would change the answer and cannot be honoured are refused by name.

Ollama's /api/embed, and /api/embeddings as it was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from quart import Blueprint, Response
from werkzeug.exceptions import HTTPException

from swarmllm.api.http.context import current_caller, current_config, current_node, current_request_id
from swarmllm.api.http.errors import as_swarmllm_error, failure_response, message_with_field, rename_field
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.ollama import models
from swarmllm.api.ollama.models import TAG, catalogue_name, details, modified
from swarmllm.api.ollama.reply import ChatShape, GenerateShape, OllamaReply, timestamp
from swarmllm.api.openai.chat_request import chat_call, json_schema, refuse_unless_neutral
from swarmllm.api.openai.pictures import RequestPictures, seen_by
from swarmllm.api.openai.schema import (
    SAMPLING_NAMES,
    AssistantMessage,
    Body,
    ChatRequest,
    FunctionCall,
    Json,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    ModelName,
    Name,
    NamedSchema,
    ResponseFormat,
    SamplingFields,
    SystemMessage,
    Text,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
    sampling_of,
)
from swarmllm.api.output.output_parser import OutputParser, opened_reasoning, prepare
from swarmllm.api.output.presets import preset_of, sampling_with
from swarmllm.api.output.response import GenerationRequest, answer
from swarmllm.api.output.swarm_report import embedding_headers
from swarmllm.errors import InvalidRequest
from swarmllm.node import ModelView
from swarmllm.node.embeddings import EmbeddingResult
from swarmllm.node.on_demand import parse_keep_alive
from swarmllm.pipeline.origin.generation import Prompt
from swarmllm_proto.ipc import Effort

ollama = Blueprint("ollama", __name__, url_prefix="/api")


class OllamaEmbed(Body, frozen=True, kw_only=True):
    """POST /api/embed."""

    ignored = frozenset({"truncate", "options"})

    model: ModelName
    input: Text | Annotated[list[Text], Meta(max_length=2048)]
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    # accepted and without effect on the answer: a text that is too long is refused, not cut
    truncate: bool | None = None
    options: Json | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddings(Body, frozen=True, kw_only=True):
    """POST /api/embeddings."""

    ignored = frozenset({"truncate", "options"})

    model: ModelName
    prompt: Text
    options: Json | None = None
    keep_alive: float | str | None = None


@ollama.post("/embed")
async def embed() -> Response:
    body = await read_request(OllamaEmbed, any_type=True)
    texts = [body.input] if isinstance(body.input, str) else body.input
    embedded = await _embedded(body.model, texts, body.dimensions, body.keep_alive)
    times_s = (embedded.queue_s, embedded.tokenize_s, embedded.prefill_s)
    answer: Json = {
        "model": body.model,
        "embeddings": [vector.tolist() for vector in embedded.vectors],
        "total_duration": round(sum(times_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": embedded.n_tokens,
    }
    return _embedding(answer, embedded)


@ollama.post("/embeddings")
async def embeddings() -> Response:
    body = await read_request(OllamaEmbeddings, any_type=True)
    embedded = await _embedded(body.model, [body.prompt], None, body.keep_alive)
    return _embedding({"embedding": embedded.vectors[0].tolist()}, embedded)


async def _embedded(
    model: str, texts: list[str], n_dimensions: int | None, keep_alive: float | str | None
) -> EmbeddingResult:
    keep_alive_s = parse_keep_alive(keep_alive)
    name = await catalogue_name(model)
    return await current_node().embeddings.embed(
        name,
        texts,
        n_dimensions=n_dimensions,
        caller=current_caller(),
        request_id=current_request_id(),
        keep_alive_s=keep_alive_s,
    )


def _embedding(answer: Json, embedded: EmbeddingResult) -> Response:
    response = Response(encode(answer), content_type="application/json")
    response.headers.update(embedding_headers(embedded, current_node().node_id))
    return response


API_VERSION = "0.6.4"
CALLED_HERE = {"response_format": "format", "reasoning_effort": "think"}
"""Fields of the chat call that a request becomes, by what they are called in the request."""
"""The version of Ollama whose API this is; apps compare it with the one they need."""


class Options(SamplingFields, frozen=True, kw_only=True):
    ignored = frozenset(
        {
            *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"),
            *("f16_kv", "use_mmap", "use_mlock", "vocab_only"),
        }
    )
    refused = frozenset({"samplers", "top_n_sigma", "draft_num_predict"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "tfs_z": (1.0,),
        "penalize_newline": (True,),
        "num_keep": (0, 4),
    }
    """`num_keep` has the value that asks for nothing and Ollama's own: no prompt is ever cut here."""

    num_predict: Annotated[int, Meta(ge=-2, le=2**20)] | None = None
    # how to compute: decided by this node's configuration
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    vocab_only: bool | None = None
    # at their neutral values only
    num_keep: int | None = None
    penalize_newline: bool | None = None
    tfs_z: float | None = None


class OllamaFunction(Body, frozen=True):
    name: Name
    arguments: Json = msgspec.field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaCall(Body, frozen=True):
    function: OllamaFunction
    id: Name | None = None
    type: str | None = None


Images = Annotated[list[Annotated[str, Meta(max_length=64 * 2**20)]], Meta(max_length=4096)]
"""In base64. They come before the text of their message."""


class OllamaMessage(Body, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=128)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None
    name: Name | None = None


class OllamaRequest(Body, frozen=True, kw_only=True):
    """What chat and generate have in common."""

    ignored = frozenset({"truncate", "shift"})

    model: ModelName
    stream: bool | None = None
    options: Options | None = None
    format: str | Json | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChat(OllamaRequest, frozen=True, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=4096)] = msgspec.field(default_factory=list)
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None


EMPTY_IN_GENERATE = ("suffix", "template", "context")
NEVER_TRUE = ("logprobs",)
"""Not offered: of a request that has them at another value than null, false or nothing, they are refused."""


class OllamaGenerate(OllamaRequest, frozen=True, kw_only=True):
    """POST /api/generate."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: Images | None = None


@ollama.post("/chat")
async def chat() -> Response:
    body = await read_request(OllamaChat, any_type=True)
    name = await catalogue_name(body.model)
    _refuse_unsupported(body)
    keep_alive_s = parse_keep_alive(body.keep_alive)
    if not body.messages:
        return await _nothing_asked(ChatShape(body.model), name, keep_alive_s)
    pictures = RequestPictures()
    messages = [_message(message, f"messages[{i}]", pictures) for i, message in enumerate(body.messages)]
    settings = _settings(name, body)
    limit = _max_tokens(body.options)
    chat_request = msgspec.structs.replace(settings, messages=messages, tools=body.tools, max_tokens=limit)
    call = chat_call(chat_request, pictures)
    request, (parser,) = await prepare(call, effort_field="think")
    request = replace(request, keep_alive_s=keep_alive_s)
    return await answer(request, OllamaReply(ChatShape(body.model), parser), stream=body.stream is not False)


@ollama.post("/generate")
async def generate() -> Response:
    body = await read_request(OllamaGenerate, any_type=True)
    name = await catalogue_name(body.model)
    _refuse_unsupported(body)
    for field in EMPTY_IN_GENERATE:
        if getattr(body, field):
            raise InvalidRequest(f"{field} is not supported here.", field=field)
    keep_alive_s = parse_keep_alive(body.keep_alive)
    if not body.prompt:
        return await _nothing_asked(GenerateShape(body.model), name, keep_alive_s)
    preset = await preset_of(name)
    settings = sampling_with(preset, _settings(name, body))
    asked = RequestPictures()
    text = _with_pictures(body.prompt, body.images, "images", asked)
    pictures = await seen_by(name, asked, "prompt")
    opened = ""
    if body.raw:
        prompt = Prompt(text=text, pictures=pictures, field="prompt")
    else:
        opened = opened_reasoning(await current_node().texts.prompt_ending(name, None, preset.template))
        system = body.system if body.system is not None else preset.system
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        prompt = Prompt(messages=messages, template=preset.template, pictures=pictures, field="prompt")
    sampling = sampling_of(settings, json_schema=json_schema(settings.response_format))
    max_tokens = _max_tokens(body.options) or preset.max_tokens
    request = GenerationRequest(name, prompt, sampling, max_tokens, keep_alive_s=keep_alive_s)
    parser = OutputParser(opened_reasoning=opened)
    return await answer(
        request, OllamaReply(GenerateShape(body.model), parser), stream=body.stream is not False
    )


@ollama.get("/version")
async def version() -> Response:
    return _json({"version": API_VERSION})


@ollama.get("/tags")
async def tags() -> Response:
    """The models a request would find a pipeline for, and those whose layers are not all there yet."""
    views = await current_node().models.own()
    listed = [_listed(view, name) for view in views for name in _names(view)]
    return _json({"models": listed})


@ollama.get("/ps")
async def running() -> Response:
    views = [view for view in await current_node().models.own() if view.complete]
    default = current_config().inference.n_ctx
    sizes = [view.settings.n_ctx if view.settings else default for view in views]
    listed = [
        _listed(view, view.name) | {"context_length": n_ctx} | _on_gpus(view) | _expiry(view)
        for view, n_ctx in zip(views, sizes, strict=True)
    ]
    return _json({"models": listed})


ollama.post("/show")(models.show)
ollama.post("/copy")(models.copy)
ollama.post("/create")(models.create)
ollama.post("/pull")(models.pull)
ollama.delete("/delete")(models.delete)


@ollama.errorhandler(HTTPException)
async def framework_error(error: HTTPException) -> Response:
    return Response(_error(error.name), status=error.code or 500, content_type="application/json")


@ollama.errorhandler(Exception)
async def any_error(error: Exception) -> Response:
    failure = as_swarmllm_error(error)
    rename_field(failure, CALLED_HERE)
    return failure_response(failure, _error(message_with_field(failure)))


def _error(message: str) -> bytes:
    return encode({"error": message})


def _settings(name: str, body: OllamaRequest) -> ChatRequest:
    options = body.options or Options()
    refuse_unless_neutral(options, Options.neutral, "options.")
    chosen = {field: getattr(options, field) for field in SAMPLING_NAMES}
    if options.seed is not None and options.seed < 0:
        # Ollama's -1 means: draw one.
        chosen["seed"] = None
    return ChatRequest(
        model=name,
        messages=[],
        response_format=_response_format(body.format),
        reasoning_effort=_effort(body.think),
        **chosen,
    )


def _effort(think: bool | Literal["low", "medium", "high"] | None) -> Effort | None:
    if isinstance(think, bool):
        return "medium" if think else "none"
    return think


def _response_format(wanted: str | Json | None) -> ResponseFormat | None:
    """Ollama's `format`: "json", or a JSON schema."""
    if not wanted:
        return None
    if isinstance(wanted, str):
        if wanted != "json":
            raise InvalidRequest('can be "json" or a JSON schema.', field="format")
        return JsonObjectFormat()
    return JsonSchemaFormat(json_schema=NamedSchema(name="format", schema=wanted))


def _max_tokens(options: Options | None) -> int | None:
    asked = options.num_predict if options else None
    return asked if asked is not None and asked > 0 else None


def _refuse_unsupported(body: OllamaRequest) -> None:
    for field in NEVER_TRUE:
        if getattr(body, field):
            raise InvalidRequest("is not supported here; leave it out.", field=field)


async def _nothing_asked(words: ChatShape | GenerateShape, name: str, keep_alive_s: float | None) -> Response:
    """Ollama's way to load a model beforehand, or with a `keep_alive` of 0 to let it go. What a person has
    loaded stays."""
    node = current_node()
    async with node.loaded(await node.models.find(name), name, keep_alive_s):
        reason = "unload" if keep_alive_s == 0 else "load"
    return _json(words.say("") | {"done": True, "done_reason": reason})


def _with_pictures(text: str, images: list[str] | None, field: str, pictures: RequestPictures) -> str:
    """The text behind the markers of its pictures."""
    return "".join(pictures.add_base64(image, f"{field}[{i}]") for i, image in enumerate(images or ())) + text


def _message(message: OllamaMessage, path: str, pictures: RequestPictures) -> Message:
    if message.images and message.role not in ("user", "tool"):
        raise InvalidRequest("only users and tools show pictures.", field=f"{path}.images")
    content = _with_pictures(message.content or "", message.images, f"{path}.images", pictures)
    match message.role:
        case "system":
            return SystemMessage(content=content)
        case "user":
            return UserMessage(content=content)
        case "tool":
            name = message.tool_name or message.name or ""
            return ToolMessage(content=content, tool_call_id=message.tool_call_id or name)
    calls = [
        ToolCall(
            id=call.id or f"call_{i}",
            function=FunctionCall(
                name=call.function.name, arguments=encode(call.function.arguments).decode()
            ),
        )
        for i, call in enumerate(message.tool_calls or ())
    ]
    return AssistantMessage(content=content, tool_calls=calls or None)


def _on_gpus(view: ModelView) -> Json:
    """Nothing where layers are on a GPU: how many bytes these take there is not known."""
    workers = current_node().worker_statistics()
    is_there = any(worker.model_id == view.model_id and worker.n_gpu_layers for worker in workers)
    return {} if is_there else {"size_vram": 0}


def _expiry(view: ModelView) -> Json:
    """Of a model that was loaded on demand."""
    left_s = current_node().on_demand.expires_in_s(view.model_id)
    return {} if left_s is None else {"expires_at": timestamp(datetime.now(UTC) + timedelta(seconds=left_s))}


def _names(view: ModelView) -> tuple[str, ...]:
    assert view.entry is not None
    return (view.name, *view.entry.further_names)


def _listed(view: ModelView, called: str) -> Json:
    assert view.entry is not None
    name = called if ":" in called else called + TAG
    return {
        "name": name,
        "model": name,
        "modified_at": modified(view),
        "size": view.entry.manifest.size_bytes,
        "digest": view.model_id,
        "details": details(view),
    }


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
