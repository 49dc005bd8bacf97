"""POST /v1/responses: the endpoints, their answers and events, and what is kept of the answers.

A node does not archive conversations: they are lost when it stops, or earlier when others need their room. A
request with another API key sees none of them.

Reasoning is not counted apart from the answer: `reasoning_tokens` is 0, and `output_tokens` has them all.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from quart import Blueprint, Response, current_app, request

from swarmllm.api.http.context import current_caller, current_node
from swarmllm.api.http.errors import error_response, rename_field
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.openai import schema
from swarmllm.api.openai.pictures import RequestPictures
from swarmllm.api.openai.responses_request import (
    InputItem,
    ResponsesRequest,
    TextItem,
    ToolEntry,
    messages_of,
    responses_call,
)
from swarmllm.api.openai.schema import Json, Message
from swarmllm.api.output.buffered_generation import TextDelta
from swarmllm.api.output.output_parser import Item, OutputParser, ReasoningText, prepare
from swarmllm.api.output.response import EVENT_STREAM, WAITING, answer
from swarmllm.api.output.swarm_report import swarm_object
from swarmllm.api.output.tool_calls import FoundCall
from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.pictures import Medium
from swarmllm.pipeline.origin.generation import Generation

RESPONSES_MAX = 1024
BYTES_MAX = 64 * 2**20
"""Of all conversations together: as JSON, and their pictures."""
PAGE_MAX = 100
RESPONSES = "swarmllm.responses"
CALLED_HERE = {
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "tools[].function": "tools[]",
}
"""Fields of the chat call that a request becomes, by what they are called in the request."""
responses = Blueprint("responses", __name__, url_prefix="/v1")


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
    pictures: Mapping[str, Medium] = field(default_factory=dict)
    """Of the whole conversation, by their markers in its messages."""


class ResponseStore:
    def __init__(self, responses_max: int = RESPONSES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def keep(
        self,
        response: Json,
        messages: list[Message],
        owner: str,
        items: list[Json] | None = None,
        pictures: Mapping[str, Medium] | None = None,
    ) -> None:
        pictures = pictures or {}
        n_bytes = len(msgspec.json.encode([response, messages, items]))
        n_bytes += sum(len(picture.data) for picture in pictures.values())
        if n_bytes > self._bytes_max:
            return
        kept = Stored(response, messages, owner, n_bytes, items or [], pictures)
        self._stored[str(response["id"])] = kept
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


@responses.post("/responses")
async def respond() -> Response:
    body = await read_request(ResponsesRequest)
    store, owner = _store(), current_caller().key_id
    earlier, pictures = _earlier(body)
    call, added = responses_call(body, earlier, pictures)
    request, (parser,) = await prepare(call, field="input", effort_field="reasoning.effort")

    def keep(response: Json) -> None:
        if body.store is not False:
            conversation = [*earlier, *added, *_answered(response)]
            items = _input_items(str(response["id"]), body.input)
            store.keep(response, conversation, owner, items, request.prompt.pictures.by_marker)

    return await answer(request, ResponsesReply(body, parser, keep), stream=bool(body.stream))


@responses.post("/responses/input_tokens")
async def input_tokens() -> Response:
    """How many tokens of context the same body would take; nothing runs, and nothing is kept."""
    body = await read_request(ResponsesRequest)
    call, _ = responses_call(body, *_earlier(body))
    request, _ = await prepare(call, field="input", effort_field="reasoning.effort")
    n_tokens = await current_node().texts.count_tokens(request.model, request.prompt)
    return _json({"object": "response.input_tokens", "input_tokens": n_tokens})


def _earlier(body: ResponsesRequest) -> tuple[list[schema.Message], RequestPictures]:
    """The conversation that the request goes on with, and its pictures. Raises ResponseNotFound."""
    if body.previous_response_id is None:
        return [], RequestPictures()
    caller = current_caller().key_id
    stored = _store().find(body.previous_response_id, caller, field="previous_response_id")
    return stored.messages, RequestPictures(stored.pictures)


@responses.get("/responses/<response_id>")
async def retrieve(response_id: str) -> Response:
    return _json(_store().find(response_id, current_caller().key_id, field="response_id").response)


@responses.get("/responses/<response_id>/input_items")
async def input_items(response_id: str) -> Response:
    """The latest first, unless `order` is asc: those that follow `after`, at most `limit` of them."""
    items = _store().find(response_id, current_caller().key_id, field="response_id").items
    order, limit, after = (request.args.get(name) for name in ("order", "limit", "after"))
    if order not in (None, "asc", "desc"):
        raise InvalidRequest("order is asc or desc.", field="order")
    if order != "asc":
        items = items[::-1]
    if after is not None:
        at = next((at for at, item in enumerate(items, 1) if item["id"] == after), None)
        if at is None:
            raise InvalidRequest("after is the id of no item of this response.", field="after")
        items = items[at:]
    n_items = len(items) if limit is None else _page_size(limit)
    page = items[:n_items]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return _json({"object": "list", "data": page, "has_more": len(items) > n_items} | ends)


def _page_size(limit: str) -> int:
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= PAGE_MAX):
        raise InvalidRequest(f"limit is a whole number from 1 to {PAGE_MAX}.", field="limit")
    return int(limit)


@responses.delete("/responses/<response_id>")
async def delete(response_id: str) -> Response:
    _store().delete(response_id, current_caller().key_id, field="response_id")
    return _json({"id": response_id, "object": "response", "deleted": True})


@responses.errorhandler(InvalidRequest)
async def refused(error: InvalidRequest) -> Response:
    if error.field == "messages":  # Places in it are not those of the items.
        error.field = "input"
    rename_field(error, CALLED_HERE)
    return error_response(error)


def _answered(response: Json) -> list[schema.Message]:
    """The answer as the next turn tells it."""
    return messages_of(msgspec.convert(response["output"], list[InputItem]), RequestPictures())


def _input_items(response_id: str, asked: str | list[InputItem]) -> list[Json]:
    """`input` as items with ids of their own."""
    if isinstance(asked, str):
        asked = [InputItem(role="user", content=[TextItem("input_text", asked)])]
    items: list[Json] = []
    for i, item in enumerate(asked):
        told = _without_nulls(msgspec.to_builtins(item))
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            told["content"] = [{"type": kind, "text": item.content}]
        items.append({"id": f"item_{response_id.removeprefix('resp_')}_{i}", "status": "completed"} | told)
    return items


def _without_nulls(value: Any) -> Any:
    """Fields that an item has and its type does not."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _store() -> ResponseStore:
    return cast(ResponseStore, current_app.extensions[RESPONSES])


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")


