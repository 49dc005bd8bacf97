"""A decode job of several rows: a token, and guesses of the head at those that follow it (a window).

A stage computes a window's rows in one batch where these have the bits that each has alone, and one by one
where that is not known of the layers that it holds, or not so: a trip is saved all the same. Which it is, is
tried with the first window that comes, after that has left. The head samples row by row, as it would without
guesses, and goes on while the guess was what it has sampled; what comes after a wrong one counts for nothing.
The next job stands right behind the last token that counts, and so makes every stage forget the refused rows.

Several jobs may be under way, which are numbered then (`speculation/jobs_in_flight.py`). The last row of one
is to give the first token of the next. Stages drop those that wait for them when they hear that they were
refused, and the head drops those that still come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from msgspec import UNSET, UnsetType

from swarmllm_proto.ipc import Done
from swarmllm_proto.limits import WINDOW_ROWS_MAX
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.decode.grammar import GrammarPending
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.ranges import Route
from swarmllm_workers.engine.segment import Segment, Span, Want
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.ring.seat import Seat
from swarmllm_workers.schedule.ring_work import RingWork, next_jobs

log = logging.getLogger(__name__)

_TRIED_ROWS: Final = (ROWS_MAX, 3)
"""As in `speculation`."""


class WindowRows:
    """How many rows of a window one worker runs in one batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._n_exact: dict[tuple[Segment, ...], int] = {}

    def n_exact(self, route: Route) -> int | None:
        """The number of rows whose bits in one batch equal those of single rows. None: not tried yet."""
        return self._n_exact.get(route.segments)

    def try_out(self, route: Route, slot: int, position: int, data: np.ndarray) -> None:
        """`data`, which the slot has at `position` and which is the last that it has, is computed again in
        batches and row by row, where there is room; afterwards the slot has it as it was."""
        engine, settings = self._engine, self._engine.settings
        if (
            self.n_exact(route) is not None
            or position + WINDOW_ROWS_MAX > settings.n_ctx
            or engine.prefixes.n_free(route.segments) < WINDOW_ROWS_MAX
        ):
            return
        n_rows = len(data)
        known = next((n for n in _TRIED_ROWS if self._is_exact(route, slot, position, data, n)), 1)
        engine.rewind(route, Span(slot, position + n_rows, data[:1], "none"))
        self._n_exact = {
            segments: n
            for segments, n in self._n_exact.items()
            if not any(segment.is_closed for segment in segments)
        }
        self._n_exact[route.segments] = known
        log.debug("layers %d:%d: windows run %d rows at a time", route.start, route.end, known)

    def _is_exact(self, route: Route, slot: int, position: int, data: np.ndarray, n_rows: int) -> bool:
        engine, has_head = self._engine, route.end == self._engine.n_layers
        # At least the rows that the slot has, so that it ends with them.
        rows = data[np.arange(max(n_rows, len(data))) % len(data)]
        span = Span(slot, position, rows[:n_rows], "rows" if has_head else "hidden")
        together = engine.run(route, [span])[0].copy()
        is_exact = True
        for i in range(len(rows)):
            one = Span(slot, position + i, rows[i : i + 1], "logits" if has_head else "hidden")
            alone = engine.run(route, [one])[0]
            is_exact &= i >= n_rows or np.array_equal(alone.reshape(-1), together[i].reshape(-1))
        return is_exact


def is_window(seat: Seat, position: int, n_rows: int) -> bool:
    """Whether rows for a seat are a token and guesses. A piece of a prompt is brought for a seat only where
    it is the last stage's, which knows what it has guessed itself."""
    if not 1 < n_rows <= WINDOW_ROWS_MAX or position < seat.message.n_prompt_tokens:
        return False
    if seat.message.sampling is None:
        return True
    return seat.guesser is not None and seat.guesser.jobs_in_flight.find(position, n_rows) is not None


def judge(
    decoding: Decoding,
    n_before: int,
    logits: np.ndarray,
    guesses: Sequence[int],
    decoded: list[Decoded],
) -> bool:
    """Sample the rows of a window, f32 [n, n_vocab], which follow those that gave `decoded`, and add to that.
    `n_before`: tokens that were generated before the window; `guesses`: its own, and the first token of the
    window behind it. Whether it is over: with a row that nothing was guessed to follow, the end of the
    answer, or a guess that was wrong. Raises GrammarPending, as `Decoding.decode` does."""
    for row in logits:
        at = len(decoded)
        one = decoding.decode(row, n_before + at)
        decoded.append(one)
        if one.finish_reason is not None or tuple(guesses[at : at + 1]) != (one.token,):
            return True
    return False


