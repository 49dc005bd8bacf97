"""POST /v1/responses, and what is kept of the answers.

A node is not a place where conversations are kept: they are gone when it stops, and before that when others
need their room. Whoever has another key than the one that asked sees none of them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import cast

import msgspec
from quart import Blueprint, Response, current_app

from swarmllm.api.http.context import current_caller, current_node
from swarmllm.api.http.errors import error_response
from swarmllm.api.http.fields import read_request
from swarmllm.api.openai import schema
from swarmllm.api.openai.chat_reply import encode
from swarmllm.api.openai.responses_reply import ResponsesReply
from swarmllm.api.openai.responses_request import (
    Item,
    ResponsesRequest,
    TextItem,
    messages_of,
    responses_call,
)
from swarmllm.api.openai.schema import Json, Message
from swarmllm.api.output.output_parser import prepare
from swarmllm.api.output.response import answer
from swarmllm.errors import InvalidRequest

RESPONSES_MAX = 1024
BYTES_MAX = 64 * 2**20
"""Of all conversations together, as JSON."""


class ResponseNotFound(InvalidRequest):
    http_status = 404
    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class Stored:
    response: Json
    messages: list[Message]
    """The whole conversation, the answer included."""
    owner: str
    """Id of the key that asked, "" where none is needed."""
    n_bytes: int
    items: list[Json]
    """What the request said, as OpenAI's items."""


class ResponseStore:
    def __init__(self, responses_max: int = RESPONSES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def keep(
        self, response: Json, messages: list[Message], owner: str, items: list[Json] | None = None
    ) -> None:
        n_bytes = len(msgspec.json.encode([response, messages, items]))
        if n_bytes > self._bytes_max:
            return
        self._stored[str(response["id"])] = Stored(response, messages, owner, n_bytes, items or [])
        self.n_bytes += n_bytes
        while self.n_bytes > self._bytes_max or len(self._stored) > self._responses_max:
            _, oldest = self._stored.popitem(last=False)
            self.n_bytes -= oldest.n_bytes

    def find(self, response_id: str, owner: str, *, field: str) -> Stored:
        """Raises ResponseNotFound naming the field."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFound(
                f"no response {response_id[:80]!r} is kept here (any more): send the conversation itself.",
                field=field,
            )
        return stored

    def delete(self, response_id: str, owner: str, *, field: str) -> None:
        """Raises ResponseNotFound naming the field."""
        self.n_bytes -= self.find(response_id, owner, field=field).n_bytes
        del self._stored[response_id]


RESPONSES = "swarmllm.responses"

CALLED_HERE = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Fields of the chat call that a request becomes, by what they are called in the request."""

responses = Blueprint("responses", __name__, url_prefix="/v1")


@responses.post("/responses")
async def respond() -> Response:
    body = await read_request(ResponsesRequest)
    store, owner = _store(), current_caller().key_id
    earlier: list[schema.Message] = []
    if body.previous_response_id is not None:
        earlier = store.find(body.previous_response_id, owner, field="previous_response_id").messages
    call, added = responses_call(body, earlier)
    ask, (spoken,) = await prepare(call, field="input", effort_field="reasoning.effort")

    def keep(response: Json) -> None:
        if body.store is not False:
            conversation = [*earlier, *added, *_answered(response)]
            store.keep(response, conversation, owner, _input_items(str(response["id"]), body.input))

    return await answer(ask, ResponsesReply(body, spoken, keep), stream=bool(body.stream))


@responses.post("/responses/input_tokens")
async def input_tokens() -> Response:
    """How many tokens of context the same body would take; nothing runs, and nothing is kept."""
    body = await read_request(ResponsesRequest)
    earlier: list[schema.Message] = []
    if body.previous_response_id is not None:
        earlier = (
            _store()
            .find(body.previous_response_id, current_caller().key_id, field="previous_response_id")
            .messages
        )
    call, _ = responses_call(body, earlier)
    ask, _ = await prepare(call, field="input", effort_field="reasoning.effort")
    n_tokens = await current_node().texts.count_tokens(ask.model, ask.prompt)
    return _json({"object": "response.input_tokens", "input_tokens": n_tokens})


@responses.get("/responses/<response_id>")
async def retrieve(response_id: str) -> Response:
    return _json(_store().find(response_id, current_caller().key_id, field="response_id").response)


@responses.get("/responses/<response_id>/input_items")
async def input_items(response_id: str) -> Response:
    """All of them, the latest first, as OpenAI orders them; there are no pages."""
    items = _store().find(response_id, current_caller().key_id, field="response_id").items[::-1]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
    return _json({"object": "list", "data": items, "has_more": False} | ends)


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


def _input_items(response_id: str, asked: str | list[Item]) -> list[Json]:
    """`input` as items with ids of their own."""
    if isinstance(asked, str):
        asked = [Item(role="user", content=[TextItem("input_text", asked)])]
    items: list[Json] = []
    for i, item in enumerate(asked):
        told: Json = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            told["content"] = [{"type": kind, "text": item.content}]
        items.append({"id": f"item_{response_id.removeprefix('resp_')}_{i}", "status": "completed"} | told)
    return items


def _store() -> ResponseStore:
    return cast(ResponseStore, current_app.extensions[RESPONSES])


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
