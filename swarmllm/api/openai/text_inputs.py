"""Fields that take a text, token ids, or several of either: `input` of embeddings, `prompt` of
completions."""

from __future__ import annotations

from typing import Any

from swarmllm.errors import InvalidRequest

TEXTS_MAX = 2048
"""OpenAI's."""
TOKEN_MAX = 2**31


def texts_of(value: str | list[Any], field: str) -> list[str | list[int]]:
    """What a field holds that may be a text, token ids, or a list of texts or of lists of token ids.

    Raises InvalidRequest."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if len(value) > TEXTS_MAX:
        raise InvalidRequest(f"{len(value)} texts, at most {TEXTS_MAX} at once.", field=field)
    for i, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and _is_tokens(item)):
            raise InvalidRequest("can be a text or a list of token ids.", field=f"{field}[{i}]")
    return value


def _is_tokens(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int and 0 <= item < TOKEN_MAX for item in value)