class ResponsesReply:
    """One response on its way out. `on_complete` gets it when it is whole."""

    def __init__(
        self, body: ResponsesRequest, parser: OutputParser, on_complete: Callable[[Json], None]
    ) -> None:
        self._parser = parser
        self._on_complete = on_complete
        self._created_at = int(time.time())
        self._asked = _asked(body)
        self.id = f"resp_{secrets.token_hex(24)}"
        self._output: list[Json] = []
        self._open: _OpenItem | None = None
        self._n_events = 0

    @property
    def stream_type(self) -> str:
        return EVENT_STREAM

    def full(self, text_delta: TextDelta, generation: Generation) -> bytes:
        parsed = self._parser.whole(text_delta.text)
        items = [ReasoningText(parsed.reasoning)] if parsed.reasoning else []
        said = [parsed.text] if parsed.text.strip() or not parsed.calls else []
        self._events([*items, *said, *parsed.calls])
        self._close(_status(generation))
        return encode(self._finished(generation))

    def first(self, generation: Generation | None) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", {"response": begun}) + self._event(
            "response.in_progress", {"response": begun}
        )

    def text(self, text_delta: TextDelta) -> bytes:
        return self._events(self._parser.feed(text_delta.text))

    def waiting(self) -> bytes:
        return WAITING

    def last(self, generation: Generation) -> bytes:
        events = self._events(self._parser.finish())
        if not self._output and self._open is None:
            events += self._events([""])
        events += self._close(_status(generation))
        response = self._finished(generation)
        return events + self._event(f"response.{response['status']}", {"response": response})

    def error(self, error: SwarmLLMError) -> bytes:
        failed = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", {"response": failed})

    def _finished(self, generation: Generation) -> Json:
        status = _status(generation)
        response = self._response(status) | {"usage": _usage(generation), "swarm": swarm_object(generation)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._on_complete(response)
        return response

    def _response(self, status: str) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output),
            "usage": None,
            **self._asked,
        }

    def _events(self, items: list[Item]) -> bytes:
        return b"".join(map(self._found, items))

    def _found(self, item: Item) -> bytes:
        if isinstance(item, FoundCall):
            return self._close("completed") + self._call(item)
        kind, text = ("reasoning", item.text) if isinstance(item, ReasoningText) else ("message", item)
        events = b""
        if self._open is None or self._open.kind != kind:
            events = self._close("completed")
            self._open = _OpenItem(kind)
            place = self._place(self._open.id) | {"content_index": 0}
            events += self._event(
                "response.output_item.added", self._item(self._open.json("in_progress", None))
            )
            events += self._event("response.content_part.added", place | {"part": self._open.part("")})
        self._open.texts.append(text)
        delta = self._place(self._open.id) | {"content_index": 0, "delta": text} | self._open.extra
        return events + self._event(f"response.{self._open.part_kind}.delta", delta)

    def _close(self, status: str) -> bytes:
        """End the item that is open."""
        opened, self._open = self._open, None
        if opened is None:
            return b""
        text = "".join(opened.texts)
        place = self._place(opened.id) | {"content_index": 0}
        item = opened.json(status, text)
        events = self._event(f"response.{opened.part_kind}.done", place | {"text": text} | opened.extra)
        events += self._event("response.content_part.done", place | {"part": opened.part(text)})
        events += self._event("response.output_item.done", self._item(item))
        self._output.append(item)
        return events

    def _call(self, call: FoundCall) -> bytes:
        item: Json = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(24)}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        place = self._place(item["id"])
        begun = item | {"arguments": "", "status": "in_progress"}
        events = self._event("response.output_item.added", self._item(begun))
        delta, done = place | {"delta": call.arguments}, place | {"arguments": call.arguments}
        events += self._event("response.function_call_arguments.delta", delta)
        events += self._event("response.function_call_arguments.done", done | {"name": call.name})
        events += self._event("response.output_item.done", self._item(item))
        self._output.append(item)
        return events

    def _place(self, item_id: object) -> Json:
        return {"item_id": item_id, "output_index": len(self._output)}

    def _item(self, item: Json) -> Json:
        return {"output_index": len(self._output), "item": item}

    def _event(self, kind: str, fields: Json) -> bytes:
        data = encode({"type": kind, "sequence_number": self._n_events} | fields)
        self._n_events += 1
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


