"""Rewrites what a JSON schema says of names and numbers of properties to enforced keywords.

Pure.

What `todo` has is changed; what has to hold besides is added to `also`, as schemas."""

from __future__ import annotations

import re
from typing import Any, Final

from swarmllm_workers.grammars.schema_negation import Schema
from swarmllm_workers.grammars.schema_references import References, Unsupported

_SAID: Final = frozenset(
    ("const", "enum", "format", "pattern", "minLength", "maxLength", "$ref", "multipleOf")
)
"""Keywords that restrict names."""
_SILENT: Final = frozenset(("type", "title", "description", "$comment", "$schema"))


def say_names(todo: Schema, also: list[Any], path: str, references: References) -> None:
    """Replace `propertyNames`. Raises Unsupported."""
    names = todo.pop("propertyNames", True)
    if isinstance(names, dict) and isinstance(names.get("$ref"), str):
        names = references.target(names["$ref"], f"{path}/propertyNames")
    if names is True:
        return
    if names is False:
        also.append({"maxProperties": 0})
        return
    said = {key: value for key, value in names.items() if key in _SAID}
    others = sorted(set(names) - _SAID - _SILENT)
    if others:
        raise Unsupported(f"{path}/propertyNames is not supported with {others[0]}")
    if names.get("type", "string") != "string":
        also.append({"maxProperties": 0})
        return
    if not said:
        return
    listed = [said["const"]] if "const" in said else said.get("enum")
    if isinstance(listed, list) and len(said) == 1:
        _list_names(todo, [name for name in listed if isinstance(name, str)], path)
        return
    if set(said) == {"pattern"}:
        pattern = said["pattern"]
    elif set(said) <= {"minLength", "maxLength"}:
        pattern = f"^.{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$"
    else:
        raise Unsupported(f"{path}/propertyNames is not supported with {', '.join(sorted(said))}")
    if todo.get("patternProperties"):
        raise Unsupported(f"{path}/propertyNames is not supported beside patternProperties")
    todo["properties"] = {
        name: part for name, part in todo.get("properties", {}).items() if _finds(pattern, name, path)
    }
    todo["patternProperties"] = {pattern: todo.pop("additionalProperties", True)}
    todo["additionalProperties"] = False


def _list_names(todo: Schema, names: list[str], path: str) -> None:
    if todo.get("patternProperties"):
        raise Unsupported(f"{path}/propertyNames is not supported beside patternProperties")
    known, others = todo.get("properties", {}), todo.get("additionalProperties", True)
    todo["properties"] = {name: known.get(name, others) for name in names}
    todo["additionalProperties"] = False


def say_counts(todo: Schema, also: list[Any], path: str) -> None:
    """Replace `minProperties` and `maxProperties` beside optional properties, as llguidance counts properties
    only where all that are listed are required. Raises Unsupported."""
    properties, required = todo.get("properties", {}), list(dict.fromkeys(todo.get("required", ())))
    optional = [name for name in properties if name not in required]
    if not optional and not (required and set(required) - set(properties)):
        return
    low, high = todo.pop("minProperties", 0), todo.pop("maxProperties", None)
    n_missing = low - len(required)
    if n_missing == 1 and high is None:
        also.append({"anyOf": [{"required": [name]} for name in optional]})
    elif n_missing > len(optional):
        raise Unsupported(f"{path}/minProperties: {low} of {len(required) + len(optional)} properties")
    elif n_missing > 0:
        required = [*required, *optional[:n_missing]]
        todo["required"], optional = required, optional[n_missing:]
    if high is not None:
        if high < len(required):
            raise Unsupported(f"{path}/maxProperties: {high}, but {len(required)} are required")
        kept = {*required, *optional[: high - len(required)]}
        others = todo.get("additionalProperties", True)
        todo["properties"] = {
            **{name: part if name in kept else False for name, part in properties.items()},
            **{name: others for name in required if name not in properties},
        }
        todo["additionalProperties"] = False
        if todo.pop("patternProperties", None):
            raise Unsupported(f"{path}/maxProperties is not supported beside patternProperties")


def _finds(pattern: str, name: str, path: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        raise Unsupported(f"{path}/propertyNames/pattern is no pattern") from None
