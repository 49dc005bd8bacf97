"""The types of messages between nodes, of which lies are told."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final, get_args

import msgspec
import msgspec.inspect as types

from swarmllm.swarm.records import details_book, envelope_book
from swarmllm_proto import (
    envelope,
    file_digests,
    frames,
    record_parts,
    swarm,
)
from swarmllm_proto import router_messages as neighbours
from swarmllm_proto.swarm import base as swarm_base

MODULES: Final[tuple[ModuleType, ...]] = (
    *(swarm, swarm_base, file_digests),
    *(neighbours, envelope, frames, envelope_book, record_parts, details_book),
)
INSIDE: Final = frozenset({envelope._Signed, envelope._Author, neighbours._Versioned})
"""Made by sealing what the lie is about, or a part of another message that is read before the rest."""

JOBS: Final[tuple[type, ...]] = get_args(swarm.JobMessage)
REQUESTS: Final[tuple[type, ...]] = get_args(file_digests.AnyRequest)
RESPONSES: Final[tuple[type, ...]] = get_args(file_digests.AnyResponse)
ENVELOPE: Final = envelope.Envelope
HEARTBEAT: Final = envelope.Heartbeat
DIGESTS: Final = envelope_book.Digests
NEIGHBOURS: Final[tuple[type, ...]] = neighbours.Message.__constraints__
STATEMENTS: Final[tuple[type, ...]] = envelope.Statement.__constraints__
RECORDS: Final[tuple[type, ...]] = (swarm.NodeRecord,)
OPENINGS: Final[tuple[type, ...]] = (frames.Hello,)
INSIDE_PIECES: Final[tuple[type, ...]] = (swarm.Outline,)
DETAILS: Final = envelope.Details
ASKED_DETAILS: Final = details_book.AskedDetails
TOLD: Final = (
    envelope_book.Digest,
    ASKED_DETAILS,
    record_parts.RecordDetails,
    *JOBS,
    *REQUESTS,
    *RESPONSES,
    *NEIGHBOURS,
    *STATEMENTS,
    *RECORDS,
    *OPENINGS,
    *INSIDE_PIECES,
)
"""Every type of which untruths are told."""


def all_message_types() -> set[type]:
    """Every struct of the wire between nodes, whether or not anything here tells of it."""
    return {
        found
        for module in MODULES
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, msgspec.Struct) and found.__module__ == module.__name__
    }


def types_within(kind: Any) -> Iterator[type]:
    """The struct types of which a message of this type consists, itself included."""
    pending, seen = [types.type_info(kind)], set[type]()
    while pending:
        each = pending.pop()
        if isinstance(each, types.StructType):
            if each.cls in seen:
                continue
            seen.add(each.cls)
            yield each.cls
            pending += [each_field.type for each_field in each.fields]
        elif isinstance(each, types.UnionType):
            pending += each.types
        elif isinstance(each, types.TupleType):
            pending += each.item_types
        elif isinstance(each, types.VarTupleType | types.ListType):
            pending.append(each.item_type)
        elif isinstance(each, types.DictType):
            pending += [each.key_type, each.value_type]