class _OpenItem:
    """A message, or reasoning, that is being streamed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.id = f"{'msg' if kind == 'message' else 'rs'}_{secrets.token_hex(24)}"
        self.part_kind = "output_text" if kind == "message" else "reasoning_text"
        self.extra: Json = {"logprobs": []} if kind == "message" else {}
        self.texts: list[str] = []

    def part(self, text: str) -> Json:
        extra: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self.part_kind, "text": text} | extra

    def json(self, status: str, text: str | None) -> Json:
        content = [] if text is None else [self.part(text)]
        extra: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"type": self.kind, "id": self.id, "status": status, "content": content} | extra


def _asked(body: ResponsesRequest) -> Json:
    """What a response repeats of its request, defaults in the place of what was not said."""
    told: Json = msgspec.to_builtins(body)
    return {
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}} if not body.text or not body.text.format else told["text"],
        "tool_choice": told["tool_choice"] or "auto",
        "tools": [_tool_json(tool) for tool in body.tools or ()],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _tool_json(tool: ToolEntry) -> Json:
    return {name: value for name, value in msgspec.structs.asdict(tool).items() if value is not None}


def _status(generation: Generation) -> str:
    return "incomplete" if generation.finish_reason == "length" else "completed"


def _usage(generation: Generation) -> Json:
    n_prompt, n_generated = generation.n_prompt_tokens, generation.n_generated
    return {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": generation.n_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": n_generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_prompt + n_generated,
    }
