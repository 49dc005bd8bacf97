"""What JSON schemas have to look like, and what people usually mean by one that does not say all. Pure."""

from __future__ import annotations

from typing import Final

from swarmllm_workers.grammars.schema_negation import Schema
from swarmllm_workers.grammars.schema_references import Unsupported

_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_OF_TYPE: Final = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
}
_COMBINING: Final = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const")
_OPENING: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_COUNTS: Final = tuple(
    low + what for low in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")
)


def close(todo: Schema) -> None:
    """Where properties are listed and nothing is said of others, there are none."""
    properties = todo.get("properties")
    if not properties or any(key in todo for key in (*_COMBINING, *_OPENING)):
        return
    if todo.get("minProperties", 0) > len(properties) or "dependentSchemas" in todo:
        return
    missing = [name for name in todo.get("required", ()) if name not in properties]
    todo["properties"] = {**properties, **dict.fromkeys(missing, True)}
    todo["additionalProperties"] = False


def imply_type(todo: Schema) -> None:
    """Schemas without a type usually mean the one to which their keywords apply, and that says less."""
    if "type" in todo or any(key in todo for key in _COMBINING):
        return
    kinds = [kind for kind, keywords in _OF_TYPE.items() if any(key in todo for key in keywords)]
    if len(kinds) == 1:
        todo["type"] = kinds[0]


def check_shapes(todo: Schema, path: str) -> None:
    """Raises Unsupported for a keyword whose value is not what it should be."""
    for key in ("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"):
        if not isinstance(todo.get(key, {}), dict):
            raise Unsupported(f"{path}/{key} is no object")
    for key in (*_LISTS, "required", "enum"):
        value = todo.get(key, [])
        if not isinstance(value, list) or (
            key in ("allOf", "anyOf", "oneOf", "enum") and value == [] and key in todo
        ):
            raise Unsupported(f"{path}/{key} is no list with something in it")
    if not all(isinstance(name, str) for name in todo.get("required", [])):
        raise Unsupported(f"{path}/required is no list of names")
    for key in _COUNTS:
        value = todo.get(key, 0)
        if isinstance(value, float) and value.is_integer():
            value = todo[key] = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Unsupported(f"{path}/{key} is no whole number from 0 on")
