"""How many bytes per second a connection brings, from the messages that really came over it.

Only large messages tell: a small one is over before the sender's window has opened, and its time is the
network's latency. The clock starts with the first piece after the header, so that waiting for the sender to
begin does not count. A receiver that is busy sees a slower link than there is; an average over many messages
and the fact that routes only compare links make that bearable.
"""

from __future__ import annotations

TELLING_BYTES = 256 * 1024
"""Messages below say nothing of bandwidth."""
WEIGHT = 0.2


class Throughput:
    """Fed with every piece as it arrives; `bytes_per_s` None until a large message came."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._began_s: float | None = None
        self._n_bytes = 0

    def arrived(self, n_bytes: int, now: float) -> None:
        """A piece of a message."""
        if self._began_s is None:
            self._began_s = now
        else:
            self._n_bytes += n_bytes

    def message_ended(self, now: float) -> None:
        """The piece that arrived last was the message's last."""
        began_s, n_bytes = self._began_s, self._n_bytes
        self._began_s, self._n_bytes = None, 0
        if began_s is None or n_bytes < TELLING_BYTES or now <= began_s:
            return
        latest = n_bytes / (now - began_s)
        known = self.bytes_per_s
        self.bytes_per_s = latest if known is None else known + WEIGHT * (latest - known)
