"""Decides whether the peer of a connection is alive, and counts the messages that it has taken. Pure, with
the time passed in.

**Keepalive.** A side that has written nothing for a while pings: everything it writes tells the peer that it
lives. The side that dialled does so sooner, and the answer to its ping counts as written by the other, so one
ping serves both. A peer whose handler is busy reads nothing, ours included, and answers nothing; then its own
ping comes. Silence counts only while this side is ready to read and had the time to: after it was stopped or
blocked itself, what the peer sent meanwhile is yet to be read.

A frozen peer is to be out of every route within 5 s. Its last ping may have come just before, so silence
may last a little less than that. A ping of a peer that is merely short of processor time may come too late by
SILENCE_S less PING_S, YIELD_S and CHECK_S.

**Rest.** Where both sides have said that they rest, and no message has gone either way for REST_AFTER_S,
pings come every REST_PING_S, from the side that did not dial, and silence may last REST_SILENCE_S and until
the next tick: nobody waits for such a peer. This side wakes up with its first message, or when the node
begins to work (`used`). From then on it pings and judges as above, and a peer that froze meanwhile is given
up SILENCE_S later; the peer answers pings whether it rests or not.

**Deliveries.** A message's delivery id is its number on its connection, from 1: both ends count, so it
costs no byte, and below them Noise counts too, so nothing comes twice. The receiver acknowledges by the
highest number it has handed on, about once a second and only when there is something to say; while it is
busy with a message, or one is still coming in, it says the same again. A sender that hears nothing of the
kind for RR_ACK_TIMEOUT_S, with something unacknowledged, takes the connection for broken, though pings may
come.
"""

from __future__ import annotations

import math
from typing import Literal

from swarmllm.shared_ticks import REST_TICK_S, next_rest_tick_s
from swarmllm_proto.errors import BadMessage

PING_S = 2.0
YIELD_S = 0.25
"""So much longer waits the side that did not dial, for the ping of the side that did."""
MEASURE_S = 10.0
"""Between pings, at most, however much is written: their answers tell the round trip."""
SILENCE_S = 4.5
CHECK_S = 0.5
"""Between looks, at most."""
STOPPED_S = 1.0
"""Woken that much too late, this process was stopped."""
LAST_LOOK_S = 0.1
"""From the first sight of silence to the verdict: where this process had little time, what has come is read
by then."""


REST_AFTER_S = 60.0
REST_PING_S = 10.0
REST_YIELD_S = REST_TICK_S
"""At rest, so much longer waits the side that dialled."""
REST_SILENCE_S = 15.0
"""Looked for at ticks only, so it may last REST_TICK_S longer. Else each connection would have a look of its
own."""
REST_MEASURE_S = 60.0
"""As MEASURE_S, at rest."""
_REST_MARGIN_S = 5.0
"""So much later this side stops to ping often: the peer may have seen the last message later than it did."""
_TICK_SLACK_S = 0.5


