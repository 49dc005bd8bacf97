"""Fields of a request's body that its type does not have: which are ignored and which are refused.

Clients send fields that this API does not have. A body's type lists the known ones: `ignored` fields change
nothing in an answer; `refused` fields would, and are not supported. All others are ignored too, unless
`api.strict` is set. The header `x-swarm-ignored` lists the ignored fields. Values of such fields are never
decoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
import msgspec.inspect
import trio
from msgspec import Meta, Raw
from quart import g, has_request_context

from swarmllm.api.http.context import current_config, model_or_only_one
from swarmllm.api.http.errors import body_bytes, decode_body
from swarmllm.errors import InvalidRequest

T = TypeVar("T")

HEADER = "x-swarm-ignored"
NAMES_MAX = 16
NAME_MAX = 64
"""Characters."""
ITEMS_MAX = 4096
"""Of a list that is looked into; no body's type allows longer lists of objects."""
LARGE_BYTES = 2**20
"""Of a body that is decoded in a thread: looking for fields in it takes some ten milliseconds a megabyte."""
ASKS_NOTHING = (b"null", b"false", b"[]", b"{}", b'""')

_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_ITEM = re.compile(r"\[\d+\]")
_ITEMS = Annotated[list[Raw], Meta(max_length=ITEMS_MAX)]


async def read_request(kind: type[T], *, any_type: bool = False) -> T:
    """The request's JSON body as `kind`, with the only model that can answer where it names none.

    Raises InvalidRequest with `field`, UnsupportedMedia."""
    data = await body_bytes(any_type=any_type)
    decode = partial(decode_request, data, kind, is_strict=current_config().api.strict)
    body = await trio.to_thread.run_sync(decode) if len(data) > LARGE_BYTES else decode()
    if isinstance(body, msgspec.Struct) and getattr(body, "model", None) == "":
        prefers_encoders = bool(getattr(body, "prefers_encoders", False))
        model = await model_or_only_one(None, prefers_encoders=prefers_encoders)
        body = msgspec.structs.replace(body, model=model)
    return body


def decode_request(data: bytes, kind: type[T], *, is_strict: bool = False) -> T:
    """Fields that are ignored are noted for the answer's header. Raises InvalidRequest."""
    try:
        body = decode_body(data, kind)
    except InvalidRequest as error:
        if not error.message.startswith("Unknown field"):
            raise
        walk = _Walk(is_strict)
        body = decode_body(walk.known(data, _type_of(kind), ""), kind)
        for name in walk.ignored:
            note_ignored(name)
    _note_known(body, "")
    return body


def _note_known(body: object, path: str) -> None:
    """Fields that the type has and that change nothing."""
    ignored = getattr(body, "ignored", ())
    for name in getattr(body, "__struct_fields__", ()):
        value = getattr(body, name)
        if value is not None and name in ignored:
            note_ignored(path + name)
        elif isinstance(value, msgspec.Struct):
            _note_known(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
            for each in value:
                _note_known(each, f"{path}{name}[].")


def note_ignored(name: str) -> None:
    """Tell the client that a field changed nothing; `name` may have numbers of items."""
    if not has_request_context():
        return
    names: dict[str, None] = g.setdefault("ignored", {})
    if len(names) <= NAMES_MAX:
        names[_ITEM.sub("[]", name)] = None


def ignored_header() -> str:
    """What the present request's answer says in HEADER; "" where nothing was ignored."""
    return header_of(list(g.get("ignored", {})))


def header_of(names: list[str]) -> str:
    """At most NAMES_MAX names, each cut to NAME_MAX characters that a header may hold."""
    shown = [_UNSAFE.sub("?", name[:NAME_MAX]) for name in names[:NAMES_MAX]]
    return ", ".join(shown + ["..."] * (len(names) > NAMES_MAX))


@dataclass(slots=True)
class _Walk:
    """Removes the fields from a body that its type does not have."""

    is_strict: bool
    ignored: dict[str, None] = field(default_factory=dict)

    def known(self, data: bytes, kind: msgspec.inspect.Type, path: str) -> bytes:
        """`data`: one JSON value. What does not fit the type is left for the decoder to refuse."""
        start = data.lstrip()[:1]
        try:
            if start == b"{":
                fields = msgspec.json.decode(data, type=dict[str, Raw])
                structure = _structure(kind, fields)
                return data if structure is None else self._known_fields(fields, structure, path)
            if start == b"[" and (item := _item_type(kind)) is not None:
                items = msgspec.json.decode(data, type=_ITEMS)
                known = [Raw(self.known(bytes(each), item, f"{path}[{i}]")) for i, each in enumerate(items)]
                return msgspec.json.encode(known)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        return data

    def _known_fields(
        self, fields: dict[str, Raw], structure: msgspec.inspect.StructType, path: str
    ) -> bytes:
        types = {each.encode_name: each.type for each in structure.fields}
        known: dict[str, Raw] = {}
        for name, value in fields.items():
            place = f"{path}.{name}" if path else name
            if name in types:
                known[name] = Raw(self.known(bytes(value), types[name], place))
            elif name == structure.tag_field:
                known[name] = value
            elif structure.forbid_unknown_fields:
                self._drop(structure.cls, name, value, place)
        return msgspec.json.encode(known)

    def _drop(self, kind: type, name: str, value: Raw, place: str) -> None:
        """Raises InvalidRequest."""
        if name in getattr(kind, "refused", ()) or getattr(kind, "refuses_unknown", False):
            off = getattr(kind, "refused_unless", {}).get(name, ())
            if bytes(value) not in ASKS_NOTHING and not (off and _number(value) in off):
                raise InvalidRequest(f"{place} is not supported here; leave it out.", field=place)
        elif self.is_strict and name not in getattr(kind, "ignored", ()):
            raise InvalidRequest(f"Unknown field `{place}`.", field=place)
        if len(self.ignored) <= NAMES_MAX:
            self.ignored[_ITEM.sub("[]", place)] = None


def _number(value: Raw) -> float | None:
    """None for what is no number."""
    try:
        return msgspec.json.decode(value, type=float)
    except msgspec.DecodeError:
        return None


_TYPES: dict[type, msgspec.inspect.Type] = {}


def _type_of(kind: type) -> msgspec.inspect.Type:
    if kind not in _TYPES:
        _TYPES[kind] = msgspec.inspect.type_info(kind)
    return _TYPES[kind]


def members(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """The types that a value may have."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return members(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return [each for member in kind.types for each in members(member)]
    return [kind]


def _item_type(kind: msgspec.inspect.Type) -> msgspec.inspect.Type | None:
    return next(
        (each.item_type for each in members(kind) if isinstance(each, msgspec.inspect.ListType)), None
    )


def _structure(kind: msgspec.inspect.Type, fields: dict[str, Raw]) -> msgspec.inspect.StructType | None:
    """The one that the object is meant to be; None where any object is allowed or none fits."""
    structures = [each for each in members(kind) if isinstance(each, msgspec.inspect.StructType)]
    for each in structures:
        if each.tag_field is None:
            return each
        tag: Any = msgspec.json.decode(fields[each.tag_field]) if each.tag_field in fields else None
        if tag == each.tag:
            return each
    return None
