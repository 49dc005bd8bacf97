"""What the frames of a data-plane connection are: their kinds, and the hello that comes first."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from swarmllm.swarm.wire import WireClosed

VERSION = 1


class Kind(IntEnum):
    HELLO = 0
    MESSAGE = 1
    PING = 2
    PONG = 3
    GOODBYE = 4
    LINK = 5
    LAST = 6
    ACK = 7


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    v: int
    link: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """The dialler wants a link, and this is what for."""
    bulk: bool = False
    """The dialler wants it for bulk.py's questions and answers."""
    acks: bool = False
    """The sender acknowledges messages."""


def checked_hello(content: bytes) -> Hello:
    try:
        hello = msgspec.msgpack.decode(content, type=Hello)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise WireClosed("the peer's hello is unreadable") from None
    if hello.v != VERSION:
        raise WireClosed(f"the peer speaks version {hello.v}, this node {VERSION}")
    return hello
