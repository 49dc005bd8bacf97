"""Answers in Anthropic's words: a message of blocks, or the events that build one up.

A call that is there wants to be run whatever ended the text behind it, so `tool_use` goes before the other
reasons.
"""

from __future__ import annotations

import secrets

import msgspec

from swarmllm.api.http.json import encode
from swarmllm.api.openai.schema import Json
from swarmllm.api.output.buffered_generation import TextDelta
from swarmllm.api.output.output_parser import Item, OutputParser, ReasoningText
from swarmllm.api.output.response import EVENT_STREAM
from swarmllm.api.output.swarm_report import swarm_object
from swarmllm.api.output.tool_calls import FoundCall
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.origin.generation import Generation

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(message: str, status: int) -> bytes:
    fallback = "invalid_request_error" if status < 500 else "api_error"
    kind = ERROR_TYPES.get(status, fallback)
    return encode({"type": "error", "error": {"type": kind, "message": message}})


class AnthropicReply:
    """One message on its way out."""

    def __init__(self, model: str, parser: OutputParser, *, shows_reasoning: bool = True) -> None:
        """Without `shows_reasoning` a thinking block has no text."""
        self._model = model
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self._n_blocks = 0
        self._open_kind = ""
        """"text" or "thinking" while such a block is being told."""

    @property
    def stream_type(self) -> str:
        return EVENT_STREAM

    def full(self, text_delta: TextDelta, generation: Generation) -> bytes:
        parsed = self._parser.whole(text_delta.text)
        blocks: list[Json] = []
        if parsed.reasoning:
            reasoning = parsed.reasoning if self._shows_reasoning else ""
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if parsed.text.strip() or not parsed.calls:
            blocks.append({"type": "text", "text": parsed.text})
        blocks += [_tool_use(call) | {"input": msgspec.json.decode(call.arguments)} for call in parsed.calls]
        end = self._stopped(generation) | {"usage": _usage(generation)}
        return encode(self._message(blocks) | end | {"swarm": swarm_object(generation)})

    def first(self, generation: Generation | None) -> bytes:
        usage = _usage(generation) if generation else {"input_tokens": 0, "output_tokens": 0}
        return _event("message_start", {"message": self._message([]) | {"usage": usage}})

    def text(self, text_delta: TextDelta) -> bytes:
        return b"".join(map(self._found, self._parser.feed(text_delta.text)))

    def waiting(self) -> bytes:
        return PING

    def last(self, generation: Generation) -> bytes:
        events = [*map(self._found, self._parser.finish())]
        if not self._n_blocks:
            events.append(self._found(""))
        events.append(self._close_open())
        end: Json = {"delta": self._stopped(generation), "usage": _usage(generation)}
        end["swarm"] = swarm_object(generation)
        events += [_event("message_delta", end), _event("message_stop", {})]
        return b"".join(events)

    def error(self, error: SwarmLLMError) -> bytes:
        return b"event: error\ndata: " + error_body(error.message, error.http_status) + b"\n\n"

    def _message(self, blocks: list[Json]) -> Json:
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _found(self, item: Item) -> bytes:
        if isinstance(item, FoundCall):
            return self._close_open() + self._call(item)
        if isinstance(item, ReasoningText):
            opening = self._begin("thinking", {"thinking": "", "signature": ""})
            if not self._shows_reasoning:
                return opening
            return opening + self._delta({"type": "thinking_delta", "thinking": item.text})
        return self._begin("text", {"text": ""}) + self._delta({"type": "text_delta", "text": item})

    def _call(self, call: FoundCall) -> bytes:
        opening = self._open(_tool_use(call) | {"input": {}})
        delta = self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return opening + delta + self._close()

    def _open(self, block: Json) -> bytes:
        self._n_blocks += 1
        return _event("content_block_start", {"index": self._n_blocks - 1, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._n_blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        return _event("content_block_stop", {"index": self._n_blocks - 1})

    def _begin(self, kind: str, block: Json) -> bytes:
        if self._open_kind == kind:
            return b""
        closing = self._close_open()
        self._open_kind = kind
        return closing + self._open({"type": kind} | block)

    def _close_open(self) -> bytes:
        closing = self._close() if self._open_kind else b""
        self._open_kind = ""
        return closing

    def _stopped(self, generation: Generation) -> Json:
        if self._parser.n_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if generation.stop_sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": generation.stop_sequence}
        reason = "max_tokens" if generation.finish_reason == "length" else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _tool_use(call: FoundCall) -> Json:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name}


def _usage(generation: Generation) -> Json:
    """What was kept of earlier prompts is not among the `input_tokens`."""
    return {
        "input_tokens": generation.n_prompt_tokens - generation.n_cached_tokens,
        "cache_read_input_tokens": generation.n_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": generation.n_generated,
    }


def _event(kind: str, fields: Json) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode({"type": kind} | fields) + b"\n\n"
