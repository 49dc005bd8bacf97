"""A wire: what the data plane needs of the thing that carries its bytes to one peer.

Two exist: `NoiseWire` (direct TCP) and `StreamWire` (a libp2p stream, where TCP cannot be had).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

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
