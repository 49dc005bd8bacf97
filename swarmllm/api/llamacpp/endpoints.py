"""Serves the endpoints of llama.cpp's server: /completion, /infill, /tokenize, /detokenize, /apply-template,
/props, /slots.

That server has one model; here each takes a `model`, which may be left out while only one can answer.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from quart import Blueprint, Response, request

from swarmllm import __version__
from swarmllm.api.http.context import current_config, current_node, model_or_only_one
from swarmllm.api.http.errors import error_object, error_response, failure_response, rename_field
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.llamacpp.completion import MEDIA_MARKER, NativeCompletion, read_completion
from swarmllm.api.llamacpp.infill import InfillRequest, filled_in
from swarmllm.api.llamacpp.reply import generation_settings
from swarmllm.api.openai.chat import answer_chat, input_tokens, models
from swarmllm.api.openai.chat_request import chat_call
from swarmllm.api.openai.embeddings import embed
from swarmllm.api.openai.pictures import seen_by
from swarmllm.api.openai.responses import respond
from swarmllm.api.openai.schema import (
    Body,
    ChatRequest,
    Message,
    ModelName,
    SamplingFields,
    TemplateArguments,
    Text,
    Tool,
    sampling_of,
)
from swarmllm.api.output.choices import answer_choices
from swarmllm.api.output.output_parser import with_reasoning_effort
from swarmllm.api.output.presets import call_with_preset, preset_of, sampling_with
from swarmllm.errors import ContextFull, InvalidRequest, ModelNotFound
from swarmllm_proto.ipc import Effort

TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=2**20)]


class TokenizeRequest(Body, frozen=True):
    """POST /tokenize. `parse_special` at its default only."""

    content: Text
    model: ModelName | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body, frozen=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: ModelName | None = None


class TemplateRequest(Body, frozen=True):
    """POST /apply-template."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    model: ModelName | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    """False: up to the end of the last message. Null: an answer begins, or goes on where the last message is
    the assistant's."""
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateArguments | None = None


text_tools = Blueprint("text_tools", __name__)

# The same without /v1, as that server has them.
text_tools.post("/chat/completions/input_tokens")(input_tokens)
text_tools.get("/models")(models)
text_tools.post("/embeddings")(embed)
text_tools.post("/responses")(respond)


@text_tools.post("/chat/completions")
async def chat_completions() -> Response:
    return await answer_chat(begins_with_null=True)


@text_tools.errorhandler(ContextFull)
async def context_full(error: ContextFull) -> Response:
    """That server's name for it; with /v1 it has OpenAI's."""
    told = error_object(error) | {"type": "exceed_context_size_error"}
    return failure_response(error, encode({"error": told}))


@text_tools.errorhandler(InvalidRequest)
async def refused(error: InvalidRequest) -> Response:
    if request.path.startswith("/completion"):
        rename_field(error, {"response_format": "json_schema"})
    return error_response(error)


@text_tools.post("/completion")
@text_tools.post("/completions")
async def completion() -> Response:
    body = await read_request(NativeCompletion)
    requests, replies = await read_completion(body)
    return await answer_choices(requests, replies, stream=bool(body.stream))


@text_tools.post("/infill")
async def infill() -> Response:
    body = await filled_in(await read_request(InfillRequest))
    requests, replies = await read_completion(body)
    return await answer_choices(requests, replies, stream=bool(body.stream))


@text_tools.post("/tokenize")
async def tokenize() -> Response:
    body = await read_request(TokenizeRequest)
    if not body.parse_special:
        raise InvalidRequest("Special tokens are always recognised here.", field="parse_special")
    model = await model_or_only_one(body.model)
    texts = current_node().texts
    tokens = await texts.tokenize(model, body.content, add_special=body.add_special)
    if not body.with_pieces:
        return _json({"tokens": tokens})
    pieces = zip(tokens, await texts.pieces(model, tokens), strict=True)
    return _json({"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in pieces]})


def _piece(piece: bytes) -> str | list[int]:
    """A text, or, of a part of a character, its bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@text_tools.post("/detokenize")
async def detokenize() -> Response:
    body = await read_request(DetokenizeRequest)
    model = await model_or_only_one(body.model)
    return _json({"content": await current_node().texts.detokenize(model, body.tokens)})


@text_tools.post("/apply-template")
async def apply_template() -> Response:
    body = await read_request(TemplateRequest)
    model = await model_or_only_one(body.model)
    is_to_answer = body.add_generation_prompt is not False
    request = ChatRequest(
        model=model,
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt if is_to_answer else True,
        reasoning_effort=body.reasoning_effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    call = await with_reasoning_effort(await call_with_preset(chat_call(request)), "reasoning_effort")
    pictures = await seen_by(model, call.pictures, "messages")
    rendered = await current_node().texts.apply_template(
        model, call.messages, call.tools, call.template, effort=call.effort, is_to_answer=is_to_answer
    )
    pieces = pictures.split(rendered + call.begun)
    return _json({"prompt": "".join(each if isinstance(each, str) else MEDIA_MARKER for each in pieces)})


@text_tools.get("/props")
async def props() -> Response:
    """`?model=NAME`. What is the same for every request unless it says otherwise."""
    name = await model_or_only_one(request.args.get("model"))
    view, inference = await current_node().models.get(name), current_config().inference
    if view.entry is None:
        raise ModelNotFound(f"model {name!r} is only on other nodes.", field="model")
    n_ctx = view.settings.n_ctx if view.settings and view.settings.n_ctx else inference.n_ctx
    n_ctx = min(n_ctx, view.entry.manifest.context_length or n_ctx)
    preset = await preset_of(name)
    sampling = sampling_of(sampling_with(preset, SamplingFields()))
    parameters = generation_settings(
        sampling, limit=preset.max_tokens, n_probs=0, end_tokens=(), stream=False
    )
    return _json(
        {
            "default_generation_settings": {"n_ctx": n_ctx, "params": parameters},
            "total_slots": current_node().admission.max_running,
            "model_alias": view.name,
            "model_path": str(view.entry.path),
            "modalities": {"vision": view.takes_pictures, "audio": view.takes_sounds},
            "build_info": f"swarmllm {__version__}",
            # It is loaded when a request asks for it.
            "is_sleeping": not view.complete and current_config().model.on_demand,
        }
    )


@text_tools.get("/slots")
async def slots() -> Response:
    """One entry per turn that this node has for its clients; nothing of what was said."""
    node, n_ctx = current_node(), current_config().inference.n_ctx
    busy = [request for request in node.requests.live() if request.state in ("prefill", "decode")]
    taken = [
        {
            "id": i,
            "id_task": request.id,
            "n_ctx": n_ctx,
            "is_processing": True,
            "model": request.model,
            "state": request.state,
            "n_prompt_tokens": request.n_prompt_tokens,
            "n_decoded": request.n_generated,
        }
        for i, request in enumerate(busy)
    ]
    free = range(len(busy), node.admission.max_running)
    return _json(
        [*taken, *({"id": i, "id_task": None, "n_ctx": n_ctx, "is_processing": False} for i in free)]
    )


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
