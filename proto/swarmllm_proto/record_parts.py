"""The two parts of a node's record, as they travel in a large swarm: a brief record for everybody, and
details for those that use or hold its models.

The brief record is a NodeRecord itself, so a reader that knows nothing of details takes it as it is. No field
is in both parts, so they cannot contradict each other.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta

from swarmllm_proto.codec import decode_record, encode_record, field_and_reason
from swarmllm_proto.errors import BadMessage, UnsupportedVersion
from swarmllm_proto.limits import DETAILS_MAX
from swarmllm_proto.node_load import NodeLoad, with_load
from swarmllm_proto.swarm import (
    RECORD_MODELS_MAX,
    NodeRecord,
    ObservedLatency,
    ObservedLink,
    PrefixCacheAnnounce,
    ShardAnnounce,
)
from swarmllm_proto.swarm.base import PREFIX_MODELS_MAX, WIRE_VERSION, Count, ModelId


class FetchProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`fetched` of the ShardAnnounce of one model."""

    model_id: ModelId
    arrived_bytes: Count
    total_bytes: Count


class RecordDetails(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """How fast the node runs its models, its links, what it keeps of prompts: what wanders by itself, and
    only who plans requests reads. Each stands for the field of that name in the record."""

    v: int = WIRE_VERSION
    observed_latencies: Annotated[tuple[ObservedLatency, ...], Meta(max_length=32)] = ()
    observed_links: Annotated[tuple[ObservedLink, ...], Meta(max_length=32)] = ()
    prefix_caches: Annotated[tuple[PrefixCacheAnnounce, ...], Meta(max_length=PREFIX_MODELS_MAX)] = ()
    fetched: Annotated[tuple[FetchProgress, ...], Meta(max_length=RECORD_MODELS_MAX)] = ()


_OF_CAPABILITY: Final = frozenset({"observed_latencies", "observed_links"})
_OF_RECORD: Final = frozenset({"prefix_caches"})
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_decoder: Final = msgspec.msgpack.Decoder(RecordDetails)


def split_record(content: bytes, load: NodeLoad | None = None) -> tuple[bytes, bytes]:
    """(the brief record, the details) of an encoded NodeRecord; the brief one with this load in place of its
    own, where one is given. Raises ProtocolError, also where the details are too large to travel."""
    record = decode_record(content)
    if load is not None:
        record = with_load(record, load)
    details = msgspec.msgpack.encode(details_of(record))
    if len(details) > DETAILS_MAX:
        raise BadMessage("details", f"{len(details)} bytes, at most {DETAILS_MAX}")
    return _encode_brief(record), details


def join_record(brief: bytes, details: bytes) -> bytes:
    """The encoded NodeRecord of which these are the parts. Raises ProtocolError, naming the field."""
    return encode_record(with_details(decode_record(brief), decode_details(details)))


def decode_details(data: bytes) -> RecordDetails:
    """Raises BadMessage, UnsupportedVersion."""
    if len(data) > DETAILS_MAX:
        raise BadMessage("details", f"{len(data)} bytes, at most {DETAILS_MAX}")
    try:
        details = _decoder.decode(data)
    except _UNREADABLE as error:
        raise BadMessage(*field_and_reason(error, "details")) from None
    if details.v != WIRE_VERSION:
        raise UnsupportedVersion(details.v, WIRE_VERSION)
    return details


def details_of(record: NodeRecord) -> RecordDetails:
    return RecordDetails(
        observed_latencies=record.capability.observed_latencies,
        observed_links=record.capability.observed_links,
        prefix_caches=record.prefix_caches,
        fetched=tuple(FetchProgress(each.model_id, *each.fetched) for each in record.models if each.fetched),
    )


def with_details(brief: NodeRecord, details: RecordDetails) -> NodeRecord:
    """The record with these details, in place of any that are in it."""
    fetched = {each.model_id: (each.arrived_bytes, each.total_bytes) for each in details.fetched}
    return msgspec.structs.replace(
        brief,
        models=tuple(_with_progress(model, fetched.get(model.model_id)) for model in brief.models),
        capability=msgspec.structs.replace(
            brief.capability,
            observed_latencies=details.observed_latencies,
            observed_links=details.observed_links,
        ),
        prefix_caches=details.prefix_caches,
    )


def _with_progress(model: ShardAnnounce, fetched: tuple[int, int] | None) -> ShardAnnounce:
    return msgspec.structs.replace(model, fetched=UNSET if fetched is None else fetched)


def _encode_brief(record: NodeRecord) -> bytes:
    """Leaves out what has its default: everybody hears it, and readers put it in."""
    told = _told(record, without=_OF_RECORD)
    told["capability"] = _told(record.capability, without=_OF_CAPABILITY)
    told["models"] = [_told(each, without=frozenset({"fetched"})) for each in record.models]
    told["files"] = [_told(each) for each in record.files]
    return msgspec.msgpack.encode(told)


def _told(struct: msgspec.Struct, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    told: dict[str, Any] = {"type": type(struct).__name__}
    for name, default in _defaults(type(struct)):
        value = getattr(struct, name)
        if name not in without and value != default:
            told[name] = value
    return told


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    return tuple((each.name, each.default) for each in msgspec.structs.fields(kind))