class WindowWork(RingWork):
    def __init__(
        self,
        windows: WindowRows,
        *arguments: Any,
        number: int | UnsetType = UNSET,
        fresh: int | UnsetType = UNSET,
        **named: Any,
    ) -> None:
        """As RingWork. `number`, `fresh`: as in LayerForward."""
        super().__init__(*arguments, **named)
        self._windows = windows
        self._number, self._fresh = number, fresh
        self._guesses: tuple[int, ...] | None = None
        """At the last stage, once it has rows to judge: what is to follow each of them."""
        self._decoded: list[Decoded] = []

    @property
    def is_refused(self) -> bool:
        return self._number is not UNSET and self._number < self._seat.order.fresh

    def is_at(self, seat: Seat) -> bool:
        return self._seat is seat

    def drop(self) -> None:
        """Drop the job: the token that it begins with was refused."""
        if not self.is_finished:
            self.is_finished = True
            self._seat.exit()

    @property
    def goes_around(self) -> bool:
        return False

    @property
    def n_waiting(self) -> int:
        route = self._engine.known_route(self.request_id, *self.layers)
        n_left = len(self._data) - self._n_done
        return 1 if route is None else self._n_at_once(route, n_left)

    def _n_at_once(self, route: Route, n_left: int) -> int:
        return min(n_left, self._windows.n_exact(route) or 1)

    def decode_step(self, route: Route) -> Span | None:
        return self.next_span(self._n_at_once(route, len(self._data) - self._n_done))

    def next_span(self, n_rows: int) -> Span:
        span = super().next_span(n_rows)
        if self._message.want != "token":
            return span
        want: Want = "rows" if len(span.data) > 1 else "logits"
        return span._replace(want=want)

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        if self._message.want != "token":
            super().accept(result, compute_s)
            if self.is_finished:
                self._try_out()
            return
        self._compute_s += compute_s
        self._n_done += self._n_running
        self._sample_rows(np.atleast_2d(result))

    def go_on(self) -> None:
        if self._parked is not None:
            self._sample_rows(self._parked)

    def _sample_rows(self, logits: np.ndarray) -> None:
        """Of those rows that ran last."""
        started = time.perf_counter()
        try:
            is_over = self._judge(logits)
        except GrammarPending:
            # Logits are a view of what the next batch overwrites.
            self._parked = logits.copy() if self._parked is None else self._parked
            self.is_parked = True
            return
        finally:
            self._compute_s += time.perf_counter() - started
        self._parked, self.is_parked = None, False
        if is_over:
            self._deliver_window()
            self._keep_received()
            self.is_finished = True
            self._try_out()

    def _judge(self, logits: np.ndarray) -> bool:
        """Whether the window is over: with the last row, the end of the answer, or a guess that was wrong.
        Raises GrammarPending, and goes on from there when it is called again."""
        message = self._message
        decoding = self._decodings.get(message.request_id)
        if decoding is None:
            raise CallError("position_gap", "nothing has been sampled before this window", "position")
        if self._guesses is None:
            self._guesses = self._land()
        is_over = judge(
            decoding,
            self._position + 1 - message.n_prompt_tokens,
            logits[len(self._decoded) - (self._n_done - self._n_running) :],
            self._guesses,
            self._decoded,
        )
        return is_over or len(self._decoded) == len(self._data)

    def _land(self) -> tuple[int, ...]:
        guesser = self._seat.guesser
        if guesser is None:
            raise CallError("position_gap", "nobody guesses here", "position")
        launch = guesser.jobs_in_flight.land(self._position, len(self._data), self._number or 0)
        if launch is None:
            raise CallError("position_gap", "no such job is under way", "position")
        following = guesser.jobs_in_flight.next_token
        return launch.tokens[1:] if following is None else (*launch.tokens[1:], following)

    def _deliver_window(self) -> None:
        *before, last = self._decoded
        engine, seat = self._engine, self._seat
        route = engine.known_route(self.request_id, *self.layers)
        seat.rows_at_once = (route and self._windows.n_exact(route)) or 0
        launched = next_jobs(self._ring, seat, self._decodings[self.request_id], last)
        self._ring.pass_token(seat, last, self._timings(), launched=launched, may_relay=True, before=before)
        if len(self._decoded) < len(self._data):
            engine.empty(self.request_id, self._position + len(self._decoded))
        if self._by_link:
            is_numbered = self._number is not UNSET
            self._ring.job_done(seat, self._compute_s, self._n_done, is_numbered=is_numbered)
        else:
            self._send(Done(id=self.call_id))
        self._drop_refused()

    def _try_out(self) -> None:
        """After the send: nobody waits for this but the next job, once."""
        route = self._engine.known_route(self.request_id, *self.layers)
        n_rows = self._n_done if not self._decoded else len(self._decoded)
        if route is None or self._windows.n_exact(route) is not None:
            return
        try:
            slot = self._engine.slots.take(self.request_id)
            self._windows.try_out(route, slot, self._position, self._data[:n_rows])
        except CallError as error:  # the next job has the rows computed again, or says what is wrong
            log.info("windows were not tried: %s", error.message)
