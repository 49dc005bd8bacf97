"""Works of requests that have a seat here: their results may leave by a link."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from msgspec import UNSET, UnsetType

from swarmllm_proto.ipc import Done, Forward, LayerResult, StageTiming
from swarmllm_proto.limits import JOBS_UNDER_WAY_MAX
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.kernels.row_codec import pack
from swarmllm_workers.ring.ring import Ring
from swarmllm_workers.ring.seat import Seat
from swarmllm_workers.schedule.work import ForwardWork, Send, token_message
from swarmllm_workers.speculation.chain_guesser import JobLimits
from swarmllm_workers.speculation.jobs_in_flight import LaunchedJob


class RingWork(ForwardWork):
    """`by_link`: it came by a link and nobody waits for an answer; what cannot leave by a link is relayed.
    Otherwise the daemon brought it, and gets back what cannot leave by a link."""

    def __init__(
        self,
        message: Forward,
        position: int,
        data: np.ndarray,
        engine: Engine,
        decodings: dict[str, Decoding],
        send: Send,
        ring: Ring,
        seat: Seat,
        since: float,
        timings: tuple[StageTiming, ...],
        *,
        by_link: bool = False,
        drop_refused: Callable[[Seat], None] = lambda seat: None,
    ) -> None:
        """`since`: when the job came to this node, by `time.perf_counter`. `timings`: of the
        stages before. `drop_refused`: jobs of a seat that wait here and were refused are not to be run."""
        super().__init__(message, position, data, engine, decodings, send)
        self._ring = ring
        self._seat = seat
        self._since = self.arrived_at = since
        self._timings_before = timings
        self._by_link = by_link
        self._drop_waiting = drop_refused
        self._number: int | UnsetType = UNSET
        self._fresh: int | UnsetType = UNSET

    @property
    def goes_around(self) -> bool:
        start, end = self.layers
        is_first_of_several = start == 0 and end < self._engine.n_layers
        return is_first_of_several and self._position >= self._seat.message.n_prompt_tokens

    def _deliver(self, hidden: np.ndarray | None) -> None:
        message = self._message
        if hidden is None:
            super()._deliver(hidden)
            return
        onward = self._ring.pass_rows(
            self._seat,
            self._position,
            len(hidden),
            pack(hidden, self._seat.message.row_format),
            self._timings(),
            may_relay=self._by_link,
            number=self._number,
            fresh=self._fresh,
        )
        if self._by_link:
            is_numbered = self._number is not UNSET
            self._ring.job_done(self._seat, self._compute_s, len(hidden), is_numbered=is_numbered)
            return
        answer = LayerResult(
            id=message.id, request_id=message.request_id, compute_s=self._compute_s, onward=onward
        )
        self._send(answer, b"" if onward else encode_tensor(hidden))

    def _deliver_token(self, decoded: Decoded) -> None:
        message, guesser = self._message, self._seat.guesser
        # Its daemon knows nothing of those, and would send the token on beside them.
        has_early = self._is_prompt and guesser is not None and guesser.jobs_in_flight.n_under_way > 0
        onward = self._ring.pass_token(
            self._seat,
            decoded,
            self._timings(),
            launched=self._next_jobs(decoded, self._position, len(self._data)),
            may_relay=self._by_link or has_early,
        )
        self._drop_refused()
        if has_early:
            self._send(Done(id=self.call_id))
            return
        if self._by_link:
            self._ring.job_done(self._seat, self._compute_s)
            return
        self._send(
            token_message(message.id, message.request_id, decoded, self._compute_s, onward=onward),
            decoded.text,
        )

    def _next_jobs(self, decoded: Decoded, landed_at: int, n_rows: int) -> tuple[LaunchedJob, ...]:
        if not self._is_prompt:
            land(self._seat, landed_at, n_rows)
        may_guess = self._by_link or self._ring.has_link(self._seat.message.after)
        decoding = self._decodings[self.request_id]
        return next_jobs(self._ring, self._seat, decoding, decoded, may_guess=may_guess)

    @property
    def _is_prompt(self) -> bool:
        return self._position < self._seat.message.n_prompt_tokens

    def _drop_refused(self) -> None:
        """At the last stage, after a token: jobs that it has refused and that wait here will not run."""
        seat = self._seat
        if seat.guesser is not None and seat.guesser.jobs_in_flight.fresh > seat.order.fresh:
            for each in seat.order.refuse(seat.guesser.jobs_in_flight.fresh):
                each.drop()
            self._drop_waiting(seat)

    def _timings(self) -> tuple[StageTiming, ...]:
        busy_s = max(0.0, time.perf_counter() - self._since)
        return (*self._timings_before, StageTiming(self._seat.message.stage, self._compute_s, busy_s))


def early_jobs(ring: Ring, seat: Seat) -> tuple[LaunchedJob, ...]:
    """What leaves the last stage, which knows the prompt, before there is a token: the answer that the prompt
    had before. Nothing where stages are not known to wait for the end of the prompt."""
    sampling, before = seat.message.sampling, seat.limits_before
    if seat.guesser is None or sampling is None or not (before.takes_early and before.n_jobs > 1):
        return ()
    if not ring.has_link(seat.message.after):
        return ()
    limits = job_limits(seat, sampling.max_tokens)
    return seat.guesser.early_jobs(seat.message.n_prompt_tokens, limits, is_alone=ring.n_requests == 1)


def job_limits(seat: Seat, n_left: int, *, may_guess: bool = True) -> JobLimits:
    before = seat.limits_before
    return JobLimits(
        n_left,
        min(seat.rows_max, before.n_rows) if may_guess else 1,
        min(JOBS_UNDER_WAY_MAX, before.n_jobs),
        seat.rows_at_once,
    )


def land(seat: Seat, position: int, n_rows: int) -> None:
    """Record that a job without a number is back at the last stage."""
    if seat.guesser is not None and seat.guesser.jobs_in_flight.land(position, n_rows) is None:
        seat.guesser.jobs_in_flight.refuse()  # A token was repeated.


def next_jobs(
    ring: Ring, seat: Seat, decoding: Decoding, decoded: Decoded, *, may_guess: bool = True
) -> tuple[LaunchedJob, ...]:
    """What leaves now that `decoded`, the newest token of `decoding`, is there. The job in which it was
    sampled has landed. `may_guess` False: the daemon sends the token on, and no guesses with it."""
    guesser, position = seat.guesser, decoded.index + seat.message.n_prompt_tokens
    is_over = decoded.finish_reason is not None
    if guesser is None:
        return () if is_over else (LaunchedJob(position, (decoded.token,)),)
    now, is_alone = time.perf_counter(), ring.n_requests == 1
    if is_over:
        guesser.answered(decoding.tokens, now, is_alone=is_alone)
        return ()
    limits = job_limits(seat, decoding.sampling.max_tokens - decoding.n_generated, may_guess=may_guess)
    return guesser.next_jobs(decoding.tokens, position, limits, now, is_alone=is_alone)
