"""What a grammar made of a JSON schema lets a model write: always JSON that is valid under the schema.

The model is a random one over single bytes, so that every corner of a grammar is visited; the judge is the
`jsonschema` package.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm_workers.decode.grammar import Grammar
from swarmllm_workers.decode.json_schema import Unsupported, gbnf
from swarmllm_workers.decode.vocabulary import Vocabulary

from .factory import N_VOCAB

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"enum": [None, 'x"y', 1.5]}},
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "leaf": {"const": 1}},
    "required": ["left", "leaf"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "optional properties": OBJECT,
    "required properties": OBJECT | {"required": ["a", "c"], "additionalProperties": False},
    "last property only": OBJECT | {"required": ["c"]},
    "no properties": {"type": "object", "additionalProperties": False},
    "a map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "required without schema": {
        "type": "object",
        "required": ["x"],
        "additionalProperties": {"type": "null"},
    },
    "itself": TREE,
    "definitions": {
        "$defs": {"City": {"type": "string", "minLength": 2, "maxLength": 3}},
        "type": "array",
        "items": {"$ref": "#/$defs/City"},
        "maxItems": 3,
    },
    "old definitions": {"definitions": {"a/b": {"const": 5}}, "$ref": "#/definitions/a~1b"},
    "two to four": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "exactly one": {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1},
    "a tuple": {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False},
    "several types": {"type": ["string", "null"], "maxLength": 2},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 3, "maximum": 5}]},
    "all of": {
        "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"const": 2}}, "required": ["y"]}],
        "$defs": {"a": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}},
    },
    "shared beside any of": {
        "type": "object",
        "properties": {"k": {"const": 1}},
        "anyOf": [{"required": ["k"]}, {"properties": {"j": {"const": 2}}, "required": ["j"]}],
    },
    "multiples": {"type": "integer", "minimum": -20, "maximum": 20, "multipleOf": 7},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2,3}-\\d+(x|yz)?$"},
    "pattern with what JSON escapes": {"type": "string", "pattern": '^["\\\\\\n!-#]{3}$'},
    "pattern that excludes": {"type": "string", "pattern": "^[^a-y]{1,4}z$"},
    "pattern anywhere": {"type": "string", "pattern": "ab"},
    **{
        form: {"type": "string", "format": form}
        for form in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
    },
}


def write(vocabulary: Vocabulary, grammar: str, seed: int, n_max: int = 600) -> str:
    """What a model of random logits writes, which grows ever more eager to come to an end."""
    rng, tokens = np.random.default_rng(seed), list[int]()
    sampler = Grammar(vocabulary.handle, grammar)
    for index in range(n_max):
        sampler.follow(tokens)
        logits = rng.standard_normal(N_VOCAB).astype(np.float32) * 3
        for character in b'"}]':
            logits[character] += index / 8
        logits[[ord(" "), ord("\n"), ord("\t")]] -= 4
        logits[0x80:0x100] = -1e9  # single bytes beyond ASCII are no text
        token = int(sampler.mask(logits).argmax())
        if token in vocabulary.end_tokens:
            return b"".join(vocabulary.piece(token) for token in tokens).decode()
        tokens.append(token)
    raise AssertionError(f"no end after {bytes(tokens)!r}")


def check(value: object, schema: Any) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_is_valid(vocabulary: Vocabulary, name: str) -> None:
    schema = SCHEMAS[name]
    written = set()
    for seed in range(8):
        text = write(vocabulary, gbnf(schema), seed)
        check(json.loads(text), schema)
        written.add(text)
    assert len(written) > 1 or name in ("no properties", "exactly one", "old definitions", "all of")


@pytest.mark.parametrize("kind", ["integer", "number"])
@settings(max_examples=60)
@given(
    st.integers(-3000, 3000),
    st.integers(0, 4000),
    st.sampled_from([1, 10, 100]),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 2**32),
)
def test_numbers_keep_within_their_bounds(
    vocabulary: Vocabulary,
    kind: str,
    low: int,
    width: int,
    unit: int,
    are_out: tuple[bool, bool],
    seed: int,
) -> None:
    schema: dict[str, Any] = {"type": kind}
    schema["exclusiveMinimum" if are_out[0] else "minimum"] = low / unit
    schema["exclusiveMaximum" if are_out[1] else "maximum"] = (low + width) / unit
    try:
        grammar = gbnf(schema)
    except Unsupported:
        is_empty = width == 0 and any(are_out)
        assert is_empty or kind == "integer"
        return
    text = write(vocabulary, grammar, seed)
    value = Decimal(text.strip())
    least, most = Decimal(low) / unit, Decimal(low + width) / unit
    assert value > least if are_out[0] else value >= least, text
    assert value < most if are_out[1] else value <= most, text


@given(st.integers(0, 5000), st.integers(0, 5000))
@settings(max_examples=40)
def test_every_integer_within_the_bounds_can_be_written(vocabulary: Vocabulary, low: int, width: int) -> None:
    grammar = Grammar(vocabulary.handle, gbnf({"type": "integer", "minimum": low, "maximum": low + width}))
    for number in {low, low + width // 2, low + width, low - 1, low + width + 1}:
        tokens = list(str(number).encode())
        allowed = True
        for at, token in enumerate(tokens):
            grammar.follow(tokens[:at])
            if not (allowed := grammar.allows(token)):
                break
        if allowed:
            grammar.follow(tokens)
            allowed = any(grammar.allows(token) for token in vocabulary.end_tokens)
        assert allowed == (low <= number <= low + width), number


def test_multiples_of_a_power_of_ten_have_that_many_places(vocabulary: Vocabulary) -> None:
    for seed in range(10):
        text = write(vocabulary, gbnf({"type": "number", "multipleOf": 0.01}), seed)
        assert Decimal(text.strip()) % Decimal("0.01") == 0


def test_one_side_may_be_open(vocabulary: Vocabulary) -> None:
    for seed in range(6):
        assert json.loads(write(vocabulary, gbnf({"type": "integer", "minimum": 97}), seed)) >= 97
        assert json.loads(write(vocabulary, gbnf({"type": "number", "exclusiveMaximum": -2.5}), seed)) < -2.5
        assert json.loads(write(vocabulary, gbnf({"type": "number", "exclusiveMinimum": 0}), seed)) > 0


def test_json_may_stand_between_marks_several_times(vocabulary: Vocabulary) -> None:
    grammar = gbnf({"enum": ["a", "b"]}, before="<[", after="]>", n_max=3)
    texts = {write(vocabulary, grammar, seed) for seed in range(20)}
    assert {text.count("<[") for text in texts} <= {1, 2, 3}
    assert max(text.count("<[") for text in texts) > 1
    for text in texts:
        for part in text.removesuffix("]>").split("]>"):
            assert json.loads(part.strip().removeprefix("<[")) in ("a", "b")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a/not"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"anyOf": [{"if": {}}]}, "#/anyOf/0/if"),
        ({"type": "string", "pattern": "(?=a)b"}, "#/pattern"),
        ({"type": "string", "pattern": "(a"}, "#/pattern"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "pattern, format and length"),
        ({"type": "string", "maxLength": 100_000}, "#/maxLength"),
        ({"type": "integer", "multipleOf": 3}, "#/multipleOf"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "bounds"),
        ({"type": "number", "minimum": "3"}, "#/minimum"),
        ({"type": "dance"}, "#/type"),
        ({"$ref": "https://example.org"}, "leads out"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"$ref": "#"}, "leads to itself"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "disagrees"),
        (False, "nothing could follow"),
        ([], "nothing could follow"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(Unsupported) as caught:
        gbnf(schema)
    assert words.replace("nothing could follow", "anything could follow") in str(caught.value)
