"""What the worker has said and the daemon's socket has not taken yet: a queue of buffers, each copied at most
once."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

PIECES_PER_WRITE: Final = 64
"""Buffers in one `sendmsg`; the kernel takes 1024 at most."""


class Outgoing:
    """Sends in order, as much as the socket takes, and keeps the rest."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pieces: deque[memoryview] = deque()
        self.n_bytes = 0
        """Not sent yet."""

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Queue the pieces and write what the socket takes now. What has to wait is copied, once: the
        caller may overwrite its buffers. Raises OSError where the daemon has gone."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        self._pieces += views
        self.n_bytes += sum(view.nbytes for view in views)
        self.write()
        # Older pieces lie before these, and are copies already.
        for i in range(max(0, len(self._pieces) - len(views)), len(self._pieces)):
            if not isinstance(self._pieces[i].obj, bytes):
                self._pieces[i] = memoryview(bytes(self._pieces[i]))

    def write(self) -> None:
        """Write what the socket takes now. Raises OSError where the daemon has gone."""
        while self._pieces:
            try:
                n = self._connection.sendmsg(islice(self._pieces, PIECES_PER_WRITE))
            except (BlockingIOError, TimeoutError):
                return
            self.n_bytes -= n
            while self._pieces and n >= self._pieces[0].nbytes:
                n -= self._pieces.popleft().nbytes
            if n:
                self._pieces[0] = self._pieces[0][n:]
