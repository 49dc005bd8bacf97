"""Rewrites a JSON schema to the keywords that llguidance enforces.

Pure.

llguidance refuses what it cannot enforce. Here such a keyword is replaced by others that say the same, or
less: every text under the rewritten schema is valid under the given one. A keyword for which there is no such
replacement is refused with its place. Keywords that JSON Schema does not define restrict nothing, as the
standard has it.

Every `$ref` is resolved against the schema as it was given, and leads to a definition of its own afterwards.

Formats of JSON strings as they are enforced: by llguidance, or by a pattern that says less. Pure.

What JSON schemas have to look like, and what people usually mean by one that does not say all. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any, Final, Literal

import msgspec

from swarmllm_workers.grammars.schema_negation import NoNegation, Schema, exclude, negation
from swarmllm_workers.grammars.schema_properties import say_counts, say_names
from swarmllm_workers.grammars.schema_references import References, Unsupported

ENFORCED: Final = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""By llguidance, and never with a text that validators refuse."""
SYNONYMS: Final = {
    "idn-email": "email",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
}
"""Each is enforced as a narrower one."""

_DAY: Final = r"((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
"""Month and day that every year has."""
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_YEAR: Final = r"(19|20)[0-9]{2}"
PATTERNS: Final = {
    "date": f"^{_YEAR}-{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_YEAR}-{_DAY}T{_TIME}$",
    "idn-hostname": r"^[a-z]{1,20}(\.[a-z]{2,10}){0,3}$",
    "json-pointer": r"^(/[a-zA-Z0-9_]*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]{0,3})(/[a-zA-Z0-9_]+)*$",
    "regex": r"^[a-zA-Z0-9 ]*$",
    "uri-template": r"^[a-zA-Z0-9/]*$",
}
"""For formats in which llguidance is wrong or that it does not know. February 29 is missing."""


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
    """Disallow other properties if a schema lists properties and says nothing about others."""
    properties = todo.get("properties")
    if not properties or any(key in todo for key in (*_COMBINING, *_OPENING)):
        return
    if todo.get("minProperties", 0) > len(properties) or "dependentSchemas" in todo:
        return
    missing = [name for name in todo.get("required", ()) if name not in properties]
    todo["properties"] = {**properties, **dict.fromkeys(missing, True)}
    todo["additionalProperties"] = False


def imply_type(todo: Schema) -> None:
    """Add the type to which the keywords apply to a schema without a type: that is usually meant, and allows
    less."""
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


