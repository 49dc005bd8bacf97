"""POST /v1/completions: text in, text on from there. No chat template, no tools."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from msgspec import Meta
from quart import Blueprint, Response

from swarmllm.api.http.context import current_node, session_of
from swarmllm.api.http.errors import error_object
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.openai.chat_request import limit_of, refuse_unless_neutral
from swarmllm.api.openai.inputs import Inputs, read_inputs
from swarmllm.api.openai.schema import (
    Choices,
    Json,
    MaxTokensOrAll,
    ModelName,
    SamplingFields,
    SessionName,
    StreamOptions,
    TopLogprobs,
    sampling_of,
)
from swarmllm.api.output.buffered_generation import TextDelta
from swarmllm.api.output.choices import answer_choices, usage
from swarmllm.api.output.presets import preset_of, sampling_with
from swarmllm.api.output.response import DONE, EVENT_STREAM, WAITING, GenerationRequest
from swarmllm.api.output.swarm_report import FINGERPRINT, llamacpp_timings, swarm_object
from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.pipeline.origin.generation import Generation, Prompt
from swarmllm_proto.ipc import TokenLogprob

MaxTokensOrNone = Annotated[int, Meta(ge=0, le=2**20)]
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
}
PROMPTS_MAX = 32
"""Answers to one request: prompts times `n`."""


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions. None everywhere means what absence means."""

    ignored = SamplingFields.ignored | {"user"}

    model: ModelName = ""
    """"": the only one that can answer."""
    prompt: Inputs
    """A text, token ids, or a list of texts or of lists of token ids."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokensOrNone | None = None
    """0: `echo` is all that is asked for."""
    n_predict: MaxTokensOrAll | None = None
    """llama.cpp's word for it; -1: until the context is full."""
    echo: bool | None = None
    n: Choices | None = None
    logprobs: TopLogprobs | None = None
    """How many of the likeliest tokens come with each; 0: the token's own value alone."""
    prompt_cache_key: SessionName | None = None
    session_id: SessionName | None = None
    # accepted and without effect on the answer
    user: str | None = None
    # accepted at their neutral value only
    best_of: int | None = None
    suffix: str | None = None


completions = Blueprint("completions", __name__, url_prefix="/v1")


@completions.post("/completions")
async def complete() -> Response:
    body = await read_request(CompletionRequest)
    refuse_unless_neutral(body, NEUTRAL)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", field="stream_options")
    limit, limit_field = body.max_tokens, "max_tokens"
    if limit is None and body.n_predict is not None:
        limit, limit_field = body.n_predict, "n_predict"
    if body.n_predict not in (None, limit):
        raise InvalidRequest("n_predict and max_tokens disagree; send one.", field="n_predict")
    if limit == 0 and not body.echo:
        raise InvalidRequest("0 tokens answer nothing; only with echo that is something.", field=limit_field)
    prompts, n = await prompts_of(body.model, body.prompt), body.n or 1
    if len(prompts) * n > PROMPTS_MAX:
        raise InvalidRequest(
            f"asks for {len(prompts) * n} answers, at most {PROMPTS_MAX} at once.", field="prompt"
        )
    preset = await preset_of(body.model)
    body = sampling_with(preset, body)
    sampling = sampling_of(body, logprobs=body.logprobs is not None, top_logprobs=body.logprobs or 0)
    if body.echo and (body.logprobs is not None or limit == 0):
        # The prompt's own tokens are all that can be told without an answer.
        n_top, is_answered = body.logprobs or 0, limit != 0
        prompts = [replace(prompt, top_logprobs=n_top, is_answered=is_answered) for prompt in prompts]
    session = session_of(body.session_id, body.prompt_cache_key)
    max_tokens = limit_of(limit or preset.max_tokens or DEFAULT_MAX_TOKENS)
    requests = [
        GenerationRequest(body.model, replace(prompt, session=session), sampling, max_tokens)
        for prompt in prompts
    ]
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    replies: list[CompletionReply] = []
    for index, request in enumerate(request for request in requests for _ in range(n)):
        echo = await _text_of(body.model, request.prompt) if body.echo else ""
        head = replies[0].head if replies else None
        replies.append(CompletionReply(request, echo, include_usage, index=index, head=head))
    return await answer_choices(requests, replies, stream=bool(body.stream))


async def prompts_of(model: str, value: Inputs) -> list[Prompt]:
    """Raises InvalidRequest."""
    prompts = []
    for text in await read_inputs(model, value, "prompt"):
        if not text:
            raise InvalidRequest("prompt is empty.", field="prompt")
        prompts.append(
            Prompt(text=text, field="prompt")
            if isinstance(text, str)
            else Prompt(tokens=text, field="prompt")
        )
    return prompts


