"""What a JSON schema lets a model write: always JSON that is valid under the schema.

The model is a random one over single bytes, so that every corner of a schema is visited; the judge is the
`jsonschema` package.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.grammars.gbnf_matcher import NotFollowed

from .schema_walk import Walks, allowed_of

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
CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
    "required": ["kind"],
}
DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "bark": {"type": "string"}},
    "required": ["kind"],
}
SCHEMAS: dict[str, Any] = {
    "optional properties": OBJECT,
    "required properties": OBJECT | {"required": ["a", "c"], "additionalProperties": False},
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
    "old tuple": {"type": "array", "items": [{"const": 1}, {"type": "boolean"}], "additionalItems": False},
    "two to four": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "a tuple": {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False},
    "several types": {"type": ["string", "null"], "maxLength": 2},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 3, "maximum": 5}]},
    "a property constrained in two places": {
        "type": "object",
        "properties": {"foo": {"maxLength": 3}, "bar": {"minimum": 2}},
        "anyOf": [
            {"properties": {"foo": {"type": "string"}, "bar": {"type": "integer", "maximum": 4}}},
            {"properties": {"foo": {"type": "string", "minLength": 2}}},
        ],
        "required": ["foo", "bar"],
    },
    "all of": {
        "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"const": 2}}, "required": ["y"]}],
        "$defs": {"a": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}},
    },
    "additional properties beside all of": {
        "allOf": [{"properties": {"x": {"type": "integer"}}}],
        "type": "object",
        "properties": {"y": {"type": "boolean"}},
        "additionalProperties": {"type": "null"},
        "required": ["y"],
    },
    "a reference in an enum": {"enum": [{"$ref": "#/a"}, {"$ref": "#/b"}]},
    "one of that exclude each other": {"oneOf": [CAT, DOG]},
    "one of with common values": {
        "oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 8}]
    },
    "if then else": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["n"], "properties": {"n": {"minimum": 7}}},
        "else": {"properties": {"n": False}},
    },
    "not": {"type": "string", "not": {"enum": ["no", "never"]}, "maxLength": 5, "pattern": "^[never]*$"},
    "dependent": {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "additionalProperties": False,
        "dependentRequired": {"a": ["b"]},
    },
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 3},
    "unevaluated": {
        "allOf": [{"properties": {"x": {"type": "integer"}}}],
        "type": "object",
        "unevaluatedProperties": False,
    },
    "at least one property": OBJECT | {"minProperties": 1, "additionalProperties": False},
    "at most one property": OBJECT | {"maxProperties": 1},
    "multiples": {"type": "integer", "minimum": -20, "maximum": 20, "multipleOf": 7},
    "multiples without bounds": {"type": "integer", "multipleOf": 3},
    "hundredths": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2,3}-\\d+(x|yz)?$"},
    "pattern with length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    "pattern with what JSON escapes": {"type": "string", "pattern": '^["\\\\\\n!-#]{3}$'},
    "pattern anywhere": {"type": "string", "pattern": "ab", "maxLength": 6},
    "a set of few values": {"type": "array", "items": {"enum": ["r", "g", "b"]}, "uniqueItems": True},
    "a set of few numbers": {"type": "array", "items": {"enum": [2, 1, "1"]}, "uniqueItems": True},
    "a set (pydantic)": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "names from an enum (pydantic)": {
        "$defs": {"Color": {"enum": ["red", "green"], "title": "Color", "type": "string"}},
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "propertyNames": {"$ref": "#/$defs/Color"},
    },
    "HttpUrl (pydantic)": {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
    "conint (pydantic)": {"type": "integer", "exclusiveMinimum": 10, "maximum": 1000, "multipleOf": 5},
    "a union with a discriminator (pydantic)": {
        "$defs": {"Cat": CAT, "Dog": DOG},
        "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    },
    **{
        form: {"type": "string", "format": form}
        for form in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
    },
}


@pytest.fixture(scope="module")
def walks(vocabulary: Vocabulary) -> Walks:
    return Walks(vocabulary)


def check(value: object, schema: Any) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator
    if isinstance(schema, dict) and isinstance(schema.get("items"), list):
        validator = jsonschema.Draft7Validator
    validator(schema, format_checker=checker).validate(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_is_valid(walks: Walks, name: str) -> None:
    schema = SCHEMAS[name]
    written = {text for seed in range(8) if (text := walks.write(schema, seed)) is not None}
    for text in written:
        check(json.loads(text), schema)
    assert len(written) > 1 or name in ("no properties", "old definitions", "email")


@pytest.mark.parametrize("kind", ["integer", "number"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(-3000, 3000),
    st.integers(0, 4000),
    st.sampled_from([1, 10, 100]),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 2**32),
)
def test_numbers_keep_within_their_bounds(
    walks: Walks, kind: str, low: int, width: int, unit: int, are_out: tuple[bool, bool], seed: int
) -> None:
    schema: dict[str, Any] = {"type": kind}
    schema["exclusiveMinimum" if are_out[0] else "minimum"] = low / unit
    schema["exclusiveMaximum" if are_out[1] else "maximum"] = (low + width) / unit
    try:
        text = walks.write(schema, seed)
    except NotFollowed:
        assert kind == "integer" or (width == 0 and any(are_out))
        return
    if text is None:
        return
    value, least, most = Decimal(text), Decimal(low) / unit, Decimal(low + width) / unit
    assert value > least if are_out[0] else value >= least, text
    assert value < most if are_out[1] else value <= most, text


@given(st.integers(0, 5000), st.integers(0, 5000))
@settings(max_examples=30)
def test_every_integer_within_the_bounds_can_be_written(walks: Walks, low: int, width: int) -> None:
    schema = {"type": "integer", "minimum": low, "maximum": low + width}
    for number in {low, low + width // 2, low + width, low - 1, low + width + 1}:
        assert walks.takes(schema, str(number)) == (low <= number <= low + width), number


names = st.sampled_from(["a", "b", "c"])
"""Of properties."""
leaves = st.one_of(
    st.builds(
        lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
        st.integers(-9, 9),
        st.integers(0, 9),
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 3)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.sampled_from([1, "x", None, True, "yy"]), min_size=1, unique_by=repr),
    ),
    st.just({"type": ["null", "boolean"]}),
    st.sampled_from(
        [{"minimum": 1}, {"maxLength": 1}, {"maxItems": 1}, {"format": "date"}, {"required": ["a"]}]
    ),
)


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.builds(
        lambda parts, required, closed: {
            "type": "object",
            "properties": parts,
            "required": [name for name in required if name in parts],
            **({"additionalProperties": False} if closed else {}),
        },
        st.dictionaries(names, inner, min_size=1, max_size=2),
        st.lists(names, unique=True, max_size=2),
        st.booleans(),
    )
    lists = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        properties,
        st.builds(lambda one, other: {**one, "anyOf": other}, properties, lists),
        st.builds(
            lambda one, other: {**one, "allOf": other},
            properties,
            st.lists(properties, min_size=1, max_size=2),
        ),
        st.builds(lambda parts: {"oneOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: {"anyOf": parts}, lists),
        st.builds(lambda one, other: {**one, "not": other}, properties, inner),
        st.builds(
            lambda a, b, c, d: {**a, "if": b, "then": c, "else": d}, properties, properties, inner, inner
        ),
        st.builds(
            lambda a, n: {"type": "array", "items": a, "maxItems": n, "uniqueItems": True},
            inner,
            st.integers(0, 3),
        ),
        st.builds(lambda a, b: {"type": "array", "items": a, "contains": b, "maxItems": 2}, inner, inner),
    )


@given(_combined(st.recursive(leaves, _combined, max_leaves=5)), st.integers(0, 2**32))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_of_any_schema_what_is_accepted_is_written_validly(walks: Walks, schema: Any, seed: int) -> None:
    try:
        text = walks.write(schema, seed, n_tokens_max=200)
    except NotFollowed:
        return
    if text is not None:
        check(json.loads(text), schema)


def test_parts_of_one_of_exclude_each_other_as_they_are_written(walks: Walks) -> None:
    """What people usually mean by a part (a type, no other properties) does not count here."""
    parts = [{"properties": {"x": {"minimum": 5}}}, {"properties": {"x": {"pattern": "a"}}}]
    needs_x = [part | {"required": ["x"]} for part in parts]
    schemas = [
        {"type": "object", "oneOf": needs_x},
        {"oneOf": [{"type": "object", **part} for part in needs_x]},
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {}}, "required": ["a"]},
                {"properties": {"b": {}}},
            ]
        },
        {"oneOf": [{"type": "string", "format": "hostname"}, {"type": "string", "format": "uuid"}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"minProperties": 1}], "$defs": {"a": {"properties": {"x": {}}}}},
    ]
    for schema in schemas:
        for seed in range(6):
            try:
                text = walks.write(schema, seed)
            except NotFollowed:
                break
            if text is not None:
                check(json.loads(text), schema)


def test_where_properties_are_listed_there_are_no_others(walks: Walks) -> None:
    assert not walks.takes(OBJECT, '{"a":1,"z":2}')
    assert walks.takes(OBJECT | {"additionalProperties": True}, '{"a":1,"z":2}')
    union = {"$defs": {"Cat": CAT, "Dog": DOG}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
    assert walks.takes(union, '{"kind":"dog","bark":"x"}')
    assert not walks.takes(union, '{"kind":"dog","lives":9}')


def test_blanks_between_parts_are_few(walks: Walks) -> None:
    schema = OBJECT | {"required": ["a", "b"]}
    assert walks.takes(schema, '{"a":1,"b":"x"}')
    assert walks.takes(schema, '{"a": 1, "b": "x"}')
    assert walks.takes(schema, '{\n  "a": 1,\n  "b": "x"\n}')
    assert not walks.takes(schema, '{"a":  1,"b":"x"}')
    assert not walks.takes(schema, '{\n\n"a":1,"b":"x"}')


def test_what_json_does_not_allow_in_strings_is_not_written(walks: Walks) -> None:
    for text in ('"\x01"', '"<|im_end|>"', '"\n"'):
        tokens_as_bytes = walks.takes({"type": "string"}, text)
        assert tokens_as_bytes == (text == '"<|im_end|>"'), "as text it may be written, as a token it may not"
    matcher = walks.matcher({"type": "string"})
    matcher.follow(0, [ord('"')])
    allowed = allowed_of(matcher)
    assert not any(0xF5 <= token <= 0xFF for token in allowed)
    assert max(allowed) < 256, "special tokens are no text"


def test_json_may_stand_between_marks_several_times(walks: Walks) -> None:
    schema, around = {"enum": ["a", "b"]}, {"before": "<[", "after": "]>", "n_max": 3}
    texts = {walks.write(schema, seed, **around) for seed in range(30)}
    assert {text.count("<[") for text in texts} == {1, 2, 3}
    for text in texts:
        for part in text.removesuffix("]>").split("]>"):
            assert json.loads(part.strip().removeprefix("<[")) in ("a", "b")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"not": {"pattern": "x"}}}}, "#/properties/a/not"),
        ({"anyOf": [{"type": "null"}, {"$recursiveRef": "#"}]}, "#/anyOf/1/$recursiveRef"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "(a"}, "regex parse error"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "number", "minimum": "3"}, "minimum"),
        ({"type": "object", "properties": []}, "#/properties"),
        ({"type": "array", "minItems": -1}, "#/minItems"),
        ({"type": "dance"}, "dance"),
        ({"$ref": "https://example.org"}, "leads out"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"$ref": "#"}, ""),
        (
            {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
            "oneOf: its parts",
        ),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ""),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2}, "#/uniqueItems"),
        ({"properties": {f"p{i}": {} for i in range(401)}}, "#/properties has more than 400"),
        ({"properties": {"a": {"$id": "http://x/y", "items": {"$ref": "#/z"}}}}, "#/properties/a/$id"),
        (False, "nothing could follow"),
        ([], "is no schema"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(walks: Walks, schema: Any, words: str) -> None:
    with pytest.raises(NotFollowed) as caught:
        walks.matcher(schema)
    assert words in str(caught.value)
