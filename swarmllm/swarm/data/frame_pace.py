"""How fast the frame in progress on one connection comes: pure state, with the time as an argument.

Each frame has a deadline for the whole of it, so a trickle ends however steady it is. A payload that is
slow but within its deadline goes on until others need the room that it takes.
"""

from __future__ import annotations

from typing import Final

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
