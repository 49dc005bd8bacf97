"""When transfers may have the processor: pure state, with the time as an argument.

Messages are what somebody waits for, and one that comes while a slice of a transfer is encrypted or decrypted
waits for the rest of that slice. So slices are small, and messages set their pace. After each message
transfers are still for STILL_S, for another is likely then: its answer, the next row, the next stage's. Once
it stays away they have the processor to themselves until it comes, which between two steps of a decoder is
most of the time. Where messages come without a pause, a slice goes through every PATIENCE_S all the same: no
transfer stands still for good.
"""

from __future__ import annotations

import math

STILL_S = 0.001
"""What a timer can tell apart: epoll's waits are whole milliseconds."""
PATIENCE_S = 0.004


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
        patience_s = waiting_since_s + PATIENCE_S - now
        return max(0.0, min(still_s, patience_s))
