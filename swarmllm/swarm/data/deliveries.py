"""Which messages of one connection its peer has taken: pure state, with the time as an argument.

A message's delivery id is its number on its connection, from 1: both ends count, so it costs no byte, and
below them Noise counts too, so nothing comes twice. The receiver acknowledges by the highest number it has
handed on, about once a second and only when there is something to say; while it is busy with a message, or
one is still coming in, it says the same again. A sender that hears nothing of the kind for RR_ACK_TIMEOUT_S,
with something unacknowledged, takes the connection for broken, though its heart may beat.
"""

from __future__ import annotations

from swarmllm_proto.errors import BadMessage

RR_ACK_TIMEOUT_S = 10.0


class Deliveries:
    def __init__(self) -> None:
        self.n_sent = 0
        self.n_acknowledged = 0
        self._n_taken = 0
        self._n_told = 0
        self._waiting_since_s = 0.0
        """Since the peer last told of its progress, while something is unacknowledged."""

    def __repr__(self) -> str:
        return f"<Deliveries {self.n_acknowledged}/{self.n_sent} acknowledged, {self._n_taken} taken>"

    def sent(self, now: float) -> None:
        if self.n_acknowledged == self.n_sent:
            self._waiting_since_s = now
        self.n_sent += 1

    def acknowledged(self, n_messages: int, now: float) -> None:
        """By the peer: all up to this number. Raises BadMessage for what was never sent."""
        if not self.n_acknowledged <= n_messages <= self.n_sent:
            raise BadMessage("ack", f"{n_messages}, after {self.n_acknowledged}, of {self.n_sent} sent")
        self.n_acknowledged = n_messages
        self._waiting_since_s = now

    def excuse(self, now: float) -> None:
        """The peer cannot have been heard, or does not acknowledge: it owes nothing yet."""
        self._waiting_since_s = now

    def is_overdue(self, now: float) -> bool:
        return self.n_acknowledged < self.n_sent and now - self._waiting_since_s >= RR_ACK_TIMEOUT_S

    def taken(self) -> None:
        """A message of the peer's has been handed on."""
        self._n_taken += 1

    def to_tell(self, *, is_at_work: bool) -> int | None:
        """What to acknowledge now. `is_at_work`: on the message that follows."""
        if self._n_taken == self._n_told and not is_at_work:
            return None
        self._n_told = self._n_taken
        return self._n_taken
