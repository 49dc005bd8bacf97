"""Acting on a plan only when it has stayed the same for a while: gossip arrives at different times, and what
looks like a gap for a moment is somebody whose record is late.
"""

from __future__ import annotations

from dataclasses import dataclass

CONSISTENT_TICKS = 3


@dataclass(slots=True)
class Hysteresis:
    """Of one decision. `T` is anything that can be compared."""

    n_seen: int = 0
    _last: object = None

    def see(self, wish: object) -> bool:
        """Whether this wish has now been seen so many times in a row that it may be acted on."""
        self.n_seen = self.n_seen + 1 if wish == self._last else 1
        self._last = wish
        return self.n_seen >= CONSISTENT_TICKS

    def forget(self) -> None:
        self.n_seen, self._last = 0, None
