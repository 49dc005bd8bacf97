"""Grammars and schemas made to hang a model's worker, sent by a client: each ends its own request."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai_asking import ask, text_of

AMBIGUOUS = "root ::= a a\n" + "".join(
    f'{name} ::= {following} {following} | "x"\n' for name, following in zip("abcdef", "bcdefg", strict=True)
)
AMBIGUOUS += 'g ::= "x"?'


def format_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def grammar(text: str) -> dict[str, Any]:
    return {"extra_body": {"grammar": text}}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (format_of({"type": "string", "pattern": "^" + ".*" * 100 + "$"}), "response_format"),
        (format_of({"type": "integer", "multipleOf": 999983}), "response_format"),
        (format_of({"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}), "response_format"),
        (grammar(AMBIGUOUS), "grammar"),
        (grammar("root ::= [z-a]"), "grammar"),
        (grammar("root ::= nothing"), "grammar"),
    ],
    ids=["stars", "multiple", "look-ahead", "ambiguous", "reversed", "unwritable"],
)
def test_a_client_gets_a_400_and_the_next_one_an_answer(
    ai: openai.OpenAI, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(ai, max_tokens=40, **options)
    assert caught.value.param == field
    assert text_of(ask(ai, max_tokens=8))


def test_many_stars_are_fine_where_they_are_few_enough(ai: openai.OpenAI) -> None:
    schema = {"type": "string", "pattern": "^" + ".*" * 32 + "$", "maxLength": 20}
    assert text_of(ask(ai, max_tokens=60, **format_of(schema))).startswith('"')
