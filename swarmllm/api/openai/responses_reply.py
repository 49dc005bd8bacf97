"""Answers in the words of OpenAI's Responses API: an object with a list of items, or the events that build
it up.

Thoughts are not counted apart from the answer: `reasoning_tokens` is 0, and `output_tokens` has them all.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec

from swarmllm.api.openai.chat_reply import WAITING, encode
from swarmllm.api.openai.responses_request import ResponsesRequest, ToolEntry
from swarmllm.api.openai.schema import Json
from swarmllm.api.output.feed import Passage
from swarmllm.api.output.output_parser import Item, OutputParser, Thought
from swarmllm.api.output.response import EVENT_STREAM
from swarmllm.api.output.swarm_report import swarm_object
from swarmllm.api.output.tool_calls import FoundCall
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.origin.generation import Generation


class ResponsesReply:
    """One response on its way out. `on_complete` gets it when it is whole."""

    def __init__(
        self, body: ResponsesRequest, spoken: OutputParser, on_complete: Callable[[Json], None]
    ) -> None:
        self._spoken = spoken
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

    def full(self, passage: Passage, generation: Generation) -> bytes:
        heard = self._spoken.whole(passage.text)
        items = [Thought(heard.thought)] if heard.thought else []
        said = [heard.text] if heard.text.strip() or not heard.calls else []
        self._events([*items, *said, *heard.calls])
        self._close(_status(generation))
        return encode(self._finished(generation))

    def first(self, generation: Generation | None) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", {"response": begun}) + self._event(
            "response.in_progress", {"response": begun}
        )

    def text(self, passage: Passage) -> bytes:
        return self._events(self._spoken.feed(passage.text))

    def waiting(self) -> bytes:
        return WAITING

    def last(self, generation: Generation) -> bytes:
        events = self._events(self._spoken.finish())
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
        kind, text = ("reasoning", item.text) if isinstance(item, Thought) else ("message", item)
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
    """A message, or a thought, that is being told."""

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
        "tools": [_told(tool) for tool in body.tools or ()],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _told(tool: ToolEntry) -> Json:
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
