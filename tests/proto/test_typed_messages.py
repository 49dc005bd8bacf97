"""All that a node decodes from others: bounded numbers, and identifiers of their own types.

The message types are taken from the modules, so that a new message or field is held to the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from swarmllm_proto import (
    envelope,
    file_digests,
    router_messages,
    swarm,
    swarm_prefix,
    swarm_resume,
    swarm_vision,
)
from swarmllm_proto.identifiers import HEX_DIGEST_PATTERN, NODE_ID_PATTERN

MODULES: tuple[ModuleType, ...] = (
    *(envelope, file_digests, router_messages, swarm, swarm_prefix, swarm_resume, swarm_vision),
)
STRUCTS = {
    value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and not name.startswith("_")
}
NUMBERS = (math.nan, math.inf, -math.inf, -1e300, 1e300, -1.0, 2.0**64)
UNBOUNDED = {"v"}
"""Compared with the one version that is spoken."""


def leaves(kind: inspect.Type, path: str) -> Iterator[tuple[str, inspect.Type]]:
    """Everything inside one field but the fields of other structs."""
    match kind:
        case inspect.UnionType(types=types):
            for each in types:
                yield from leaves(each, path)
        case inspect.TupleType(item_types=items):
            for each in items:
                yield from leaves(each, path)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            assert kind.max_length is not None, f"{path} may be of any length"
            yield from leaves(item, path)
        case inspect.DictType(key_type=key, value_type=value):
            yield from leaves(key, path)
            yield from leaves(value, path)
        case inspect.StructType():
            pass
        case _:
            yield path, kind


def fields() -> Iterator[tuple[str, inspect.Type]]:
    for struct in STRUCTS:
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            yield from leaves(field.type, f"{struct.__name__}.{field.name}")


FIELDS = sorted(fields(), key=lambda field: field[0])


def test_the_types_of_every_module_are_looked_at() -> None:
    assert {"NodeRecord", "Envelope", "KnownPeer", "Digests", "ReplayRows"} <= {s.__name__ for s in STRUCTS}
    assert len(FIELDS) > 100


@pytest.mark.parametrize(("path", "kind"), FIELDS, ids=lambda each: each if isinstance(each, str) else "")
def test_every_number_and_text_is_bounded(path: str, kind: inspect.Type) -> None:
    name = path.rpartition(".")[2]
    if isinstance(kind, inspect.IntType | inspect.FloatType) and name not in UNBOUNDED:
        assert kind.ge is not None or kind.gt is not None, f"{path} has no lower bound"
        assert kind.le is not None or kind.lt is not None, f"{path} has no upper bound"
    if isinstance(kind, inspect.StrType | inspect.BytesType | inspect.MemoryViewType):
        assert kind.max_length is not None, f"{path} may be of any length"


@pytest.mark.parametrize(("path", "kind"), FIELDS, ids=lambda each: each if isinstance(each, str) else "")
def test_every_identifier_is_of_its_type(path: str, kind: inspect.Type) -> None:
    struct, _, name = path.rpartition(".")
    if name == "model_id":
        assert isinstance(kind, inspect.StrType)
        assert kind.pattern == HEX_DIGEST_PATTERN
    if name == "node_id" and struct in ("Envelope", "Heartbeat", "KnownPeer"):
        assert isinstance(kind, inspect.StrType)
        assert kind.pattern == NODE_ID_PATTERN


FLOATS = [(path, kind) for path, kind in FIELDS if isinstance(kind, inspect.FloatType)]


@pytest.mark.parametrize(("path", "kind"), FLOATS, ids=lambda each: each if isinstance(each, str) else "")
@given(number=st.one_of(st.sampled_from(NUMBERS), st.floats()))
def test_what_passes_as_a_number_is_finite_and_in_range(
    path: str, kind: inspect.FloatType, number: float
) -> None:
    bounds: dict[str, Any] = {"ge": kind.ge, "gt": kind.gt, "le": kind.le, "lt": kind.lt}
    limits = msgspec.Meta(**{name: bound for name, bound in bounds.items() if bound is not None})
    decoder: Any = msgspec.msgpack.Decoder(msgspec.defstruct("Message", [("field", _annotated(limits))]))
    try:
        passed = decoder.decode(msgspec.msgpack.encode({"field": number})).field
    except msgspec.ValidationError:
        return
    assert math.isfinite(passed)
    assert abs(passed) <= 1e18


def _annotated(limits: msgspec.Meta) -> Any:
    return Annotated[float, limits]


@pytest.mark.parametrize("n_layers", [1025, 65_535, 10**6, -1])
def test_a_model_of_more_layers_than_there_are_is_refused_by_its_field(n_layers: int) -> None:
    announced = {
        "type": "ShardAnnounce",
        "model_id": "0" * 64,
        "name": "m",
        "n_layers": n_layers,
        "ranges": [[0, 1]],
    }
    with pytest.raises(msgspec.ValidationError, match="n_layers"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(announced), type=swarm.ShardAnnounce)
