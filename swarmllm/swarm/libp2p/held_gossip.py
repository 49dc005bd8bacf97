"""Gossip that is in no hurry waits for more of its kind: pure.

A message that goes round a mesh at once crosses each of its connections in both directions, because both ends
have it from somebody else at about the same moment. Here it waits for a while at each node, which drawn lots
make longer or shorter: who is told of it meanwhile by the very neighbour that it waits for need not tell that
one. And what has come together by then travels in one packet.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Final

WAITING_MAX: Final = 100
"""Messages for one neighbour. One more, and they all go at once."""


@dataclass(slots=True)
class _Waiting:
    due_at_s: float
    messages: dict[bytes, Any] = field(default_factory=dict)
    """By id."""


class HeldGossip:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._waiting: dict[Any, _Waiting] = {}

    def __repr__(self) -> str:
        return f"<HeldGossip for {len(self._waiting)} neighbours>"

    @property
    def due_at_s(self) -> float:
        """When `due` has something to send; never where it is infinite."""
        return min((each.due_at_s for each in self._waiting.values()), default=math.inf)

    def hold(self, peer: Any, message_id: bytes, message: Any, at_most_s: float, now: float) -> None:
        """For half of `at_most_s` at least, unless others that wait for that peer take it along."""
        due_at_s = now + at_most_s * self._random.uniform(0.5, 1.0)
        waiting = self._waiting.setdefault(peer, _Waiting(due_at_s))
        waiting.messages[message_id] = message
        is_full = len(waiting.messages) >= WAITING_MAX
        waiting.due_at_s = now if is_full else min(waiting.due_at_s, due_at_s)

    def knows(self, peer: Any, message_id: bytes) -> None:
        """That peer has sent the message itself."""
        waiting = self._waiting.get(peer)
        if (
            waiting is not None
            and waiting.messages.pop(message_id, None) is not None
            and not waiting.messages
        ):
            del self._waiting[peer]

    def due(self, now: float) -> list[tuple[Any, list[Any]]]:
        """What is to be sent now, and to whom; it waits no more."""
        peers = [peer for peer, waiting in self._waiting.items() if waiting.due_at_s <= now]
        return [(peer, list(self._waiting.pop(peer).messages.values())) for peer in peers]

    def forget(self, peer: Any) -> None:
        """It is not there any more."""
        self._waiting.pop(peer, None)
