"""POST /completion of llama.cpp's server: its fields, and what they ask of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from swarmllm.api.http.context import current_node, session_of
from swarmllm.api.llamacpp.reply import NativeReply, generation_settings
from swarmllm.api.openai.chat_request import json_schema, limit_of
from swarmllm.api.openai.inputs import Inputs, read_inputs
from swarmllm.api.openai.pictures import RequestPictures, seen_by
from swarmllm.api.openai.schema import (
    BiasPairs,
    Body,
    Json,
    JsonSchemaFormat,
    LogitBias,
    ModelName,
    Name,
    NamedSchema,
    SamplingFields,
    SessionName,
    Text,
    TopLogprobs,
    sampling_of,
)
from swarmllm.api.output.presets import preset_of, sampling_with
from swarmllm.api.output.response import GenerationRequest
from swarmllm.errors import InvalidRequest
from swarmllm.pipeline.origin.generation import Prompt

MEDIA_MARKER = "<__media__>"
"""Stands for a picture in a prompt of that server."""
PROMPTS_MAX = 32
"""Answers to one request."""


class PictureText(Body, frozen=True):
    """A prompt with a MEDIA_MARKER for each picture."""

    prompt_string: Text
    multimodal_data: Annotated[list[Annotated[str, Meta(max_length=64 * 2**20)]], Meta(max_length=4096)]
    """In base64, in their order."""


class NativeCompletion(SamplingFields, frozen=True, kw_only=True):
    """POST /completion. None everywhere means what absence means."""

    ignored = SamplingFields.ignored | {"user"}
    refused = (SamplingFields.refused - {"json_schema", "return_tokens"}) | {
        *("n_indent", "image_data", "post_sampling_probs", "n_keep", "n_cmpl"),
    }
    refused_unless: ClassVar[Mapping[str, tuple[float, ...]]] = {
        **SamplingFields.refused_unless,
        "n_indent": (0,),
        "n_keep": (-1, 0),
        "n_cmpl": (1,),
    }

    model: ModelName = ""
    """"": the only one that can answer."""
    prompt: Inputs
    """A text, token ids, texts among token ids, an object (a text, with pictures), or a list of these."""
    n_predict: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    """-1: until the context is full; 0: the prompt alone is read."""
    max_tokens: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    """The same."""
    n_probs: TopLogprobs | None = None
    """How many of the likeliest tokens come with each."""
    return_tokens: bool | None = None
    response_fields: Annotated[list[Name], Meta(max_length=64)] | None = None
    """What is told of a whole answer, by name or as `a/b`; nothing: all."""
    stream: bool | None = None
    json_schema: Json | None = None
    session_id: SessionName | None = None


async def read_completion(body: NativeCompletion) -> tuple[list[GenerationRequest], list[NativeReply]]:
    """What to ask the node, prompt by prompt, and who words the answers. Raises InvalidRequest, and what
    finding the model raises."""
    prompts = await _prompts(body)
    if body.n_predict is not None and body.max_tokens is not None and body.n_predict != body.max_tokens:
        raise InvalidRequest("n_predict and max_tokens disagree; send one.", field="n_predict")
    if body.json_schema and body.grammar:
        raise InvalidRequest("grammar and json_schema exclude each other; send one.", field="grammar")
    asked = body.max_tokens if body.n_predict is None else body.n_predict
    preset = await preset_of(body.model)
    wanted = NamedSchema(schema=body.json_schema) if body.json_schema else None
    schema_text = json_schema(JsonSchemaFormat(json_schema=wanted)) if wanted else ""
    body = sampling_with(preset, body)
    if body.logit_bias is not None:
        body = msgspec.structs.replace(body, logit_bias=await _biases(body.model, body.logit_bias))
    n_top = body.n_probs or 0
    sampling = sampling_of(body, logprobs=n_top > 0, top_logprobs=n_top, json_schema=schema_text)
    limit = limit_of(asked) if asked is not None else preset.max_tokens
    session = session_of(body.session_id)
    settings = generation_settings(
        sampling,
        limit=limit,
        n_probs=n_top,
        end_tokens=await current_node().texts.end_tokens(body.model) if sampling.ignore_eos else (),
        stream=bool(body.stream),
    )
    requests: list[GenerationRequest] = []
    replies: list[NativeReply] = []
    for index, (prompt, shown) in enumerate(prompts):
        if limit == 0:
            prompt = replace(prompt, top_logprobs=0, is_answered=False)
        requests.append(
            GenerationRequest(body.model, replace(prompt, session=session), sampling, limit or None)
        )
        replies.append(
            NativeReply(
                body.model,
                shown,
                index=index,
                limit=limit,
                settings=settings,
                returns_tokens=bool(body.return_tokens),
                fields=body.response_fields or [],
                is_one_of_several=len(prompts) > 1,
            )
        )
    return requests, replies


async def _prompts(body: NativeCompletion) -> list[tuple[Prompt, str]]:
    """Each with the text that it is. Raises InvalidRequest."""
    value = body.prompt
    if _has_pictures(value):
        return [await _with_pictures(body.model, value)]
    texts = current_node().texts
    prompts: list[tuple[Prompt, str]] = []
    for each in await read_inputs(body.model, value, "prompt"):
        if not each:
            raise InvalidRequest("prompt is empty.", field="prompt")
        if isinstance(each, str):
            prompts.append((Prompt(text=each, field="prompt"), each))
        else:
            shown = await texts.detokenize(body.model, each)
            prompts.append((Prompt(tokens=each, field="prompt"), shown))
    if len(prompts) > PROMPTS_MAX:
        raise InvalidRequest(f"{len(prompts)} prompts, at most {PROMPTS_MAX} at once.", field="prompt")
    return prompts


def _has_pictures(value: object) -> bool:
    return isinstance(value, dict) and "multimodal_data" in value


async def _with_pictures(model: str, value: object) -> tuple[Prompt, str]:
    try:
        picture_text = msgspec.convert(value, PictureText)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field="prompt") from None
    texts, images = picture_text.prompt_string.split(MEDIA_MARKER), picture_text.multimodal_data
    field = "prompt.multimodal_data"
    if len(images) != len(texts) - 1:
        raise InvalidRequest(
            f"there are {len(images)} pictures, and {len(texts) - 1} times {MEDIA_MARKER} in the prompt.",
            field=field,
        )
    asked = RequestPictures()
    markers = [asked.add_base64(image, f"{field}[{i}]") for i, image in enumerate(images)]
    text = "".join(text + marker for text, marker in zip(texts, [*markers, ""], strict=True))
    if not text:
        raise InvalidRequest("prompt is empty.", field="prompt")
    pictures = await seen_by(model, asked, "prompt")
    return Prompt(text=text, pictures=pictures, field="prompt"), picture_text.prompt_string


async def _biases(model: str, said: LogitBias | BiasPairs) -> BiasPairs:
    """With the tokens of texts in their place. Raises InvalidRequest."""
    pairs: list[tuple[Any, float | bool]] = [*(said.items() if isinstance(said, dict) else said)]
    biases: BiasPairs = []
    for key, bias in pairs:
        if isinstance(key, str) and not (key.isascii() and key.isdigit()):
            tokens = await current_node().texts.tokenize(model, key, add_special=False)
            biases += [(token, bias) for token in tokens]
        else:
            biases.append((int(key), bias))
    if len(biases) > 1024:
        raise InvalidRequest(f"{len(biases)} tokens, at most 1024.", field="logit_bias")
    return biases
