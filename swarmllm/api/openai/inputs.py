"""Reads fields that take a text, token ids, both in one list, an object, or a list of such.

OpenAI's have a text, token ids, texts, or lists of token ids; the rest is llama.cpp's.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from swarmllm.api.http.context import current_node
from swarmllm.api.openai.schema import Body, Text, TextPart
from swarmllm.errors import InvalidRequest

TEXTS_MAX = 2048
"""OpenAI's."""
TOKEN_MAX = 2**31
Inputs = Text | Annotated[list[Any], Meta(min_length=1, max_length=2**20)] | dict[str, object]
"""A text, token ids, texts among token ids, an object, or a list of these."""


class PromptText(Body, frozen=True):
    """llama.cpp's object for a text."""

    prompt_string: Text


class ContentParts(Body, frozen=True):
    """The same in parts, which are one text."""

    content: Annotated[list[TextPart], Meta(min_length=1, max_length=4096)]


async def read_inputs(
    model: str, value: str | list[Any] | dict[str, object], field: str
) -> list[str | list[int]]:
    """Texts, and token ids where the client sent some. Raises InvalidRequest, and what finding the model
    raises."""
    if isinstance(value, list) and not _is_sequence(value):
        if len(value) > TEXTS_MAX:
            raise InvalidRequest(f"{len(value)} texts, at most {TEXTS_MAX} at once.", field=field)
        return [await _read(model, item, f"{field}[{i}]") for i, item in enumerate(value)]
    return [await _read(model, value, field)]


def _is_token(item: object) -> bool:
    return type(item) is int and 0 <= item < TOKEN_MAX


def _is_sequence(value: list[Any]) -> bool:
    """One input: a list that has token ids in it."""
    return any(type(item) is int for item in value)


async def _read(model: str, value: object, field: str) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _text_in(value, field)
    if isinstance(value, list) and value and all(map(_is_token, value)):
        return value
    if isinstance(value, list) and _is_sequence(value):
        return await _mixed(model, value, field)
    raise InvalidRequest("can be a text or a list of token ids.", field=field)


async def _mixed(model: str, sequence: list[object], field: str) -> list[int]:
    """A text at the beginning begins as every text does; the others stand where they stand."""
    tokens: list[int] = []
    for i, item in enumerate(sequence):
        if isinstance(item, str):
            tokens += await current_node().texts.tokenize(model, item, add_special=i == 0)
        elif isinstance(item, int) and _is_token(item):
            tokens.append(item)
        else:
            raise InvalidRequest("can be a token id or a text.", field=f"{field}[{i}]")
    return tokens


def _text_in(value: dict[str, object], field: str) -> str:
    try:
        if "content" in value:
            return "".join(part.text for part in msgspec.convert(value, ContentParts).content)
        return msgspec.convert(value, PromptText).prompt_string
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"only text is understood here: {error}", field=field) from None
