"""What llama.cpp's server offers: /completion, /tokenize, /detokenize, /apply-template, /props, /slots.

That server has one model; here each takes a `model`, which may be left out while only one can answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta
from quart import Blueprint, Response, request

from swarmllm import __version__
from swarmllm.api.http.context import current_config, current_node, model_or_only_one, session_of
from swarmllm.api.http.errors import error_object
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.openai.chat import completions as chat_completions
from swarmllm.api.openai.chat import input_tokens, models
from swarmllm.api.openai.chat_request import chat_call, json_schema, limit_of
from swarmllm.api.openai.completions import prompts_of
from swarmllm.api.openai.embeddings import embed
from swarmllm.api.openai.pictures import RequestPictures, seen_by
from swarmllm.api.openai.responses import respond
from swarmllm.api.openai.schema import (
    Body,
    ChatRequest,
    Json,
    JsonSchemaFormat,
    Message,
    ModelName,
    NamedSchema,
    SamplingFields,
    SessionName,
    Text,
    Tool,
    sampling_of,
)
from swarmllm.api.output.feed import Passage
from swarmllm.api.output.presets import call_with_preset, preset_of, sampling_with
from swarmllm.api.output.response import EVENT_STREAM, WAITING, Ask, answer
from swarmllm.api.output.swarm_report import llamacpp_timings, swarm_object
from swarmllm.errors import InvalidRequest, ModelNotFound, SwarmLLMError
from swarmllm.pipeline.origin.generation import Generation, Prompt
from swarmllm_proto.ipc import Sampling

TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=2**20)]


MEDIA_MARKER = "<__media__>"
"""Stands for a picture in a prompt of that server."""


class TokenizeRequest(Body, frozen=True):
    """POST /tokenize. `with_pieces` and `parse_special` at their default only."""

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


class PictureText(Body, frozen=True):
    """A prompt with a MEDIA_MARKER for each picture."""

    prompt_string: Text
    multimodal_data: Annotated[list[Annotated[str, Meta(max_length=64 * 2**20)]], Meta(max_length=4096)]
    """In base64, in their order."""


class NativeCompletion(SamplingFields, frozen=True, kw_only=True):
    """POST /completion. None everywhere means what absence means."""

    ignored = SamplingFields.ignored | {"user"}
    refused = (SamplingFields.refused - {"n_predict", "json_schema"}) | {
        *("n_probs", "n_indent", "image_data", "post_sampling_probs", "n_keep", "response_fields"),
    }

    model: ModelName = ""
    """"": the only one that can answer."""
    prompt: Text | Annotated[list[Any], Meta(min_length=1, max_length=2**20)] | PictureText
    """A text, token ids, or a text with pictures."""
    n_predict: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    """-1: until the context is full."""
    max_tokens: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    """The same."""
    stream: bool | None = None
    json_schema: Json | None = None
    session_id: SessionName | None = None


class NativeReply:
    """An answer in llama.cpp's own words."""

    stream_type = EVENT_STREAM

    def __init__(self, model: str, prompt: str) -> None:
        self._head: Json = {"index": 0, "model": model}
        self._prompt = prompt

    def full(self, passage: Passage, generation: Generation) -> bytes:
        return encode(self._end(passage.text, generation))

    def first(self, generation: Generation | None) -> bytes:
        return b""

    def text(self, passage: Passage) -> bytes:
        return self._event(self._head | {"content": passage.text, "tokens": [], "stop": False})

    def waiting(self) -> bytes:
        return WAITING

    def last(self, generation: Generation) -> bytes:
        return self._event(self._end("", generation))

    def error(self, error: SwarmLLMError) -> bytes:
        return self._event({"error": error_object(error)})

    def _end(self, text: str, generation: Generation) -> Json:
        by_word = generation.stop_sequence is not None
        by_limit = generation.finish_reason == "length"
        return self._head | {
            "content": text,
            "tokens": [],
            "stop": True,
            "prompt": self._prompt,
            "stop_type": "word" if by_word else "limit" if by_limit else "eos",
            "stopping_word": generation.stop_sequence or "",
            "tokens_predicted": generation.n_generated,
            "tokens_evaluated": generation.n_prompt_tokens,
            "tokens_cached": generation.n_prompt_tokens + generation.n_generated,
            "truncated": False,
            "timings": llamacpp_timings(generation),
            "swarm": swarm_object(generation),
        }

    @staticmethod
    def _event(fields: Json) -> bytes:
        return b"data: " + encode(fields) + b"\n\n"


text_tools = Blueprint("text_tools", __name__)

# The same without /v1, as that server has them.
text_tools.post("/chat/completions")(chat_completions)
text_tools.post("/chat/completions/input_tokens")(input_tokens)
text_tools.get("/models")(models)
text_tools.post("/embeddings")(embed)
text_tools.post("/responses")(respond)


