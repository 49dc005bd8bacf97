"""What the data plane needs of what carries its bytes to one peer, and the hello that both ends begin with.

Two wires exist: `NoiseWire` (direct TCP) and `StreamWire` (a libp2p stream, where TCP cannot be had). The
hello is believed only as far as it can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import trio

from swarmllm_proto.data_plane import VERSION as VERSION
from swarmllm_proto.data_plane import Hello as Hello
from swarmllm_proto.data_plane import Kind as Kind
from swarmllm_proto.frames import Frame, FrameDecoder


class WireClosed(Exception):
    """The other end is gone, or this one was closed. The text says how it ended."""


class Wire(Protocol):
    @property
    def kind(self) -> Literal["direct", "libp2p", "relay"]: ...

    def write_now(self, pieces: Sequence[bytes | memoryview]) -> bool:
        """Take all of these bytes without waiting, or none: False where that cannot be. What the kernel did
        not take at once is kept and goes out with the next `write`; `has_leftover` says so. Raises
        WireClosed."""
        ...

    @property
    def has_leftover(self) -> bool: ...

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """All of these bytes, after any leftover. One caller at a time; cancelled in the middle, the wire is
        of no more use. Raises WireClosed."""
        ...

    async def receive_frames(self, decoder: FrameDecoder) -> tuple[int, list[Frame]]:
        """Give the next bytes to the decoder: how many they were, at least one, and the frames they
        completed. Raises WireClosed, and what the decoder raises. Cancelling it is safe."""
        ...

    def abort(self) -> None:
        """Close at once, whatever is under way. Idempotent."""
        ...


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
