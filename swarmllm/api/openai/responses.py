"""POST /v1/responses, and what is kept of the answers."""

from __future__ import annotations

from typing import cast

import msgspec
from quart import Blueprint, Response, current_app

from swarmllm.api.http.context import current_caller
from swarmllm.api.http.errors import error_response, read_body
from swarmllm.api.openai import schema
from swarmllm.api.openai.chat_reply import encode
from swarmllm.api.openai.responses_reply import ResponsesReply
from swarmllm.api.openai.responses_request import Item, ResponsesRequest, messages_of, responses_call
from swarmllm.api.openai.responses_store import ResponseStore
from swarmllm.api.openai.schema import Json
from swarmllm.api.output.output_parser import prepare
from swarmllm.api.output.response import answer
from swarmllm.errors import InvalidRequest

RESPONSES = "swarmllm.responses"

CALLED_HERE = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Fields of the chat call that a request becomes, by what they are called in the request."""

responses = Blueprint("responses", __name__, url_prefix="/v1")


@responses.post("/responses")
async def respond() -> Response:
    body = await read_body(ResponsesRequest)
    store, owner = _store(), current_caller().key_id
    earlier: list[schema.Message] = []
    if body.previous_response_id is not None:
        earlier = store.find(body.previous_response_id, owner, field="previous_response_id").messages
    call, added = responses_call(body, earlier)
    ask, (spoken,) = await prepare(call, field="input")

    def keep(response: Json) -> None:
        if body.store is not False:
            store.keep(response, [*earlier, *added, *_answered(response)], owner)

    return await answer(ask, ResponsesReply(body, spoken, keep), stream=bool(body.stream))


@responses.get("/responses/<response_id>")
async def retrieve(response_id: str) -> Response:
    return _json(_store().find(response_id, current_caller().key_id, field="response_id").response)


@responses.delete("/responses/<response_id>")
async def delete(response_id: str) -> Response:
    _store().delete(response_id, current_caller().key_id, field="response_id")
    return _json({"id": response_id, "object": "response", "deleted": True})


@responses.errorhandler(InvalidRequest)
async def refused(error: InvalidRequest) -> Response:
    if error.field is not None:
        error.field = CALLED_HERE.get(error.field, error.field)
    return error_response(error)


def _answered(response: Json) -> list[schema.Message]:
    """The answer as the next turn tells it."""
    return messages_of(msgspec.convert(response["output"], list[Item]))


def _store() -> ResponseStore:
    return cast(ResponseStore, current_app.extensions[RESPONSES])


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
