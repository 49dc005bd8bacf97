"""The negation of a JSON schema, as far as schemas without `not` can say it. Pure.

`negation` says less where it cannot say all: every value that its result takes is refused by the schema, but
not the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

Schema = dict[str, Any]
Resolve = Callable[[str], Any]

DEPTH_MAX: Final = 16
EXCLUDED_MAX: Final = 512
"""Characters of texts that one pattern excludes."""
_TYPES: Final = ("null", "boolean", "object", "array", "number", "string")
_OPPOSITE: Final = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""Keyword -> its type, the keyword that says the contrary, and what is added to the value."""


class NoNegation(Exception):
    """Nothing is known that the schema refuses."""


def negation(schema: Any, resolve: Resolve, depth: int = 0) -> Any:
    """False where every value is allowed. `resolve`: the schema that a `$ref` leads to. Raises NoNegation,
    and whatever `resolve` does."""
    if depth > DEPTH_MAX:
        raise NoNegation
    if schema is False:
        return {}
    if schema is True or schema == {}:
        return False
    if not isinstance(schema, dict):
        raise NoNegation
    alternatives: list[Any] = []
    for keyword, value in schema.items():
        # Not (A and B) is not A or not B; an alternative that cannot be said is left out.
        try:
            alternatives += _against(keyword, value, schema, resolve, depth + 1)
        except NoNegation:
            continue
    alternatives = [each for each in alternatives if each is not False]
    if {} in alternatives:
        return {}
    if not alternatives:
        raise NoNegation
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _against(keyword: str, value: Any, schema: Schema, resolve: Resolve, depth: int) -> list[Any]:
    """Schemas whose values break this one keyword."""
    if keyword in _OPPOSITE and isinstance(value, int | float) and not isinstance(value, bool):
        kind, opposite, more = _OPPOSITE[keyword]
        if more and value + more < 0:
            return []
        return [{"type": kind, opposite: (int(value) if more else value) + more}]
    if keyword == "type":
        names = set(value if isinstance(value, list) else [value])
        others = [
            name for name in _TYPES if name not in (names | ({"number"} if "integer" in names else set()))
        ]
        return [{"type": others}] if others else []
    if keyword in ("const", "enum"):
        return _other_values([value] if keyword == "const" else value)
    if keyword == "required":
        return [{"type": "object", "properties": {name: False}} for name in value]
    if keyword == "properties":
        return list(_each(value, lambda name, part: _with_property(name, part, resolve, depth)))
    if keyword == "items" and "prefixItems" not in schema:
        against = negation(value, resolve, depth)
        return [] if against is False else [{"type": "array", "prefixItems": [against], "minItems": 1}]
    if keyword in ("anyOf", "oneOf"):
        parts = [negation(part, resolve, depth) for part in value]
        return [] if False in parts else [{"allOf": parts}]
    if keyword == "allOf":
        return list(_each(dict(enumerate(value)), lambda _, part: negation(part, resolve, depth)))
    if keyword == "not":
        return [value]
    if keyword == "$ref" and isinstance(value, str):
        return [negation(resolve(value), resolve, depth)]
    return []


def _each(parts: dict[Any, Any], negated: Callable[[Any, Any], Any]) -> Sequence[Any]:
    found = []
    for key, part in parts.items():
        try:
            found.append(negated(key, part))
        except NoNegation:
            continue
    return found


def _with_property(name: str, part: Any, resolve: Resolve, depth: int) -> Schema | bool:
    against = negation(part, resolve, depth)
    return against is not False and {"type": "object", "properties": {name: against}, "required": [name]}


def _other_values(values: list[Any]) -> list[Schema]:
    kinds = {kind_of(value) for value in values}
    others = [name for name in _TYPES if name not in kinds]
    found: list[Schema] = [{"type": others}] if others else []
    texts = [value for value in values if isinstance(value, str)]
    if texts and sum(map(len, texts)) <= EXCLUDED_MAX:
        found.append({"type": "string", "pattern": f"^{_none_of(sorted(set(texts)))}$"})
    numbers = [value for value in values if kind_of(value) == "number"]
    if numbers:
        found += [
            {"type": "number", "exclusiveMinimum": max(numbers)},
            {"type": "number", "exclusiveMaximum": min(numbers)},
        ]
    flags = {value for value in values if isinstance(value, bool)}
    if len(flags) == 1:
        found.append({"const": not flags.pop()})
    return found


def _none_of(texts: list[str]) -> str:
    """A pattern of the texts, on one line, that are none of these."""
    first = sorted({text[0] for text in texts if text})
    options = [] if "" in texts else [""]
    options.append(f"[^{''.join(map(_in_class, first))}].*" if first else ".+")
    for character in first:
        rest = _none_of([text[1:] for text in texts if text.startswith(character)])
        options.append(re.escape(character) + rest)
    return f"({'|'.join(options)})"


def _in_class(character: str) -> str:
    return f"\\{character}" if character in r"\]^-[" else character


def exclude(one: Any, other: Any, resolve: Resolve) -> bool:
    """Whether no value is valid under both schemas, as is seen by their types, their values, or the values of
    a property that both require."""
    parts = [_followed(part, resolve) for part in (one, other)]
    kinds = [_kinds(part) for part in parts]
    if not kinds[0] & kinds[1] and all(kinds):
        return True
    values = [_values(part) for part in parts]
    if values[0] is not None and values[1] is not None and not values[0] & values[1]:
        return True
    if kinds != [{"object"}, {"object"}]:
        return False
    for name in set(parts[0].get("required", ())) & set(parts[1].get("required", ())):
        of_name = [_values(_followed(part.get("properties", {}).get(name, True), resolve)) for part in parts]
        if of_name[0] is not None and of_name[1] is not None and not of_name[0] & of_name[1]:
            return True
    return False


def _followed(schema: Any, resolve: Resolve) -> Schema:
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, dict):
            return {}
        if "type" in schema or not isinstance(schema.get("$ref"), str):
            return schema
        schema = resolve(schema["$ref"])
    return {}


def _kinds(schema: Schema) -> set[str]:
    """Types that its values can have, integers being numbers; empty where it does not say."""
    named = schema.get("type", ())
    names = [named] if isinstance(named, str) else named
    return {"number" if name == "integer" else name for name in names} & set(_TYPES)


def _values(schema: Schema) -> frozenset[str] | None:
    """Of the texts that it allows where it lists nothing but texts; None where it does not."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or not all(isinstance(value, str) for value in listed):
        return None
    return frozenset(listed)


def kind_of(value: object) -> str:
    """The JSON type, where integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
