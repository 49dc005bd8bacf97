"""The last rows of a prompt, and in the same batch those of a job that guesses how it goes on.

A step reads every weight once for all its rows, so an answer that is remembered costs little where its rows
run with the prompt's. They do where all of them are so few that each has the bits that it has alone.
"""

from __future__ import annotations

import numpy as np

from swarmllm_workers.engine.ranges import Route
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.schedule.window_work import WindowWork
from swarmllm_workers.schedule.work import ForwardWork


class JoinedWork:
    can_restart = False
    wants_alone = False
    rows_of_piece = 0
    goes_around = False

    def __init__(self, end: ForwardWork, window: WindowWork, n_rows_max: int) -> None:
        """`end`: the last rows of the prompt, of which none has run. `window` stands right behind it.
        `n_rows_max`: of one batch; at least one more than `end` has."""
        self.end = end
        self.window = window
        self.call_id = end.call_id
        """Of the part that an error is told for."""
        self.request_id, self.layers, self.owner = end.request_id, end.layers, end.owner
        self.has_tokens, self.arrived_at = end.has_tokens, end.arrived_at
        self._n_rows_max = n_rows_max
        self._n_joined = 0
        """Rows of the window in the batch that runs."""
        self._parked: tuple[np.ndarray, float] | None = None
        """What these gave, while the token before them waits to be sampled."""

    @property
    def _now(self) -> ForwardWork:
        return self.window if self.end.is_finished else self.end

    @property
    def is_finished(self) -> bool:
        return self.end.is_finished and self.window.is_finished

    @is_finished.setter
    def is_finished(self, is_finished: bool) -> None:
        assert is_finished
        self.end.is_finished = True
        self.window.drop()

    @property
    def is_parked(self) -> bool:
        return self._now.is_parked

    @property
    def is_decode(self) -> bool:
        return self._now.is_decode

    def begin(self) -> None:
        self._now.begin()

    def look_ahead(self, n_rows_max: int) -> None:
        pass

    @property
    def n_waiting(self) -> int:
        if self.end.is_finished:
            return self.window.n_waiting
        return min(self.end.n_waiting + self.window.n_rows, self._n_rows_max)

    def decode_step(self, route: Route) -> Span | None:
        return self.window.decode_step(route) if self.end.is_finished else self.next_span(self.n_waiting)

    def next_span(self, n_rows: int) -> Span:
        if self.end.is_finished:
            return self.window.next_span(n_rows)
        n_end = min(self.end.n_waiting, n_rows)
        span, self._n_joined = self.end.next_span(n_end), n_rows - n_end
        if not self._n_joined:
            return span
        data = np.concatenate((span.data, self.window.next_span(self._n_joined).data))
        return span._replace(data=data, want="rows" if span.want == "logits" else span.want)

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        n_joined, self._n_joined = self._n_joined, 0
        if self.end.is_finished:
            self.window.accept(result, compute_s)
        elif not n_joined:
            self.end.accept(result, compute_s)
        else:
            n_end, samples = len(result) - n_joined, self.end.samples
            each_s = compute_s / len(result)
            self.end.accept(result[n_end - 1] if samples else result[:n_end], n_end * each_s)
            self._parked = result[n_end:], n_joined * each_s
            if self.end.is_parked:
                # Logits are a view of what the next batch overwrites.
                self._parked = result[n_end:].copy(), n_joined * each_s
            self._judge_window()

    def go_on(self) -> None:
        if self.end.is_finished:
            self.window.go_on()
            return
        self.end.go_on()
        self._judge_window()

    def _judge_window(self) -> None:
        """Once the token before it is there. It has been dropped where that is another one."""
        if not self.end.is_finished or self._parked is None:
            return
        self.call_id = self.window.call_id
        result, self._parked = self._parked, None
        if not self.window.is_finished:
            self.window.accept(*result)

    def restart(self) -> None:
        self._now.restart()

    def cancel(self) -> None:
        now = self._now
        self.is_finished = True
        now.cancel()
