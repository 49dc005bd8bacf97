"""Answers in Ollama's words: one JSON object, or one per line with `done: true` in the last."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Protocol

import msgspec

from swarmllm.api.http.json import encode
from swarmllm.api.openai.schema import Json
from swarmllm.api.output.buffered_generation import TextDelta
from swarmllm.api.output.output_parser import Item, OutputParser, ReasoningText
from swarmllm.api.output.swarm_report import swarm_object
from swarmllm.api.output.tool_calls import FoundCall
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.origin.generation import Generation


class ReplyShape(Protocol):
    def say(self, text: str, calls: list[FoundCall] | None = None, reasoning: str = "") -> Json: ...


class ChatShape:
    """The shape of /api/chat: the text is in a message."""

    def __init__(self, model: str) -> None:
        self._model = model

    def say(self, text: str, calls: list[FoundCall] | None = None, reasoning: str = "") -> Json:
        message: Json = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": msgspec.json.decode(call.arguments)}}
                for call in calls
            ]
        return {"model": self._model, "created_at": timestamp(), "message": message}


class GenerateShape:
    """The shape of /api/generate: the text is a field of its own."""

    def __init__(self, model: str) -> None:
        self._model = model

    def say(self, text: str, calls: list[FoundCall] | None = None, reasoning: str = "") -> Json:
        thinking: Json = {"thinking": reasoning} if reasoning else {}
        return {"model": self._model, "created_at": timestamp(), "response": text} | thinking


class OllamaReply:
    def __init__(self, words: ReplyShape, parser: OutputParser) -> None:
        self._words = words
        self._parser = parser

    @property
    def stream_type(self) -> str:
        return "application/x-ndjson"

    def full(self, text_delta: TextDelta, generation: Generation) -> bytes:
        parsed = self._parser.whole(text_delta.text)
        return encode(self._words.say(parsed.text, parsed.calls, parsed.reasoning) | _end(generation))

    def first(self, generation: Generation | None) -> bytes:
        return b""

    def text(self, text_delta: TextDelta) -> bytes:
        return b"".join(map(self._line, self._parser.feed(text_delta.text)))

    def waiting(self) -> bytes:
        """There are no comments in JSON; a piece without text does no harm."""
        return self._line("")

    def last(self, generation: Generation) -> bytes:
        rest = self._parser.finish()
        end = encode(self._words.say("") | _end(generation)) + b"\n"
        return b"".join([*map(self._line, rest), end])

    def error(self, error: SwarmLLMError) -> bytes:
        return encode({"error": error.message}) + b"\n"

    def _line(self, found: Item) -> bytes:
        if isinstance(found, ReasoningText):
            said = self._words.say("", reasoning=found.text)
        else:
            said = self._words.say(found) if isinstance(found, str) else self._words.say("", [found])
        return encode(said | {"done": False}) + b"\n"


def _end(generation: Generation) -> Json:
    timings = generation.timings
    before_s = timings.queue_s + timings.tokenize_s
    return {
        "done": True,
        "done_reason": "length" if generation.finish_reason == "length" else "stop",
        "total_duration": _ns(before_s + timings.prefill_s + timings.decode_s),
        "load_duration": 0,
        "prompt_eval_count": generation.n_prompt_tokens,
        "prompt_eval_duration": _ns(timings.prefill_s),
        "eval_count": generation.n_generated,
        "eval_duration": _ns(timings.decode_s),
        "swarm": swarm_object(generation),
    }


def timestamp(moment: datetime | None = None) -> str:
    return (moment or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