class Keepalive:
    def __init__(self, *, dialled: bool = True) -> None:
        self._quiet_s = PING_S if dialled else PING_S + YIELD_S
        # The other side: a node that many dial pings them all at one moment, and has their answers together.
        self._quiet_at_rest_s = REST_PING_S + REST_YIELD_S if dialled else REST_PING_S
        self._may_rest = False
        self._used_at_s = -math.inf
        self._heard_at_s = math.inf
        self._wrote_at_s = -math.inf
        self._ping_at_s = -math.inf
        self._measure_at_s = -math.inf
        self.look_at_s = -math.inf
        """When to `look` again."""
        self._is_last_look = False

    def heard(self, now: float) -> None:
        """Something of the peer's has been read, or this side has not been ready to read until now."""
        self._heard_at_s = now

    def wrote(self, now: float) -> None:
        """Something has been written to the peer."""
        self._wrote_at_s = now

    def may_rest(self, now: float) -> None:
        """Both sides have said that they do."""
        self._may_rest, self._used_at_s = True, now

    def used(self, now: float) -> bool:
        """A message is sent or has come, or one is to be expected. Returns whether this side was at rest:
        then it is to `look` now."""
        was_at_rest = self.is_at_rest(now, _REST_MARGIN_S)
        if self.is_at_rest(now):
            self._heard_at_s = max(self._heard_at_s, now)
        self._used_at_s = now
        if was_at_rest:
            self.look_at_s = now
        return was_at_rest

    def is_at_rest(self, now: float, margin_s: float = 0.0) -> bool:
        """Whether it may rest, and nothing has been `used` for REST_AFTER_S."""
        return self._may_rest and now >= self._used_at_s + REST_AFTER_S + margin_s

    def ping_is_due(self, now: float, *, is_measured: bool = True) -> bool:
        """And counts as sent. `is_measured`: the round trip is known well enough for now."""
        if now < self._ping_at_s:
            return False
        is_at_rest = self.is_at_rest(now, _REST_MARGIN_S)
        quiet_until_s = self._wrote_at_s + self._quiet_s
        if is_at_rest:
            # The next look is at the next tick.
            quiet_until_s = self._wrote_at_s + self._quiet_at_rest_s - REST_TICK_S + _TICK_SLACK_S
        if is_measured and now < self._measure_at_s and now < quiet_until_s:
            return False
        self._ping_at_s = now + PING_S
        self._measure_at_s = now + (REST_MEASURE_S if is_at_rest else MEASURE_S)
        return True

    def next_look_s(self, now: float, check_at_s: float | None = None) -> float:
        """When to `look` again: at `check_at_s`, if not before; without it in CHECK_S. At rest at the next
        tick."""
        silent_at_s = self._heard_at_s + self._silence_s(now)
        is_at_rest = self.is_at_rest(now, _REST_MARGIN_S)
        if is_at_rest:
            check_at_s = next_rest_tick_s(now)
        elif check_at_s is None:
            check_at_s = now + CHECK_S
        self.look_at_s = now + LAST_LOOK_S if self._is_last_look else check_at_s
        if not is_at_rest and now < silent_at_s < self.look_at_s:
            self.look_at_s = silent_at_s
        return self.look_at_s

    def look(self, now: float, *, is_reading: bool) -> Literal["alive", "unknown", "silent"]:
        """How the peer does. unknown: this process was stopped, and the peer has all its time again."""
        was_last_look, self._is_last_look = self._is_last_look, False
        if now - self.look_at_s > STOPPED_S and self.look_at_s > -math.inf:
            self._heard_at_s = now
            return "unknown"
        if not is_reading or now < self._heard_at_s + self._silence_s(now):
            return "alive"
        if was_last_look:
            return "silent"
        self._is_last_look = True
        return "alive"

    def _silence_s(self, now: float) -> float:
        return REST_SILENCE_S if self.is_at_rest(now) else SILENCE_S


RR_ACK_TIMEOUT_S = 10.0


class Deliveries:
    def __init__(self) -> None:
        self.n_sent = 0
        self.n_acknowledged = 0
        self._n_taken = 0
        self._n_acknowledged = 0
        self._waiting_since_s = 0.0
        """Since the peer last told of its progress, while something is unacknowledged."""
        self._n_marks = 0
        self._n_marks_passed = 0

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

    def mark(self) -> int:
        """A new mark, to be sent behind all messages so far. It is a number, so a later one that the peer has
        passed tells of the earlier ones."""
        self._n_marks += 1
        return self._n_marks

    def passed(self, mark: float) -> None:
        """The peer says that it has handled all messages before this mark. Marks that were never set are
        ignored."""
        if self._n_marks_passed < mark <= self._n_marks:
            self._n_marks_passed = int(mark)

    def has_passed(self, mark: int) -> bool:
        return mark <= self._n_marks_passed

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
        if self._n_taken == self._n_acknowledged and not is_at_work:
            return None
        self._n_acknowledged = self._n_taken
        return self._n_taken
