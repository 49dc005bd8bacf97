"""The hello of a data-plane connection, believed only as far as it can be read."""

from __future__ import annotations

import msgspec

from swarmllm.swarm.data.wire import WireClosed
from swarmllm_proto.data_plane import VERSION as VERSION
from swarmllm_proto.data_plane import Hello as Hello
from swarmllm_proto.data_plane import Kind as Kind


def checked_hello(content: bytes) -> Hello:
    try:
        hello = msgspec.msgpack.decode(content, type=Hello)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise WireClosed("the peer's hello is unreadable") from None
    if hello.v != VERSION:
        raise WireClosed(f"the peer speaks version {hello.v}, this node {VERSION}")
    return hello
