"""The load of a node, as it is announced between two records: a few numbers that change with every
request."""

from __future__ import annotations

from typing import Final

import msgspec

from swarmllm_proto.codec import field_and_reason
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.frames import Buffer
from swarmllm_proto.limits import LOAD_MAX
from swarmllm_proto.swarm.base import Count
from swarmllm_proto.swarm.messages import NodeCapability, NodeRecord


class NodeLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of NodeCapability of these names. Further ones may be added at the end."""

    active_requests: Count = 0
    stage_requests: Count = 0
    queued_requests: Count = 0
    free_slots: Count = 0
    free_kv_tokens: Count = 0


_decoder: Final = msgspec.msgpack.Decoder(NodeLoad)


def load_of(capability: NodeCapability) -> NodeLoad:
    return NodeLoad(*(getattr(capability, name) for name in NodeLoad.__struct_fields__))


def encode_load(load: NodeLoad) -> bytes:
    """At most LOAD_MAX bytes."""
    return msgspec.msgpack.encode(load)


def decode_load(data: Buffer) -> NodeLoad:
    """Raises BadMessage."""
    if len(data) > LOAD_MAX:
        raise BadMessage("load", f"{len(data)} bytes, at most {LOAD_MAX}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        field, reason = field_and_reason(error, "")
        raise BadMessage(f"load{field}", reason) from None


def carrying(capability: NodeCapability, load: NodeLoad) -> NodeCapability:
    """The capability with this load."""
    named = dict(zip(NodeLoad.__struct_fields__, msgspec.structs.astuple(load), strict=True))
    return msgspec.structs.replace(capability, **named)


def with_load(record: NodeRecord, load: NodeLoad) -> NodeRecord:
    """The record as if it said so."""
    return msgspec.structs.replace(record, capability=carrying(record.capability, load))