DEPTH_MAX: Final = 64
PARTS_MAX: Final = 20_000
"""Schemas within one, after rewriting."""
OPTIONAL_MAX: Final = 400
"""Optional properties of one object: what may come next is found out again for each of them at each token."""
VARIANTS_MAX: Final = 256
"""Arrays that are listed for one of unique items."""
CONTAINED_MAX: Final = 64
_SUBSCHEMAS: Final = ("additionalProperties", "items")
_MAPS: Final = ("properties", "patternProperties")
_KEPT: Final = frozenset(
    (
        *("type", "const", "enum", "$ref", "required", "format", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties"),
    )
)
_COMBINED: Final = frozenset(
    ("allOf", "anyOf", "oneOf", "properties", "patternProperties", "items", "prefixItems")
)
_RESTRICTING: Final = (_KEPT | _COMBINED) - {"type"}
_NARROWED: Final = frozenset(
    (
        *("format", "contains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("if", "not", "$dynamicRef"),
    )
)
"""Keywords that may be replaced by narrower ones."""
NO_SCHEMA: Final = (
    *(Unsupported, msgspec.MsgspecError, RecursionError),
    *(AttributeError, KeyError, TypeError, ValueError),
)
"""Raised for what is no schema. Keywords have values of any kind; not each one of them is looked at first."""
Mode = Literal["usual", "open", "exact"]
"""`usual`: schemas mean what people usually mean, also where that says less: keywords of one type mean that
type, and where properties are listed there are no others. `open`: what other schemas are combined with is
left as it is. `exact`: nothing may say less, as parts of a `oneOf` exclude each other as they are, or not."""


def rewritings(schema: object) -> Iterator[Schema]:
    """At most two, to be tried in turn: `oneOf` as it is, which is enforced where its parts are seen to
    exclude each other, then "this part and none of the others". Raises Unsupported, also between the two."""
    first = _Rewriter(schema, opens_one_of=False)
    yield first.whole()
    if first.has_one_of:
        yield _Rewriter(schema, opens_one_of=True).whole()


class _Narrowed(Exception):
    """A schema that has to stay as it is cannot."""


class _Rewriter:
    def __init__(self, root: object, *, opens_one_of: bool) -> None:
        self._root = root
        self._opens_one_of = opens_one_of
        self._references = References(root)
        self._names: dict[tuple[str, Mode], str] = {}
        self._definitions: dict[str, Any] = {}
        self._n_parts = 0
        self.has_one_of = False

    def whole(self) -> Schema:
        rewritten = self._rewritten(self._root, "#", 0, "usual")
        if rewritten is False:
            raise Unsupported("# is a schema that nothing could follow")
        return {**rewritten, "$defs": self._definitions} if self._definitions else rewritten

    def _rewritten(self, schema: object, path: str, depth: int, mode: Mode) -> Any:
        self._n_parts += 1
        if depth > DEPTH_MAX:
            raise Unsupported(f"{path[:200]} is nested more than {DEPTH_MAX} deep")
        if self._n_parts > PARTS_MAX:
            raise Unsupported(f"the schema has more than {PARTS_MAX} parts")
        if schema is True:
            return {}
        if schema is False:
            return False
        if not isinstance(schema, dict):
            raise Unsupported(f"{path[:200]} is no schema")
        self._references.refuse_other_base(schema, path)
        todo = dict(schema)
        check_shapes(todo, path)
        if mode == "usual":
            imply_type(todo)
            close(todo)
        elif mode == "exact" and not _NARROWED.isdisjoint(todo):
            raise _Narrowed
        also: list[Any] = []
        for step in (
            self._older_keywords,
            self._references_in,
            self._format,
            self._unevaluated,
            self._items,
            self._property_names,
            say_counts,
            self._conditions,
        ):
            step(todo, also, path)
        return self._assembled(todo, also, path, depth, mode)

    def _assembled(self, todo: Schema, also: list[Any], path: str, depth: int, mode: Mode) -> Schema:
        n_restricting = len(also) + sum(key in _RESTRICTING for key in todo)
        of_parts: Mode = "open" if mode == "usual" and n_restricting > 1 else mode
        done: Schema = {key: value for key, value in todo.items() if key in _KEPT}
        if "$ref" in todo:
            done["$ref"] = f"#/$defs/{self._definition(todo['$ref'], of_parts)}"
        for key in _SUBSCHEMAS:
            if key in todo:
                done[key] = self._rewritten(todo[key], f"{path}/{key}", depth + 1, mode)
        for key in _MAPS:
            if key in todo:
                done[key] = {
                    name: self._rewritten(part, f"{path}/{key}/{name}", depth + 1, mode)
                    for name, part in todo[key].items()
                }
        if "oneOf" in todo:
            self._one_of(todo, done, also, path, depth, mode)
        for key in _LISTS:
            if key in todo:
                of_part = mode if key == "prefixItems" else of_parts
                if key == "allOf" and len(todo[key]) > 1 and mode == "usual":
                    of_part = "open"
                done[key] = [
                    self._rewritten(part, f"{path}/{key}/{i}", depth + 1, of_part)
                    for i, part in enumerate(todo[key])
                ]
        if also:
            of_also: Mode = "exact" if mode == "exact" else "open"
            # Each part separately: keywords such as additionalProperties look at their neighbours.
            done["allOf"] = [
                *done.get("allOf", []),
                *(self._rewritten(part, path, depth + 1, of_also) for part in also),
            ]
        required = set(done.get("required", ()))
        if len(done.get("properties", {}).keys() - required) > OPTIONAL_MAX:
            raise Unsupported(f"{path}/properties has more than {OPTIONAL_MAX} that are not required")
        return done

    def _one_of(self, todo: Schema, done: Schema, also: list[Any], path: str, depth: int, mode: Mode) -> None:
        """As `anyOf` where its parts exclude each other by a type or a property, as it is where they might,
        else as this part and none of the others."""
        options = todo.pop("oneOf")
        if all(exclude(a, b, self._resolved) for a, b in combinations(options, 2)):
            if "anyOf" in todo:
                also.append({"anyOf": options})
            else:
                todo["anyOf"] = options
            return
        if not self._opens_one_of:
            try:
                done["oneOf"] = [
                    self._rewritten(part, f"{path}/oneOf/{i}", depth + 1, "exact")
                    for i, part in enumerate(options)
                ]
            except _Narrowed:
                pass
            else:
                self.has_one_of = True
                return
        if mode == "exact":
            raise _Narrowed
        also.append(self._opened(options, path))

    def _older_keywords(self, todo: Schema, also: list[Any], path: str) -> None:
        """Of draft 7 and before."""
        if isinstance(todo.get("items"), list):
            todo["prefixItems"] = todo.pop("items")
            if "additionalItems" in todo:
                todo["items"] = todo.pop("additionalItems")
        dependencies = todo.pop("dependencies", {})
        for name, due in dependencies.items():
            kind = "dependentRequired" if isinstance(due, list) else "dependentSchemas"
            todo[kind] = {**todo.get(kind, {}), name: due}
        if "$recursiveRef" in todo:
            raise Unsupported(f"{path}/$recursiveRef is not supported")

    def _references_in(self, todo: Schema, also: list[Any], path: str) -> None:
        dynamic = todo.pop("$dynamicRef", None)
        if dynamic is not None:
            self._references.refuse_dynamic(dynamic, path)
            also.append({"$ref": dynamic})
        if "$ref" in todo:
            self._references.target(todo["$ref"], path)

    def _definition(self, place: str, mode: Mode) -> str:
        """The name of the definition that stands for what `place` leads to."""
        name = self._names.get((place, mode))
        if name is None:
            # Known before it is made: the target may contain itself.
            name = self._names[place, mode] = f"d{len(self._names)}"
            try:
                self._definitions[name] = self._rewritten(self._resolved(place), place, 1, mode)
            except _Narrowed:
                del self._names[place, mode]
                raise
        return name

    def _format(self, todo: Schema, also: list[Any], path: str) -> None:
        form = todo.pop("format", None)
        if not isinstance(form, str):
            return
        form = SYNONYMS.get(form, form)
        if form in ENFORCED:
            todo["format"] = form
        elif form in PATTERNS:
            also.append({"pattern": PATTERNS[form]})
        # Any other one describes, as int32 or password do.

    def _unevaluated(self, todo: Schema, also: list[Any], path: str) -> None:
        """What is left over is measured against the parts that hold for every value; what only some
        alternatives name counts as left over."""
        rest = todo.pop("unevaluatedProperties", True)
        if rest not in (True, {}) and "additionalProperties" not in todo:
            names, patterns = self._evaluated(todo, 0)
            also.append(
                {
                    "properties": dict.fromkeys(names, True),
                    **({"patternProperties": dict.fromkeys(patterns, True)} if patterns else {}),
                    "additionalProperties": rest,
                }
            )
        rest = todo.pop("unevaluatedItems", True)
        if rest not in (True, {}) and "items" not in todo:
            n_items, is_open = self._evaluated_items(todo, 0)
            if not is_open:
                also.append({"prefixItems": [True] * n_items, "items": rest} if n_items else {"items": rest})

    def _always(self, schema: Schema) -> Iterator[Schema]:
        parts = list(schema.get("allOf", ()))
        if isinstance(schema.get("$ref"), str):
            parts.append(self._resolved(schema["$ref"]))
        return (part for part in parts if isinstance(part, dict))

    def _resolved(self, place: str) -> Any:
        return self._references.target(place, "#")

    def _evaluated(self, schema: Schema, depth: int) -> tuple[list[str], list[str]]:
        names, patterns = list(schema.get("properties", {})), list(schema.get("patternProperties", {}))
        if depth < 16:
            for part in self._always(schema):
                more_names, more_patterns = self._evaluated(part, depth + 1)
                names += more_names
                patterns += more_patterns
        return names, patterns

    def _evaluated_items(self, schema: Schema, depth: int) -> tuple[int, bool]:
        n_items, is_open = len(schema.get("prefixItems", ())), "items" in schema
        if depth < 16:
            for part in self._always(schema):
                n_more, is_more_open = self._evaluated_items(part, depth + 1)
                n_items, is_open = max(n_items, n_more), is_open or is_more_open
        return n_items, is_open

    def _items(self, todo: Schema, also: list[Any], path: str) -> None:
        if "contains" in todo:
            part, low, high = todo.pop("contains"), todo.get("minContains", 1), todo.get("maxContains")
            if high is not None:
                # All of them match: so they are counted.
                also.append({"items": part, "minItems": low, "maxItems": high})
            elif low > CONTAINED_MAX:
                also.append({"items": part, "minItems": low})
            elif low:
                also.append({"prefixItems": [part] * low, "minItems": low})
        if todo.pop("uniqueItems", False) is True and not self._list_unique(todo):
            if todo.get("minItems", 0) > 1:
                raise Unsupported(
                    f"{path}/uniqueItems with minItems needs an enum of texts or whole numbers as its items"
                )
            also.append({"maxItems": 1})

    def _list_unique(self, todo: Schema) -> bool:
        """Where the items are some few values, list arrays of them: each value once, in their order."""
        items = todo.get("items")
        if isinstance(items, dict) and isinstance(items.get("$ref"), str):
            items = {**self._resolved_dict(items["$ref"]), **{k: v for k, v in items.items() if k != "$ref"}}
        if todo.get("type") != "array" or "prefixItems" in todo or not isinstance(items, dict):
            return False
        values = [items["const"]] if "const" in items else items.get("enum")
        if not isinstance(values, list) or set(items) - {"const", "enum", "type", "title", "description"}:
            return False
        unique = list({json.dumps(value, sort_keys=True): value for value in values}.values())
        if any(isinstance(value, bool) or not isinstance(value, str | int) for value in unique):
            return False
        low, high = todo.get("minItems", 0), todo.get("maxItems", len(unique))
        arrays: list[list[Any]] = []
        for n in range(low, min(high, len(unique)) + 1):
            for chosen in combinations(unique, n):
                if len(arrays) < VARIANTS_MAX:
                    arrays.append(list(chosen))
        if not arrays:
            return False
        for key in ("type", "items", "minItems", "maxItems"):
            todo.pop(key, None)
        todo["enum"] = arrays
        return True

    def _resolved_dict(self, place: str) -> Schema:
        target = self._resolved(place)
        return target if isinstance(target, dict) else {}

    def _property_names(self, todo: Schema, also: list[Any], path: str) -> None:
        say_names(todo, also, path, self._references)

    def _conditions(self, todo: Schema, also: list[Any], path: str) -> None:
        for name, due in todo.pop("dependentRequired", {}).items():
            if due:
                also.append({"anyOf": [{"properties": {name: False}}, {"required": [name, *due]}]})
        for name, part in todo.pop("dependentSchemas", {}).items():
            also.append({"anyOf": [{"properties": {name: False}}, part]})
        condition, then, otherwise = (todo.pop(key, None) for key in ("if", "then", "else"))
        if condition is not None and (then is not None or otherwise is not None):
            also.append(self._either(condition, then, otherwise, path))
        if "not" in todo:
            also.append(self._negated(todo.pop("not"), f"{path}/not"))

    def _either(self, condition: Any, then: Any, otherwise: Any, path: str) -> Schema:
        ways = [{"allOf": [condition, True if then is None else then]}]
        try:
            against = negation(condition, self._resolved)
        except NoNegation:
            pass
        else:
            ways.append({"allOf": [against, True if otherwise is None else otherwise]})
        possible = [way for way in ways if False not in way["allOf"]]
        if not possible:
            raise Unsupported(f"{path}/if is not supported with what it has")
        return {"anyOf": possible}

    def _negated(self, schema: Any, path: str) -> Any:
        try:
            return negation(schema, self._resolved)
        except NoNegation:
            raise Unsupported(f"{path} is not supported with what it has") from None

    def _opened(self, options: list[Any], path: str) -> Schema:
        ways = []
        for i, option in enumerate(options):
            try:
                others = [negation(other, self._resolved) for j, other in enumerate(options) if j != i]
            except NoNegation:
                continue
            if option is not False and False not in others:
                ways.append({"allOf": [option, *others]})
        if not ways:
            raise Unsupported(f"{path}/oneOf: its parts are not seen to exclude each other")
        return {"anyOf": ways}
