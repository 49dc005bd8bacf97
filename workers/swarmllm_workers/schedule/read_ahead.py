"""Reads the daemon's messages ahead of their turn while a batch runs.

A piece of a prompt may take a slow machine many seconds, and libllama computes it in one call. It asks before
every operation of the graph whether to go on (`ggml_abort_callback`), and this is who answers: no, once every
request of the batch has been cancelled or the daemon has gone. What is read here is handled when the batch is
over, in the order in which it came, so nothing else changes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from swarmllm_proto.codec import decode_daemon_message
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.ipc import CancelRequest

LOOK_EVERY_S: Final = 0.01
"""Between two looks at the socket: libllama asks some thousand times a second."""
READS_MAX: Final = 64
"""Bounds what can wait here (16 MiB), as between two steps."""


class ReadAhead:
    def __init__(self, receive: Callable[[], bytes], decoder: FrameDecoder) -> None:
        """`receive` some bytes without waiting, or raise BlockingIOError; none: the stream is over."""
        self._receive = receive
        self._decoder = decoder
        self._ahead: deque[Frame] = deque()
        self._n_reads = 0
        self._running: frozenset[str] = frozenset()
        self._cancelled: set[str] = set()
        self._looks_next_s = 0.0

    def begin(self, request_ids: Iterable[str]) -> None:
        """Start reading: a batch of these requests begins to run."""
        self._running = frozenset(request_ids)

    def end(self) -> None:
        """Stop reading: the batch is over."""
        self._running = frozenset()

    def take(self) -> Iterator[Frame]:
        """The messages that were read, to be handled before any other."""
        while self._ahead:
            yield self._ahead.popleft()
        self._n_reads = 0
        self._cancelled.clear()

    def is_unwanted(self) -> bool:
        """Whether nobody waits for the batch that runs. Called from inside libllama: never raises."""
        if not self._running:
            return False
        now_s = time.monotonic()
        if now_s >= self._looks_next_s:
            self._looks_next_s = now_s + LOOK_EVERY_S
            try:
                if not self._look():
                    return True
            except (OSError, ProtocolError):
                return False  # who reads next finds the same, and knows what to do about it
        return self._running <= self._cancelled

    def _look(self) -> bool:
        """Read what is there. False: the stream is over."""
        while self._n_reads < READS_MAX:
            try:
                data = self._receive()
            except BlockingIOError:
                return True
            if not data:
                return False
            self._n_reads += 1
            for frame in self._decoder.feed(data):
                self._ahead.append(frame)
                self._note(frame)
        return True

    def _note(self, frame: Frame) -> None:
        if b"CancelRequest" not in frame.header:
            return
        try:
            message = decode_daemon_message(frame)
        except ProtocolError:
            return
        if isinstance(message, CancelRequest):
            self._cancelled.add(message.request_id)