@text_tools.post("/completion")
@text_tools.post("/completions")
async def completion() -> Response:
    body = await read_request(NativeCompletion)
    prompt = await _prompt(body)
    if body.n_predict is not None and body.max_tokens is not None and body.n_predict != body.max_tokens:
        raise InvalidRequest("n_predict and max_tokens disagree; send one.", field="n_predict")
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    if limit == 0:
        raise InvalidRequest("has to be 1 or more, or -1 for no limit.", field="n_predict")
    if body.json_schema and body.grammar:
        raise InvalidRequest("grammar and json_schema exclude each other; send one.", field="grammar")
    preset = await preset_of(body.model)
    wanted = NamedSchema(schema=body.json_schema) if body.json_schema else None
    schema_text = json_schema(JsonSchemaFormat(json_schema=wanted)) if wanted else ""
    sampling = sampling_of(sampling_with(preset, body), json_schema=schema_text)
    if session := session_of(body.session_id):
        prompt = replace(prompt, session=session)
    ask = Ask(body.model, prompt, sampling, limit_of(limit) if limit is not None else preset.max_tokens)
    shown = body.prompt.prompt_string if isinstance(body.prompt, PictureText) else prompt.text or ""
    reply = NativeReply(body.model, shown)
    return await answer(ask, reply, stream=bool(body.stream))


async def _prompt(body: NativeCompletion) -> Prompt:
    """Raises InvalidRequest."""
    if not isinstance(body.prompt, PictureText):
        prompt, *others = prompts_of(body.prompt)
        if others:
            raise InvalidRequest("one prompt at a time here; /v1/completions takes several.", field="prompt")
        return prompt
    texts, images = body.prompt.prompt_string.split(MEDIA_MARKER), body.prompt.multimodal_data
    field = "prompt.multimodal_data"
    if len(images) != len(texts) - 1:
        raise InvalidRequest(
            f"there are {len(images)} pictures, and {len(texts) - 1} times {MEDIA_MARKER} in the prompt.",
            field=field,
        )
    asked = RequestPictures()
    markers = [asked.add_base64(image, f"{field}[{i}]") for i, image in enumerate(images)]
    text = "".join(text + marker for text, marker in zip(texts, [*markers, ""], strict=True))
    if not text:
        raise InvalidRequest("prompt is empty.", field="prompt")
    return Prompt(text=text, pictures=await seen_by(body.model, asked, "prompt"), field="prompt")


@text_tools.post("/tokenize")
async def tokenize() -> Response:
    body = await read_request(TokenizeRequest)
    if not body.parse_special:
        raise InvalidRequest("Special tokens are always recognised here.", field="parse_special")
    if body.with_pieces:
        raise InvalidRequest("Not supported here; send the ids to /detokenize.", field="with_pieces")
    model = await model_or_only_one(body.model)
    tokens = await current_node().texts.tokenize(model, body.content, add_special=body.add_special)
    return _json({"tokens": tokens})


@text_tools.post("/detokenize")
async def detokenize() -> Response:
    body = await read_request(DetokenizeRequest)
    model = await model_or_only_one(body.model)
    return _json({"content": await current_node().texts.detokenize(model, body.tokens)})


@text_tools.post("/apply-template")
async def apply_template() -> Response:
    body = await read_request(TemplateRequest)
    model = await model_or_only_one(body.model)
    call = chat_call(ChatRequest(model=model, messages=body.messages, tools=body.tools))
    call = await call_with_preset(call)
    pictures = await seen_by(model, call.pictures, "messages")
    texts = current_node().texts
    rendered = await texts.apply_template(model, call.messages, call.tools, call.template)
    pieces = pictures.split(rendered)
    return _json({"prompt": "".join(each if isinstance(each, str) else MEDIA_MARKER for each in pieces)})


@text_tools.get("/props")
async def props() -> Response:
    """`?model=NAME`. What is the same for every request unless it says otherwise."""
    name = await model_or_only_one(request.args.get("model"))
    view, inference = await current_node().models.get(name), current_config().inference
    if view.entry is None:
        raise ModelNotFound(f"model {name!r} is only on other nodes.", field="model")
    default = Sampling()
    n_ctx = view.settings.n_ctx if view.settings and view.settings.n_ctx else inference.n_ctx
    n_ctx = min(n_ctx, view.entry.manifest.context_length or n_ctx)
    parameters = {
        field: getattr(default, field)
        for field in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
            "ignore_eos",
        )
    }
    return _json(
        {
            "default_generation_settings": {"n_ctx": n_ctx, "params": parameters},
            "total_slots": current_node().admission.max_running,
            "model_alias": view.name,
            "model_path": str(view.entry.path),
            "modalities": {"vision": view.takes_pictures, "audio": False},
            "build_info": f"swarmllm {__version__}",
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
