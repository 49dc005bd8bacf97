"""What the frames of a data-plane connection are: their kinds, and the hello that comes first."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

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
    """The dialler wants it for bulk's questions and answers."""
    acks: bool = False
    """The sender acknowledges messages."""
