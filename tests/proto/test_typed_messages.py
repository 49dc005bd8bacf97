"""All that a node decodes from others: bounded numbers, and identifiers of their own types.

The message types are taken from the modules, so that a new message or field is held to the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Annotated, Any, cast, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from node_ids import A, B

from swarmllm_proto import (
    codec,
    envelope,
    file_digests,
    ipc,
    router_messages,
    swarm,
)
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import HEX_DIGEST_PATTERN, NODE_ID_PATTERN
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import base as swarm_base

MODULES: tuple[ModuleType, ...] = (*(envelope, file_digests, router_messages, swarm, swarm_base),)
STRUCTS = {
    value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and not name.startswith("_")
}
NUMBERS = (math.nan, math.inf, -math.inf, -1e300, 1e300, -1.0, 2.0**64)
LINK = swarm.ObservedLink(node_id=B, rtt_s=0.1)
UNBOUNDED = {"v"}
"""Compared with the one version that is spoken."""
NODE_IDS = {"node_id", "origin", "peer", "before", "after", "sender", "receiver", "dialler"}


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
IPC_FIELDS = [
    (f"{struct.__name__}.{field.name}", field.type)
    for struct in (*get_args(ipc.AnyDaemonMessage), *get_args(ipc.AnyWorkerMessage))
    for field in cast(inspect.StructType, inspect.type_info(struct)).fields
    if field.name in NODE_IDS
]


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


@pytest.mark.parametrize(
    ("path", "kind"), FIELDS + IPC_FIELDS, ids=lambda each: each if isinstance(each, str) else ""
)
def test_every_identifier_is_of_its_type(path: str, kind: inspect.Type) -> None:
    name = path.rpartition(".")[2]
    if name == "model_id":
        assert isinstance(kind, inspect.StrType)
        assert kind.pattern == HEX_DIGEST_PATTERN
    if name in NODE_IDS:
        assert isinstance(kind, inspect.StrType)
        assert kind.pattern == NODE_ID_PATTERN


RECORD = swarm.NodeRecord(node_id=A, capability=swarm.NodeCapability(observed_links=(LINK,)))
ASSIGNMENT = swarm.PipelineAssignment(
    request_id="r",
    model_id="0" * 64,
    origin=A,
    stages=(swarm.Stage(node_id=B, start=0, end=4),),
    n_prompt_tokens=3,
    sampling=Sampling(),
)
ERROR = swarm.PipelineError(request_id="r", node_id=A, kind="overloaded", message="")
NO_NODE_IDS = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        ("0OIl", A[:-1], A + "1", A.upper(), f" {A[1:]}", A[:-1] + "\n", "Qm" + "1" * 44, "1" * 52)
    ),
    st.tuples(st.integers(0, 51), st.sampled_from("0OIl-\0é")).map(
        lambda at: A[: at[0]] + at[1] + A[at[0] + 1 :]
    ),
)


@pytest.mark.parametrize(
    ("message", "path", "decode"),
    [
        (RECORD, ("node_id",), codec.decode_record),
        (RECORD, ("capability", "observed_links", 0, "node_id"), codec.decode_record),
        (ASSIGNMENT, ("origin",), codec.decode_request),
        (ASSIGNMENT, ("stages", 0, "node_id"), codec.decode_request),
        (ERROR, ("node_id",), codec.decode_job),
    ],
)
@given(text=NO_NODE_IDS)
def test_a_text_that_is_no_node_id_is_refused_by_its_field(
    message: msgspec.Struct, path: tuple[str | int, ...], decode: Callable[[bytes], object], text: str
) -> None:
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    inner = said
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = text
    with pytest.raises(BadMessage) as refused:
        decode(msgspec.msgpack.encode(said))
    assert refused.value.field == "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(
        "."
    )


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
