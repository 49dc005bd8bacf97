"""POST /v1/chat/completions, its JSON body or the chunks of its stream, and the list of models."""

from __future__ import annotations

import secrets
import time

from quart import Blueprint, Response

from swarmllm.api.http.context import current_node
from swarmllm.api.http.errors import error_object
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.openai.chat_request import chat_call
from swarmllm.api.openai.schema import ChatRequest
from swarmllm.api.output.buffered_generation import TextDelta
from swarmllm.api.output.choices import answer_choices, usage
from swarmllm.api.output.output_parser import Item, OutputParser, ReasoningText, prepare
from swarmllm.api.output.response import DONE, EVENT_STREAM, WAITING
from swarmllm.api.output.swarm_report import FINGERPRINT, llamacpp_timings, swarm_object
from swarmllm.api.output.tool_calls import FoundCall
from swarmllm.errors import ModelNotFound, SwarmLLMError
from swarmllm.node import ModelView
from swarmllm.pipeline.origin.generation import Generation
from swarmllm_proto.ipc import TokenLogprob

CREATED = 0
"""OpenAI's schema wants a time; when a model was made is not known here."""

chat = Blueprint("chat", __name__, url_prefix="/v1")
Json = dict[str, object]


@chat.post("/chat/completions")
async def completions() -> Response:
    return await answer_chat()


async def answer_chat(*, begins_with_null: bool = False) -> Response:
    """`begins_with_null`: a stream's first chunk has a null content, as llama.cpp's server has it."""
    call = chat_call(await read_request(ChatRequest))
    request, parsers = await prepare(call)
    replies: list[ChatReply] = []
    for index, parser in enumerate(parsers):
        head = replies[0].head if replies else None
        replies.append(ChatReply(call.model, parser, call.include_usage, index=index, head=head))
        replies[-1].begins_with_null = begins_with_null
    return await answer_choices([request], replies, stream=call.stream)


@chat.post("/chat/completions/input_tokens")
async def input_tokens() -> Response:
    """How many tokens of context the same body would take; nothing runs."""
    request, _ = await prepare(chat_call(await read_request(ChatRequest)))
    n_tokens = await current_node().texts.count_tokens(request.model, request.prompt)
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
        # As OpenRouter says it.
        "architecture": {
            "input_modalities": [
                "text",
                *(["image"] if view.takes_pictures else []),
                *(["audio"] if view.takes_sounds else []),
            ],
            "output_modalities": ["text"],
        },
    }


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")


class ChatReply:
    """One choice of a chat completion on its way out. A stream's content chunks differ in nothing but their
    text, so everything around it is encoded once per request."""

    def __init__(
        self,
        model: str,
        parser: OutputParser,
        include_usage: bool = False,
        *,
        index: int = 0,
        head: Json | None = None,
    ) -> None:
        """`head`: the head of the first choice's reply."""
        self.head: Json = head or {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self.begins_with_null = False
        self._index = index
        self._unsent_logprobs: list[Json] = []
        """Log-probabilities of tokens whose text is held back."""
        self._parser = parser
        self._include_usage = include_usage
        self._n_sent_calls = 0
        self._timings: Json = {}
        """Of this choice, once it has ended."""
        self._text_prefix, self._text_suffix = self._around_text()

    def full(self, text_delta: TextDelta, generation: Generation) -> bytes:
        """The body of an answer that is not streamed."""
        return self.body([self.choice(text_delta, generation)], usage(generation), generation)

    def choice(self, text_delta: TextDelta, generation: Generation) -> Json:
        parsed = self._parser.whole(text_delta.text)
        message: Json = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.text.strip() or None
            message["tool_calls"] = [_call(call) for call in parsed.calls]
        return {
            "index": self._index,
            "message": message,
            "logprobs": _logprobs([_token(each) for each in text_delta.logprobs]),
            "finish_reason": self._finish_reason(generation),
        }

    def body(self, choices: list[Json], usage: Json, generation: Generation) -> bytes:
        body = self.head | {"object": "chat.completion", "choices": choices, "usage": usage}
        return encode(body | {"timings": llamacpp_timings(generation), "swarm": swarm_object(generation)})

    @property
    def stream_type(self) -> str:
        return EVENT_STREAM

    def waiting(self) -> bytes:
        return WAITING

    def first(self, generation: Generation | None) -> bytes:
        # Usually neither an empty content nor null: clients add up what is there.
        content: Json = {"content": None} if self.begins_with_null else {}
        return self._chunk({"role": "assistant"} | content | {"refusal": None})

    def text(self, text_delta: TextDelta) -> bytes:
        """Chunks for a piece of output: usually one, none while a tool call is pending."""
        self._unsent_logprobs += [_token(each) for each in text_delta.logprobs]
        return b"".join(map(self._found, self._parser.feed(text_delta.text)))

    def last(self, generation: Generation) -> bytes:
        return self.finish(generation) + self.end(usage(generation))

    def finish(self, generation: Generation) -> bytes:
        """What was held back, the finish chunk."""
        chunks = [self._found(item) for item in self._parser.finish()]
        self._timings = {"timings": llamacpp_timings(generation)}
        told = self._timings | {"swarm": swarm_object(generation)}
        chunks.append(self._chunk({}, self._finish_reason(generation), told))
        return b"".join(chunks)

    def end(self, usage: Json) -> bytes:
        """The usage chunk, the end."""
        told = self._event({"choices": [], "usage": usage} | self._timings) if self._include_usage else b""
        return told + DONE

    def error(self, error: SwarmLLMError) -> bytes:
        """The stream's last event: no finish chunk and no [DONE], so that nobody takes the rest for an
        answer.
        """
        return b"data: " + encode({"error": error_object(error)}) + b"\n\n"

    def _finish_reason(self, generation: Generation) -> str:
        if self._parser.n_calls:
            return "tool_calls"
        return "length" if generation.finish_reason == "length" else "stop"

    def _found(self, item: Item) -> bytes:
        if isinstance(item, str):
            if self._unsent_logprobs:
                return self._chunk({"content": item})
            return self._text_prefix + encode(item) + self._text_suffix
        if isinstance(item, ReasoningText):
            return self._chunk({"reasoning_content": item.text})
        index, self._n_sent_calls = self._n_sent_calls, self._n_sent_calls + 1
        return self._chunk({"tool_calls": [{"index": index} | _call(item)]})

    def _chunk(self, delta: Json, finish_reason: str | None = None, extra: Json | None = None) -> bytes:
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": _logprobs(self._unsent_logprobs),
            "finish_reason": finish_reason,
        }
        self._unsent_logprobs = []
        usage_field: Json = {"usage": None} if self._include_usage else {}
        return self._event({"choices": [choice]} | usage_field | (extra or {}))

    def _event(self, fields: Json) -> bytes:
        return b"data: " + encode(self.head | {"object": "chat.completion.chunk"} | fields) + b"\n\n"

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


def _logprobs(tokens: list[Json]) -> Json | None:
    return {"content": tokens, "refusal": None} if tokens else None


def _token(logprobs: tuple[TokenLogprob, ...]) -> Json:
    chosen, *top = logprobs
    return _likely(chosen) | {"top_logprobs": [_likely(each) for each in top]}


def _likely(each: TokenLogprob) -> Json:
    """A token that is a part of a character has its bytes only."""
    text = each.piece.decode("utf-8", "replace")
    return {"token": text, "logprob": each.logprob, "bytes": list(each.piece)}
