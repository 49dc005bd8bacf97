"""What the two ends of a data connection tell each other of the loads of their nodes.

An end that has asked once is told the other node's load, and each change of it, until the connection ends. A
peer of an earlier version does not know the question, and never answers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from swarmllm_proto.errors import BadMessage
from swarmllm_proto.node_load import decode_load

FRAMES_PER_S: Final = 4.0
"""Of a peer, over time: a node looks at its own load about once a second. Each has this node plan anew."""
FRAMES_BURST: Final = 32.0


class LoadFrames:
    """Of one connection, at one end."""

    def __init__(self, write: Callable[[bytes], bool]) -> None:
        """`write`: a frame with this content. False: something else is being written."""
        self._write = write
        self.on_load: Callable[[bytes], None] = lambda _: None
        """Told the load of the peer's node, and its question for this one's, which is empty."""
        self.has_asked = False
        self.is_asked = False
        """The peer has."""
        self._waiting: bytes | None = None
        self._left = FRAMES_BURST
        self._left_at_s = 0.0

    def __repr__(self) -> str:
        return f"<LoadFrames asked={self.has_asked} tells={self.is_asked}>"

    def ask(self) -> None:
        self.has_asked = self._write(b"")

    def tell(self, load: bytes) -> None:
        """At most LOAD_MAX bytes. Where the peer reads slowly, only the latest is told."""
        self._waiting = load
        self.tell_what_waits()

    def tell_what_waits(self) -> None:
        """To be asked now and then."""
        if self._waiting is not None and self._write(self._waiting):
            self._waiting = None

    def take(self, content: bytes, now_s: float) -> None:
        """Of a frame of the peer. Raises BadMessage, also where there are too many."""
        self._left = min(FRAMES_BURST, self._left + (now_s - self._left_at_s) * FRAMES_PER_S) - 1
        self._left_at_s = now_s
        if self._left < 0:
            raise BadMessage("load", f"told more often than {FRAMES_PER_S:g} times a second")
        if content:
            decode_load(content)
        else:
            self.is_asked = True
        if self.has_asked or not content:
            self.on_load(content)
