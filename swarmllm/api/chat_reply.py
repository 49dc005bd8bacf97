"""Answers of the chat endpoint: the one JSON body, and the chunks of a stream.

A stream's content chunks differ in nothing but their text, so everything around it is encoded once per
request.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from swarmllm.api.answering import EVENT_STREAM
from swarmllm.api.errors import error_object
from swarmllm.api.swarm_report import swarm_object
from swarmllm.api.tool_calls import FoundCall, ToolCallParser
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.generation import Generation

Json = dict[str, object]
encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"


class ChatReply:
    """One chat completion on its way out. `parser` is there when tools were given."""

    def __init__(self, model: str, parser: ToolCallParser | None, include_usage: bool = False) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._head: Json = {"id": self.id, "created": int(time.time()), "model": model}
        self._parser = parser
        self._include_usage = include_usage
        self._n_sent_calls = 0
        self._text_prefix, self._text_suffix = self._around_text()

    def full(self, texts: list[str], generation: Generation) -> bytes:
        """The body of an answer that is not streamed."""
        found = self._parse("".join(texts)) + self._parse_rest()
        content = "".join(item for item in found if isinstance(item, str))
        calls = [item for item in found if isinstance(item, FoundCall)]
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [_call(call) for call in calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish_reason(generation),
        }
        body = self._head | {"object": "chat.completion", "choices": [choice], "usage": usage(generation)}
        return encode(body | {"swarm": swarm_object(generation)})

    @property
    def stream_type(self) -> str:
        return EVENT_STREAM

    def waiting(self) -> bytes:
        return WAITING

    def first(self, generation: Generation | None) -> bytes:
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def text(self, text: str) -> bytes:
        """Chunks for a piece of output: usually one, none while a tool call is pending."""
        if self._parser is None:
            return self._text_prefix + encode(text) + self._text_suffix
        return b"".join(map(self._found, self._parse(text)))

    def last(self, generation: Generation) -> bytes:
        """What was held back, the finish chunk, the usage chunk, the end."""
        chunks = [self._found(item) for item in self._parse_rest()]
        chunks.append(self._chunk({}, self._finish_reason(generation), {"swarm": swarm_object(generation)}))
        if self._include_usage:
            chunks.append(self._event({"choices": [], "usage": usage(generation)}))
        return b"".join([*chunks, DONE])

    def error(self, error: SwarmLLMError) -> bytes:
        """The stream's last event: no finish chunk and no [DONE], so that nobody takes the rest for an
        answer.
        """
        return b"data: " + encode({"error": error_object(error)}) + b"\n\n"

    def _parse(self, text: str) -> list[str | FoundCall]:
        return self._parser.feed(text) if self._parser else [text]

    def _parse_rest(self) -> list[str | FoundCall]:
        return self._parser.finish() if self._parser else []

    def _finish_reason(self, generation: Generation) -> str:
        if self._parser and self._parser.n_calls:
            return "tool_calls"
        return "length" if generation.finish_reason == "length" else "stop"

    def _found(self, item: str | FoundCall) -> bytes:
        if isinstance(item, str):
            return self._text_prefix + encode(item) + self._text_suffix
        assert self._parser is not None
        index, self._n_sent_calls = self._n_sent_calls, self._n_sent_calls + 1
        return self._chunk({"tool_calls": [{"index": index} | _call(item)]})

    def _chunk(self, delta: Json, finish_reason: str | None = None, extra: Json | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage_field: Json = {"usage": None} if self._include_usage else {}
        return self._event({"choices": [choice]} | usage_field | (extra or {}))

    def _event(self, fields: Json) -> bytes:
        return b"data: " + encode(self._head | {"object": "chat.completion.chunk"} | fields) + b"\n\n"

    def _around_text(self) -> tuple[bytes, bytes]:
        mark = "text"
        prefix, _, suffix = self._chunk({"content": mark}).rpartition(b'{"content":' + encode(mark))
        return prefix + b'{"content":', suffix


def _call(call: FoundCall) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def usage(generation: Generation) -> Json:
    n_prompt, n_generated = generation.n_prompt_tokens, generation.n_generated
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": generation.n_cached_tokens},
    }
