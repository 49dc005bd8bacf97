"""Requests that nobody runs any more and somebody may go on with: their pipeline broke elsewhere.

They keep slot, rows and journal for a while, the oldest first in line when somebody else needs the room.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class HeldRequests:
    """When each request may be let go of, in the order in which they were held. `release` frees one, and
    discards it here."""

    def __init__(self, release: Callable[[str], None]) -> None:
        self._release = release
        self._until_s: dict[str, float] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._until_s

    def add(self, request_id: str, hold_s: float) -> None:
        self._until_s.pop(request_id, None)
        self._until_s[request_id] = time.monotonic() + hold_s

    def discard(self, request_id: str) -> None:
        self._until_s.pop(request_id, None)

    def let_go(self) -> bool:
        """Free the request that has been held longest. False: none is held."""
        oldest = next(iter(self._until_s), None)
        if oldest is not None:
            self._release(oldest)
        return oldest is not None

    def expire(self) -> None:
        now = time.monotonic()
        for request_id in [request_id for request_id, until_s in self._until_s.items() if until_s <= now]:
            self._release(request_id)

    def next_expiry_s(self) -> float | None:
        """Seconds until one may be let go of, None where there is none."""
        until_s = min(self._until_s.values(), default=None)
        return None if until_s is None else max(0.0, until_s - time.monotonic())
