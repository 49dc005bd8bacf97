"""Measures a connection and the frame in progress on it, and decides when transfers may use the processor:
pure.

`now` is trio's clock, in seconds.

**Transfers.** Somebody waits for each message, and a message that arrives while a slice of a transfer is
encrypted or decrypted waits for the rest of that slice. So slices are small, and transfers yield to messages.
After each message transfers pause for STILL_S, because another message is likely then: its answer, the next
row, the next stage's. If none comes they use the processor until the next message, which is most of the time
between two steps of a decoder. Where messages come without a pause, a slice is sent every WAIT_MAX_S all the
same, so no transfer stops for good.

**Throughput.** Only large messages are measured: a small one ends before the sender's window has opened, and
its time is the network's latency. The clock starts with the first piece after the header, so that waiting for
the sender to begin does not count. A receiver that is busy sees a slower link than there is; an average over
many messages and the fact that routes only compare links make that bearable.

**Frames.** Each has a deadline for the whole of it, so a trickle ends however steady it is. A payload that is
slow but within its deadline goes on until others need the room that it takes.
"""

from __future__ import annotations

import math
from typing import Final

STILL_S = 0.001
"""What a timer can tell apart: epoll's waits are whole milliseconds."""
WAIT_MAX_S = 0.004


class TransferPacing:
    def __init__(self) -> None:
        self._message_at_s = -math.inf

    def message(self, now: float) -> None:
        """One has been sent, or has arrived."""
        self._message_at_s = now

    def wait_s(self, waiting_since_s: float, now: float) -> float:
        """How long a transfer that moved its last slice at `waiting_since_s` should still wait; 0: its turn
        has come."""
        still_s = self._message_at_s + STILL_S - now
        left_s = waiting_since_s + WAIT_MAX_S - now
        return max(0.0, min(still_s, left_s))


MEASURED_BYTES_MIN = 256 * 1024
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
        if began_s is None or n_bytes < MEASURED_BYTES_MIN or now <= began_s:
            return
        latest = n_bytes / (now - began_s)
        known = self.bytes_per_s
        self.bytes_per_s = latest if known is None else known + WEIGHT * (latest - known)


FIRST_S: Final = 30.0
MIN_BYTES_PER_S: Final = 64 * 1024
"""Beyond FIRST_S. Two transfers at once over a home's slowest uplink are faster."""
SLOW_AFTER_S: Final = 5.0
SLOW_BYTES_PER_S: Final = 1024 * 1024
"""Less than this gives way where others need the room."""


class FramePace:
    def __init__(self) -> None:
        self._began_s: float | None = None

    def __repr__(self) -> str:
        return f"<FramePace since {self._began_s}>"

    def arrived(self, now: float) -> None:
        """Part of a frame, and not its end."""
        if self._began_s is None:
            self._began_s = now

    def ended(self) -> None:
        """The frame is complete."""
        self._began_s = None

    def excuse(self, seconds: float) -> None:
        """This side did not read for so long."""
        if self._began_s is not None:
            self._began_s += seconds

    def restart(self, now: float) -> None:
        """Nobody knows for how long this side did not read."""
        if self._began_s is not None:
            self._began_s = now

    def is_late(self, now: float, payload_size: int) -> bool:
        """Whether all of a frame with such a payload should have come."""
        since_s = self._began_s
        return since_s is not None and now - since_s > FIRST_S + payload_size / MIN_BYTES_PER_S

    def is_slow(self, now: float, n_received: int) -> bool:
        """Whether the payload, of which so many bytes have come, gives way to others."""
        if self._began_s is None:
            return False
        elapsed_s = now - self._began_s
        return elapsed_s > SLOW_AFTER_S and n_received < elapsed_s * SLOW_BYTES_PER_S
