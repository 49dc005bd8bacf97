"""Applies the log limit to every line of the daemon's log, and names who provoked a line.

A line that a peer or a client can provoke is written through `provoked_by(log, who)`. The filter sits on the
handler, so it sees the lines of libraries as well. Of a provoked line it also removes the traceback and
whatever would break the line: what a stranger sends must not look like a line of ours.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from swarmllm.log_limit import SUMMARY_S, LogLimit

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that the present task works for."""
LINE_MAX: Final = 1000
"""Characters of a provoked line."""
_WHO: Final = "provoked_by"
TEMPLATE: Final = "line_template"
"""Attribute of a record: its `msg` before finished text was written into that."""

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter


def provoked_by(log: logging.Logger, who: str) -> Adapter:
    """`log`, for lines that the peer or client `who` can cause: a node id, an address, the id of a key."""
    return logging.LoggerAdapter(log, {_WHO: who})


class LogLimitFilter(logging.Filter):
    """For a handler, not for a logger: a logger's filters do not see the lines of its children."""

    def __init__(self, limit: LogLimit | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.limit = limit or LogLimit()
        self._clock = clock
        self._looked_at_s = clock()

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        who = getattr(record, _WHO, None)
        # The place, not the template: libraries put what a stranger sent into the template itself.
        key: Hashable = (who, record.name, record.pathname, record.lineno)
        n_left_out = self.limit.admit(key, now, is_provoked=who is not None)
        if n_left_out is None:
            return False
        setattr(record, TEMPLATE, record.msg)
        if who is not None:
            _make_plain(record)
        counts = [f"{n_left_out} more like it"] if n_left_out else []
        if now - self._looked_at_s >= SUMMARY_S:
            self._looked_at_s = now
            if n_others := sum(each.n_lines for each in self.limit.due(now)):
                counts.append(f"{n_others} others")
        if counts:
            record.msg = f"{record.getMessage()} (left out since the last: {' and '.join(counts)})"
            record.args = None
        return True


def _make_plain(record: logging.LogRecord) -> None:
    """One line of printable characters, without a traceback."""
    try:
        text = record.getMessage()
    except Exception as error:
        text = f"{record.msg!r} cannot be written: {type(error).__name__}"
    if record.exc_info and record.exc_info[1] is not None and record.levelno > logging.DEBUG:
        text = f"{text}: {where(record.exc_info[1])}"
        record.exc_info = record.exc_text = None
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: LINE_MAX + 1])
    record.msg = plain if len(plain) <= LINE_MAX else plain[:LINE_MAX] + "…"
    record.args = None


def where(error: BaseException) -> str:
    """The type of an error and the line that raised it. Not its words: they may quote anything."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
