"""The hello of a data-plane connection, believed only as far as it can be read."""

from __future__ import annotations

import msgspec
import trio

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


class Outgoing:
    """One queued message and its sender's wait for it."""

    def __init__(self, pieces: list[bytes | memoryview], *, is_message: bool = False) -> None:
        self.pieces = pieces
        self.is_message = is_message
        self.begun = False
        self.done = trio.Event()
        self.failed = False
