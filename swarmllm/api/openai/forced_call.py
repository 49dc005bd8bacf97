"""Builds the JSON schema that forces a tool call (`tool_choice` "required" or a name).

Calls are asked for in the model's own format where its chat template shows which that is, since anyone who is
forced into an unknown one writes nonsense in it; otherwise in generic JSON. Every tool's parameters move to
a definition of their own, with their references pointed there, so that two tools may both have a
`#/$defs/City`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from swarmllm.errors import InvalidRequest
from swarmllm_proto.ipc import Sampling

Json = dict[str, object]
MAX_CALLS = 16
"""More at once are not asked for in earnest, and a list needs an end."""
SCHEMA_MAX = 65536
"""Characters; the wire's limit."""


AROUND = {"<tool_call>": ("<tool_call>\n", "\n</tool_call>"), "[TOOL_CALLS]": ("[TOOL_CALLS]", "")}
"""What stands around the JSON of calls, by the mark that begins one."""


def forced(sampling: Sampling, tools: Sequence[Json], max_calls: int | None, sample: str) -> Sampling:
    """Sampling of nothing but calls. `sample`: a conversation with a call as the model's template shows
    it."""
    mark = next((mark for mark in AROUND if mark in sample), "")
    before, after = AROUND.get(mark, ("", ""))
    is_alone = mark == "<tool_call>"
    return msgspec.structs.replace(
        sampling,
        json_schema=call_schema(tools, None if is_alone else max_calls or MAX_CALLS),
        json_before=before,
        json_after=after,
        json_max=(max_calls or MAX_CALLS) if is_alone else 1,
    )


def call_schema(tools: Sequence[Json], list_max: int | None) -> str:
    """The schema, as text, of a list of at most `list_max` calls of these tools, or of one call, not in a
    list. Raises InvalidRequest."""
    definitions: Json = {}
    calls: list[Json] = []
    for i, tool in enumerate(tools):
        function: Any = tool["function"]
        name = f"tool{i}"
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise InvalidRequest(
                f"the parameters of {function['name']!r} are no object, so it cannot be forced to be called.",
                field=f"tools[{i}].function.parameters",
            )
        moved = _moved(parameters, f"#/$defs/{name}")
        definitions[name] = {key: value for key, value in moved.items() if key != "$id"}
        arguments = {"type": "object", "$ref": f"#/$defs/{name}"}
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: Json = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if list_max is not None:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": list_max}
    text = msgspec.json.encode(schema | {"$defs": definitions}).decode()
    if len(text) > SCHEMA_MAX:
        raise InvalidRequest(f"the parameters are longer than {SCHEMA_MAX} characters.", field="tools")
    return text


_DATA = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are no schemas, whatever they look like."""
_BY_NAME = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependentRequired", "dependencies"),
)
"""Keywords whose values are schemas by name, and no schemas themselves."""


def _moved(schema: Json, place: str) -> Json:
    """The same schema, its references as they must be when its root is at `place`."""
    moved: Json = {}
    for key, value in schema.items():
        if key in _DATA:
            moved[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved_value(part, place) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        else:
            moved[key] = _moved_value(value, place)
    return moved


def _moved_value(value: object, place: str) -> object:
    if isinstance(value, dict):
        return _moved(value, place)
    return [_moved_value(item, place) for item in value] if isinstance(value, list) else value