async def _text_of(model: str, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return await current_node().texts.detokenize(model, prompt.tokens or [])


class CompletionReply:
    """One choice of a text completion on its way out. `echo` is shown before what the model adds."""

    def __init__(
        self,
        request: GenerationRequest,
        echo: str,
        include_usage: bool,
        *,
        index: int = 0,
        head: Json | None = None,
    ) -> None:
        """`head`: the head of the first choice's reply."""
        self.head: Json = head or {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": FINGERPRINT,
        }
        self._index = index
        self._echo = echo
        self._is_scored = request.prompt.top_logprobs is not None
        """The prompt comes with its scores, not before them."""
        self._has_logprobs = request.sampling.logprobs
        self._include_usage = include_usage
        self._n_characters = len(echo)
        """Of the choice's text so far, token by token."""

    @property
    def stream_type(self) -> str:
        return EVENT_STREAM

    def full(self, text_delta: TextDelta, generation: Generation) -> bytes:
        return self.body([self.choice(text_delta, generation)], usage(generation), generation)

    def choice(self, text_delta: TextDelta, generation: Generation) -> Json:
        echo = self._echo if text_delta.prompt is None else ""
        text_delta = replace(text_delta, text=echo + text_delta.text)
        return self._choice(text_delta, _finish_reason(generation))

    def body(self, choices: list[Json], usage: Json, generation: Generation) -> bytes:
        body = self.head | {"choices": choices, "usage": usage}
        return encode(body | {"timings": llamacpp_timings(generation), "swarm": swarm_object(generation)})

    def first(self, generation: Generation | None) -> bytes:
        return self.text(TextDelta(self._echo)) if self._echo and not self._is_scored else b""

    def text(self, text_delta: TextDelta) -> bytes:
        return self._event({"choices": [self._choice(text_delta, None)]})

    def waiting(self) -> bytes:
        return WAITING

    def last(self, generation: Generation) -> bytes:
        return self.finish(generation) + self.end(usage(generation))

    def finish(self, generation: Generation) -> bytes:
        choice = self._choice(TextDelta(""), _finish_reason(generation))
        told: Json = {"timings": llamacpp_timings(generation), "swarm": swarm_object(generation)}
        return self._event({"choices": [choice]} | told)

    def end(self, usage: Json) -> bytes:
        return (self._event({"choices": [], "usage": usage}) if self._include_usage else b"") + DONE

    def error(self, error: SwarmLLMError) -> bytes:
        return b"data: " + encode({"error": error_object(error)}) + b"\n\n"

    def _event(self, fields: Json) -> bytes:
        usage_field: Json = {"usage": None} if self._include_usage else {}
        return b"data: " + encode(self.head | usage_field | fields) + b"\n\n"

    def _choice(self, text_delta: TextDelta, finish_reason: str | None) -> Json:
        text = text_delta.text if text_delta.prompt is None else self._echo + text_delta.text
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(text_delta) if self._has_logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, text_delta: TextDelta) -> Json | None:
        """OpenAI's old form: one list per property."""
        tokens, prompt = text_delta.logprobs, text_delta.prompt
        if prompt is None and not tokens:
            return None
        offsets: list[int] = []
        for chosen, *_ in tokens:
            offsets.append(self._n_characters)
            self._n_characters += len(_shown(chosen))
        told: dict[str, list[object]] = {
            "tokens": [_shown(chosen) for chosen, *_ in tokens],
            "token_logprobs": [chosen.logprob for chosen, *_ in tokens],
            "top_logprobs": [{_shown(each): each.logprob for each in top} for _, *top in tokens],
            "text_offset": [*offsets],
        }
        if prompt is None:
            return {**told}
        others = prompt.others
        pieces = [prompt.first.encode(), *(chosen.piece for chosen, *_ in others)]
        before: dict[str, list[object]] = {
            "tokens": [prompt.first, *(_shown(chosen) for chosen, *_ in others)],
            "token_logprobs": [None, *(chosen.logprob for chosen, *_ in others)],
            "top_logprobs": [None, *({_shown(each): each.logprob for each in top} for _, *top in others)],
            "text_offset": [*offsets_in(self._echo, pieces)],
        }
        return {name: before[name] + told[name] for name in told}


def offsets_in(text: str, pieces: Sequence[bytes]) -> list[int]:
    """The character at which each piece begins. What a tokenizer puts between pieces of the text takes no
    room: a token that begins every text, a space before the first word."""
    data = text.encode()
    at, n_begun, found = 0, 0, []
    for piece in pieces:
        is_inside = at < len(data) and data[at] & 0xC0 == 0x80
        found.append(n_begun - is_inside)
        for form in (piece, piece.lstrip(b" ")):
            if form and data.startswith(form, at):
                at += len(form)
                n_begun += sum(byte & 0xC0 != 0x80 for byte in form)
                break
    return found


def _shown(token: TokenLogprob) -> str:
    """Its text, or, of a part of a character, its bytes as OpenAI spells them."""
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.piece)


def _finish_reason(generation: Generation) -> str:
    return "length" if generation.finish_reason == "length" else "stop"
