"""From a JSON schema to a grammar (GBNF) whose every text is valid under it.

llama-cpp-python brings a converter too; it passes over keywords that it does not know (bounds of numbers,
among others) and knows no schema that contains itself. Here a keyword is enforced, is one that describes
without restricting, or is refused by name. Where a grammar cannot say all that a schema allows, it says
less, never more: properties come in the order in which the schema lists them, and where it lists some there
are no others; `oneOf` is `anyOf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from swarmllm_workers.decode.json_numbers import Decimals, decimals, integers, multiples
from swarmllm_workers.decode.json_strings import CHARACTER, FORMATS, bounded_text, literal, of_pattern

Schema = dict[str, Any]

DEPTH_MAX: Final = 48
_DESCRIBING: Final = frozenset(
    (
        *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default"),
        *(
            "examples",
            "example",
            "deprecated",
            "readOnly",
            "writeOnly",
            "nullable",
            "discriminator",
            "strict",
        ),
        *("contentEncoding", "contentMediaType"),
    )
)
_BOUNDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_OF_TYPE: Final = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": _BOUNDS | {"multipleOf", "format"},
    "number": _BOUNDS | {"multipleOf", "format"},
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_RESTRICTING: Final = frozenset.union(*_OF_TYPE.values())
_SPACE: Final = '| " " | "\\n" [ \\t]{0,20}'
"""What llama.cpp allows between parts: a model may indent, not fill a page with blanks."""
_ANY: Final = {
    "value": "object | array | string | number | boolean | null",
    "object": '"{" space ( string ":" space value ("," space string ":" space value)* )? "}" space',
    "array": '"[" space ( value ("," space value)* )? "]" space',
    "string": f'"\\"" ({CHARACTER})* "\\"" space',
    "number": '"-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})? space',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15}) space',
    "boolean": '("true" | "false") space',
    "null": '"null" space',
}
REPEATS_MAX: Final = 1000
"""libllama writes a repetition out, and refuses longer ones."""


class Unsupported(Exception):
    """The schema asks for what no grammar here enforces, or is none."""


def gbnf(schema: object, *, before: str = "", after: str = "", n_max: int = 1) -> str:
    """The grammar: one to `n_max` times JSON under `schema` between two texts, on lines of their own or not.

    Raises Unsupported."""
    converter = _Converter(schema)
    value = converter.expression(schema, "#", 0)
    more = f' ("\\n"? around){{0,{n_max - 1}}}' if n_max > 1 else ""
    rules = {"root": f"around{more}"}
    rules["around"] = " ".join(
        part for part in (before and literal(before), value, after and literal(after)) if part
    )
    rules |= converter.rules
    return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


class _Converter:
    def __init__(self, root: object) -> None:
        self._root = root
        self.rules: dict[str, str] = {"space": _SPACE}
        self._of_reference: dict[str, str] = {}
        self._by_type: dict[str, Callable[[Schema, str, int], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda schema, path, depth: self._any("boolean"),
            "null": lambda schema, path, depth: self._any("null"),
        }

    def expression(self, schema: object, path: str, depth: int) -> str:
        """What stands for the schema in a rule: the name of a rule."""
        if depth > DEPTH_MAX:
            raise Unsupported(f"{path} is nested more than {DEPTH_MAX} deep")
        if schema is True or schema == {}:
            return self._any("value")
        if not isinstance(schema, dict):
            raise Unsupported(f"{path} is not a schema that anything could follow")
        if "$ref" in schema:
            self._allow(schema, path, {"$ref"})
            return self._reference(schema["$ref"], path, depth)
        if "enum" in schema or "const" in schema:
            self._allow(schema, path, {"enum", "const", "type", *_RESTRICTING})
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(values, list) or not values:
                raise Unsupported(f"{path}/enum is not a list of values")
            return self._rule(" | ".join(f"{literal(_json(value))} space" for value in values))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._either(schema, keyword, path, depth)
        if "allOf" in schema:
            return self.expression(self._merged(schema, path), path, depth + 1)
        return self._typed(schema, path, depth)

    def _typed(self, schema: Schema, path: str, depth: int) -> str:
        kinds = schema.get("type") or _implied_type(schema)
        if kinds is None:
            self._allow(schema, path, {"type"})
            return self._any("value")
        names = kinds if isinstance(kinds, list) else [kinds]
        unknown = [name for name in names if name not in self._by_type]
        if unknown or not names:
            raise Unsupported(f"{path}/type: {_json(unknown or names)[:80]}")
        self._allow(schema, path, {"type", *frozenset.union(*(_OF_TYPE[name] for name in names))})
        return self._rule(" | ".join(self._by_type[name](schema, path, depth + 1) for name in names))

    def _either(self, schema: Schema, keyword: str, path: str, depth: int) -> str:
        rest = {key: value for key, value in schema.items() if key != keyword and key not in _DESCRIBING}
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise Unsupported(f"{path}/{keyword} is not a list of schemas")
        if rest:
            options = [{"allOf": [rest, option]} for option in options]
        places = [f"{path}/{keyword}/{i}" for i in range(len(options))]
        return self._rule(
            " | ".join(
                self.expression(option, place, depth + 1)
                for option, place in zip(options, places, strict=True)
            )
        )

    def _merged(self, schema: Schema, path: str) -> Schema:
        """The one schema that the parts of an allOf come to."""
        merged: Schema = {key: value for key, value in schema.items() if key != "allOf"}
        for i, part in enumerate(schema["allOf"]):
            place = f"{path}/allOf/{i}"
            if isinstance(part, dict) and isinstance(part.get("$ref"), str):
                part = {**self._target(part["$ref"], place), **{k: v for k, v in part.items() if k != "$ref"}}
            if isinstance(part, dict) and "allOf" in part:
                part = self._merged(part, place)
            if not isinstance(part, dict):
                raise Unsupported(f"{place} cannot be merged")
            for key, value in part.items():
                if key == "properties":
                    merged[key] = {**merged.get(key, {}), **value}
                elif key == "required":
                    merged[key] = [*merged.get(key, []), *value]
                elif key in merged and merged[key] != value and key not in _DESCRIBING:
                    raise Unsupported(f"{place}/{key} disagrees with what it is merged with")
                else:
                    merged[key] = value
        return merged

    def _reference(self, reference: object, path: str, depth: int) -> str:
        if not isinstance(reference, str):
            raise Unsupported(f"{path}/$ref is not a text")
        name = self._of_reference.get(reference)
        if name is None:
            # Known before it is made: the target may contain itself.
            name = self._of_reference[reference] = f"ref{len(self._of_reference)}"
            self.rules[name] = ""
            self.rules[name] = self.expression(self._target(reference, path), reference, depth + 1)
            if self.rules[name] == name:
                raise Unsupported(f"{path}/$ref leads to itself")
        return name

    def _target(self, reference: str, path: str) -> Any:
        if not reference.startswith("#"):
            raise Unsupported(f"{path}/$ref {reference[:80]!r} leads out of the schema")
        target: Any = self._root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (KeyError, TypeError, ValueError, IndexError):
                raise Unsupported(f"{path}/$ref {reference[:80]!r} leads nowhere") from None
        return target

    def _object(self, schema: Schema, path: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise Unsupported(f"{path}/properties or {path}/required is not what it should be")
        extra = schema.get("additionalProperties", True)
        missing = [name for name in required if name not in properties]
        if missing:
            # It may be anything; without a schema of its own it is still due.
            if extra is False:
                raise Unsupported(f"{path}/required: {_json(missing[0])[:80]} may not be there")
            properties = {**properties, **dict.fromkeys(missing, extra)}
        if not properties:
            return self._open_object(extra, path, depth)
        first, following = '""', '""'
        for name, value in reversed(properties.items()):
            of_name = self.expression(value, f"{path}/properties/{name}", depth)
            member = f'{literal(_json(name))} ":" space {of_name}'
            is_required = name in required
            begun = f"{member} {following}" if is_required else f"{member} {following} | {first}"
            later = f'"," space {member}'
            following = self._rule(f"{later if is_required else f'({later})?'} {following}")
            first = self._rule(begun)
        return self._rule(f'"{{" space {first} "}}" space')

    def _open_object(self, extra: object, path: str, depth: int) -> str:
        if extra is False:
            return self._rule('"{" space "}" space')
        if extra is True or extra == {}:
            return self._any("object")
        value = self.expression(extra, f"{path}/additionalProperties", depth)
        member = f'{self._any("string")} ":" space {value}'
        return self._rule(f'"{{" space ({member} ("," space {member})*)? "}}" space')

    def _array(self, schema: Schema, path: str, depth: int) -> str:
        low, high = self._bounds(schema, "minItems", "maxItems", path)
        listed = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        heads = [self.expression(item, f"{path}/prefixItems/{i}", depth) for i, item in enumerate(listed)]
        if heads:
            if low > len(heads) or (high is not None and high < len(heads)):
                raise Unsupported(f"{path}: minItems and maxItems beside prefixItems")
            # All of them and no more: that is allowed whatever `items` says.
            return self._rule('"[" space ' + ' "," space '.join(heads) + ' "]" space')
        if rest is False or high == 0:
            return self._rule('"[" space "]" space')
        item = self.expression(rest, f"{path}/items", depth)
        more = f'("," space {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        inside = f"{item} {more}" if low else f"({item} {more})?"
        return self._rule(f'"[" space {inside} "]" space')

    def _string(self, schema: Schema, path: str, depth: int) -> str:
        pattern, form = schema.get("pattern"), FORMATS.get(str(schema.get("format")))
        has_length = "minLength" in schema or "maxLength" in schema
        if (pattern is not None) + (form is not None) + has_length > 1:
            raise Unsupported(f"{path}: pattern, format and length together")
        try:
            if pattern is not None or form is not None:
                text = of_pattern(str(form if pattern is None else pattern))
            elif has_length:
                text = bounded_text(*self._bounds(schema, "minLength", "maxLength", path))
            else:
                return self._any("string")
        except ValueError as error:
            raise Unsupported(f"{path}/pattern: {error}") from None
        return self._rule(f'"\\"" {text} "\\"" space')

    def _integer(self, schema: Schema, path: str, depth: int) -> str:
        bounds = self._numbers(schema, path)
        low, high = bounds.integer_bounds()
        step = schema.get("multipleOf", 1)
        if step != 1:
            if not isinstance(step, int) or isinstance(step, bool):
                raise Unsupported(f"{path}/multipleOf: {step}, of an integer")
            body = multiples(step, low, high)
            if body is None:
                raise Unsupported(f"{path}/multipleOf: {step} within these bounds")
            return self._rule(f"({body}) space")
        if low is None and high is None:
            return self._any("integer")
        if low is not None and high is not None and low > high:
            raise Unsupported(f"{path}: no integer lies within the bounds")
        return self._rule(f"({integers(low, high)}) space")

    def _number(self, schema: Schema, path: str, depth: int) -> str:
        bounds = self._numbers(schema, path)
        step = schema.get("multipleOf")
        if step is not None:
            n_places = bounds.places_of(step)
            if n_places is None or not bounds.is_open:
                raise Unsupported(f"{path}/multipleOf: {step}, of a number")
            fraction = f'("." [0-9]{{1,{n_places}}})?' if n_places else ""
            return self._rule(f'"-"? ("0" | [1-9] [0-9]{{0,15}}) {fraction} space')
        if bounds.is_open:
            return self._any("number")
        body = decimals(bounds)
        if not body:
            raise Unsupported(f"{path}: no number lies within the bounds")
        return self._rule(f"({body}) space")

    def _numbers(self, schema: Schema, path: str) -> Decimals:
        for keyword in sorted(_BOUNDS):
            value = schema.get(keyword, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= 10**15:
                raise Unsupported(f"{path}/{keyword}: {_json(value)[:40]}")
        return Decimals.of(schema)

    def _bounds(self, schema: Schema, low: str, high: str, path: str) -> tuple[int, int | None]:
        values = (schema.get(low, 0), schema.get(high))
        for keyword, value in zip((low, high), values, strict=True):
            if value is not None and not (type(value) is int and 0 <= value <= REPEATS_MAX):
                raise Unsupported(f"{path}/{keyword}: {_json(value)[:40]}, at most {REPEATS_MAX}")
        if values[1] is not None and values[1] < values[0]:
            raise Unsupported(f"{path}/{high} is below {low}")
        return values

    def _any(self, name: str) -> str:
        if name not in self.rules:
            self.rules[name] = _ANY[name]
            if name in ("value", "object", "array"):
                for other in _ANY:
                    self.rules.setdefault(other, _ANY[other])
        return name

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules[name] = body
        return name

    def _allow(self, schema: Schema, path: str, keywords: set[str]) -> None:
        for keyword in schema:
            if keyword not in keywords and keyword not in _DESCRIBING:
                raise Unsupported(f"{path}/{keyword[:80]} is not supported")


def _implied_type(schema: Schema) -> str | None:
    """Schemas without a type usually mean the one to which their keywords apply."""
    return next(
        (name for name, keywords in _OF_TYPE.items() if keywords.intersection(schema) - {"format"}), None
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
