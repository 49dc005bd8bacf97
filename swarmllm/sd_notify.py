"""Talks to systemd: the sd_notify protocol, and lines of a log with their level.

It sends datagrams to the socket that NOTIFY_SOCKET names, and nothing if the variable is not set. Twenty
lines here replace a library that links libsystemd. The watchdog is fed by a task of the daemon's own event
loop: when that loop hangs, the feeding stops, and the manager restarts the daemon.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

import trio

from swarmllm.errors import reason_of

log = logging.getLogger(__name__)


class ServiceManager:
    """The service manager that started this process, if there is one."""

    def __init__(self, env: Mapping[str, str]) -> None:
        address = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(env)

    def tell(self, **states: str | int) -> None:
        """One message of KEY=value lines. Never blocks and never fails: it is a pacing."""
        if not self._address:
            return
        message = "\n".join(f"{name}={value}" for name, value in states.items()).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
                speaker.setblocking(False)
                speaker.sendto(message, self._address)
        except OSError as error:
            log.warning("the service manager does not listen: %s", reason_of(error))

    async def feed_watchdog(self) -> None:
        """Twice as often as asked for; returns at once where there is no watchdog."""
        while self._address and self.watchdog_s is not None:
            self.tell(WATCHDOG=1)
            await trio.sleep(self.watchdog_s / 2)


STDERR = 2
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""As syslog(3) counts them."""


class JournalFormatter(logging.Formatter):
    """Lines for the journal, which has a time of its own and takes the level from a line's beginning."""

    def __init__(self, lines: logging.Formatter) -> None:
        """`lines` makes the text after the level."""
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in self._lines.format(record).splitlines())


def is_journal(env: Mapping[str, str], file: int = STDERR) -> bool:
    """Whether what is written to `file` goes to the journal."""
    try:
        there = os.fstat(file)
    except OSError:
        return False
    return env.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"


def _watchdog_s(env: Mapping[str, str]) -> float | None:
    """None: no watchdog, or one for another process."""
    try:
        interval_s = int(env["WATCHDOG_USEC"]) / 1e6
        is_ours = int(env.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except (KeyError, ValueError):
        return None
    return interval_s if is_ours and interval_s > 0 else None
