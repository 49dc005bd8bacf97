"""Makes text of tokens' bytes, for the worker that samples them and for the node that reads them.

Held back are the first bytes of a character whose rest is still to come, and text that may turn out to be the
beginning of a stop string: a stop string never leaks, however the tokens split it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """`push` pieces, `flush` at the end."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped_by: int | None = None
        """The index of the stop string that has been completed."""

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, piece: bytes) -> bytes:
        if self.stopped_by is not None:
            return b""
        return self._release(self._decoder.decode(piece), final=False)

    def flush(self) -> bytes:
        """What was held back, where no stop string came of it. A character that never became whole is
        U+FFFD."""
        if self.is_stopped:
            return b""
        return self._release(self._decoder.decode(b"", True), final=True)

    def _release(self, text: str, *, final: bool) -> bytes:
        if not self._stop:
            return text.encode()
        text = self._held + text
        found = [(at, index) for index, stop in enumerate(self._stop) if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at].encode()
        n_held = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        shown, self._held = text[: len(text) - n_held], text[len(text) - n_held :]
        return shown.encode()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
