"""POST /v1/completions: text in, text on from there. No chat template, no tools."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from msgspec import Meta
from quart import Blueprint, Response

from swarmllm.api.answering import EVENT_STREAM, Ask, answer
from swarmllm.api.chat_reply import DONE, WAITING, encode, usage
from swarmllm.api.chat_request import sampling_of
from swarmllm.api.errors import error_object, read_body
from swarmllm.api.schema import (
    Body,
    ChatRequest,
    Json,
    MaxTokens,
    ModelName,
    Penalty,
    Seed,
    Share,
    Stop,
    StreamOptions,
    Temperature,
    Text,
)
from swarmllm.api.swarm_report import swarm_object
from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.pipeline.generation import Generation
from swarmllm.pipeline.prompt import Prompt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (),
    "logit_bias": ({},),
    "suffix": ("",),
}
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
)


class CompletionRequest(Body, frozen=True, kw_only=True):
    """POST /v1/completions. None everywhere means what absence means."""

    model: ModelName
    prompt: Text | Annotated[list[Any], Meta(max_length=2**20)]
    """A text, or a list of one text."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    echo: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    # llama.cpp's extras
    top_k: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    min_p: Share | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None
    ignore_eos: bool | None = None
    # accepted and without effect on the answer
    user: str | None = None
    # accepted at their neutral value only
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    logit_bias: Json | None = None
    suffix: str | None = None


completions = Blueprint("completions", __name__, url_prefix="/v1")


@completions.post("/completions")
async def complete() -> Response:
    body = await read_body(CompletionRequest)
    for field, neutral in NEUTRAL.items():
        value = getattr(body, field)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{field} is not supported here; leave it out.", field=field)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", field="stream_options")
    prompt = _prompt(body.prompt)
    settings = ChatRequest(model=body.model, messages=[], **{name: getattr(body, name) for name in SAMPLING})
    ask = Ask(body.model, Prompt(text=prompt), sampling_of(settings), body.max_tokens or DEFAULT_MAX_TOKENS)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    reply = CompletionReply(body.model, prompt if body.echo else "", include_usage)
    return await answer(ask, reply, stream=bool(body.stream))


def _prompt(prompt: str | list[Any]) -> str:
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise InvalidRequest(
                "prompt can be a text or a list of one text; several prompts and token ids are not supported"
                " here.",
                field="prompt",
            )
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequest("prompt is empty.", field="prompt")
    return prompt


class CompletionReply:
    """One text completion on its way out. `echo` is shown before what the model adds."""

    def __init__(self, model: str, echo: str, include_usage: bool) -> None:
        self._head: Json = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._echo = echo
        self._include_usage = include_usage

    @property
    def stream_type(self) -> str:
        return EVENT_STREAM

    def full(self, texts: list[str], generation: Generation) -> bytes:
        choice = _choice(self._echo + "".join(texts), _finish_reason(generation))
        body = self._head | {"choices": [choice], "usage": usage(generation)}
        return encode(body | {"swarm": swarm_object(generation)})

    def first(self, generation: Generation | None) -> bytes:
        return self.text(self._echo) if self._echo else b""

    def text(self, text: str) -> bytes:
        return self._event({"choices": [_choice(text, None)]})

    def waiting(self) -> bytes:
        return WAITING

    def last(self, generation: Generation) -> bytes:
        choices = [_choice("", _finish_reason(generation))]
        end = self._event({"choices": choices, "swarm": swarm_object(generation)})
        if self._include_usage:
            end += self._event({"choices": [], "usage": usage(generation)})
        return end + DONE

    def error(self, error: SwarmLLMError) -> bytes:
        return b"data: " + encode({"error": error_object(error)}) + b"\n\n"

    def _event(self, fields: Json) -> bytes:
        usage_field: Json = {"usage": None} if self._include_usage else {}
        return b"data: " + encode(self._head | usage_field | fields) + b"\n\n"


def _choice(text: str, finish_reason: str | None) -> Json:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _finish_reason(generation: Generation) -> str:
    return "length" if generation.finish_reason == "length" else "stop"
