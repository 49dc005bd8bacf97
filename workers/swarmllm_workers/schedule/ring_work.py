"""Works of requests that have a seat here: their results may leave by a link."""

from __future__ import annotations

import time

import numpy as np

from swarmllm_proto.ipc import Forward, LayerResult, StageTiming
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.kernels.row_codec import pack
from swarmllm_workers.ring.ring import Ring
from swarmllm_workers.ring.seat import Seat
from swarmllm_workers.schedule.work import ForwardWork, Send, token_message


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
    ) -> None:
        """`since`: when the job came to this node, by `time.perf_counter`. `timings`: of the
        stages before."""
        super().__init__(message, position, data, engine, decodings, send)
        self._ring = ring
        self._seat = seat
        self._since = self.arrived_at = since
        self._timings_before = timings
        self._by_link = by_link

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
        )
        if self._by_link:
            self._ring.turn(self._seat, self._compute_s, len(hidden))
            return
        answer = LayerResult(
            id=message.id, request_id=message.request_id, compute_s=self._compute_s, onward=onward
        )
        self._send(answer, b"" if onward else encode_tensor(hidden))

    def _deliver_token(self, decoded: Decoded) -> None:
        message = self._message
        onward = self._ring.pass_token(
            self._seat,
            self._position + len(self._data),
            decoded,
            self._timings(),
            may_relay=self._by_link,
            guesses=self._next_guesses(decoded),
        )
        if self._by_link:
            self._ring.turn(self._seat, self._compute_s)
            return
        self._send(
            token_message(message.id, message.request_id, decoded, self._compute_s, onward=onward),
            decoded.text,
        )

    def _next_guesses(self, decoded: Decoded) -> tuple[int, ...]:
        decoding = self._decodings[self.request_id]
        position = decoded.index + self._seat.message.n_prompt_tokens
        return next_guesses(self._ring, self._seat, decoding, decoded, position)

    def _timings(self) -> tuple[StageTiming, ...]:
        busy_s = max(0.0, time.perf_counter() - self._since)
        return (*self._timings_before, StageTiming(self._seat.message.stage, self._compute_s, busy_s))


def next_guesses(
    ring: Ring, seat: Seat, decoding: Decoding, decoded: Decoded, position: int
) -> tuple[int, ...]:
    """What leaves behind a token that will stand at `position`, the newest of `decoding`."""
    guesser = seat.guesser
    if guesser is None:
        return ()
    guesses = guesser.guess(
        decoding.tokens,
        min(seat.rows_max, seat.rows_max_before),
        decoding.sampling.max_tokens - decoding.n_generated,
        time.perf_counter(),
        is_alone=ring.n_requests == 1,
    )
    seat.guesses, seat.guessed_at = guesses, position
    if decoded.finish_reason is None:
        return guesses
    guesser.answered(decoding.tokens)
    return ()
