"""POST /v1/chat/completions and the list of models."""

from __future__ import annotations

from quart import Blueprint, Response

from swarmllm.api.http.context import current_node
from swarmllm.api.http.fields import read_request
from swarmllm.api.openai.chat_reply import ChatReply, encode
from swarmllm.api.openai.chat_request import chat_call
from swarmllm.api.openai.schema import ChatRequest
from swarmllm.api.output.choices import answer_choices
from swarmllm.api.output.output_parser import prepare
from swarmllm.errors import ModelNotFound
from swarmllm.node import ModelView

CREATED = 0
"""OpenAI's schema wants a time; when a model was made is not known here."""

chat = Blueprint("chat", __name__, url_prefix="/v1")


@chat.post("/chat/completions")
async def completions() -> Response:
    call = chat_call(await read_request(ChatRequest))
    ask, listeners = await prepare(call)
    replies: list[ChatReply] = []
    for index, spoken in enumerate(listeners):
        head = replies[0].head if replies else None
        replies.append(ChatReply(call.model, spoken, call.include_usage, index=index, head=head))
    return await answer_choices([ask], replies, stream=call.stream)


@chat.post("/chat/completions/input_tokens")
async def input_tokens() -> Response:
    """How many tokens of context the same body would take; nothing runs."""
    ask, _ = await prepare(chat_call(await read_request(ChatRequest)))
    n_tokens = await current_node().texts.count_tokens(ask.model, ask.prompt)
    return _json({"object": "response.input_tokens", "input_tokens": n_tokens})


@chat.get("/models")
async def models() -> Response:
    listed = [_model(view) for view in await current_node().models.own()]
    return _json({"object": "list", "data": listed})


@chat.get("/models/<name>")
async def model(name: str) -> Response:
    view = await current_node().models.get(name)
    if view.entry is None:
        raise ModelNotFound(f"model {name!r} is only on other nodes.", field="model")
    return _json(_model(view))


def _model(view: ModelView) -> dict[str, object]:
    return {
        "id": view.name,
        "object": "model",
        "created": CREATED,
        "owned_by": "swarmllm",
        "ready": view.complete,
    }


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
