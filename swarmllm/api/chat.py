"""POST /v1/chat/completions and the list of models."""

from __future__ import annotations

from collections.abc import AsyncIterator

from quart import Blueprint, Response

from swarmllm.api.chat_reply import WAITING, Reply, encode
from swarmllm.api.chat_request import ChatCall, chat_call
from swarmllm.api.connection import own_feed
from swarmllm.api.context import current_node
from swarmllm.api.errors import plain_errors, read_body
from swarmllm.api.feed import Feed
from swarmllm.api.schema import ChatRequest
from swarmllm.api.swarm_report import swarm_headers
from swarmllm.api.tool_calls import ToolCallParser
from swarmllm.errors import ModelNotFound
from swarmllm.node import ModelView
from swarmllm.pipeline.prompt import Prompt

HEADERS_AFTER_S = 10.0
"""A failure before this has its own HTTP status; later the stream begins, so that nobody's patience ends."""
WAITING_EVERY_S = 10.0
CREATED = 0
"""OpenAI's schema wants a time; when a model was made is not known here."""

chat = Blueprint("chat", __name__, url_prefix="/v1")


@chat.post("/chat/completions")
async def completions() -> Response:
    call = chat_call(await read_body(ChatRequest))
    parser = ToolCallParser(call.max_tool_calls) if call.tools else None
    reply = Reply(call.model, parser, call.include_usage)
    return await (_streamed(call, reply) if call.stream else _whole(call, reply))


@chat.get("/models")
async def models() -> Response:
    listed = [_model(view) for view in await current_node().models() if view.entry is not None]
    return _json({"object": "list", "data": listed})


@chat.get("/models/<name>")
async def model(name: str) -> Response:
    view = await current_node().model(name)
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


async def _whole(call: ChatCall, reply: Reply) -> Response:
    """A client that leaves cancels this task, and with it the generation."""
    with plain_errors():
        async with current_node().generate(
            call.model, _prompt(call), call.sampling, call.max_tokens
        ) as generation:
            texts = [piece.text async for piece in generation]
    response = Response(reply.full(texts, generation), content_type="application/json")
    response.headers.update(swarm_headers(generation))
    return response


async def _streamed(call: ChatCall, reply: Reply) -> Response:
    opening = current_node().generate(call.model, _prompt(call), call.sampling, call.max_tokens)
    feed = own_feed(Feed(opening))
    await feed.wait(HEADERS_AFTER_S)
    if feed.error is not None:
        raise feed.error
    response = Response(_events(feed, reply), content_type="text/event-stream; charset=utf-8")
    response.timeout = None
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    if feed.generation is not None:
        response.headers.update(swarm_headers(feed.generation))
    return response


async def _events(feed: Feed, reply: Reply) -> AsyncIterator[bytes]:
    """Nothing here may wait in a `finally`: a client that leaves closes this generator in passing."""
    waiting = [reply.first()]
    while True:
        text = await feed.take(WAITING_EVERY_S)
        if text is None:
            waiting.append(WAITING)
        elif text:
            waiting.append(reply.text(text))
        if feed.finished and not feed.has_text:
            break
        yield b"".join(waiting)
        waiting.clear()
    if feed.error is not None:
        waiting.append(reply.error(feed.error))
    elif feed.generation is not None:
        waiting.append(reply.last(feed.generation))
    yield b"".join(waiting)


def _prompt(call: ChatCall) -> Prompt:
    return Prompt(messages=call.messages, tools=call.tools)


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
