"""A forward of a request that has a seat here: its result may leave by a link."""

from __future__ import annotations

import time

import numpy as np

from swarmllm_proto.ipc import Forward, LayerResult, StageTiming
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.ring.seats import Ring, Seat
from swarmllm_workers.schedule.work import ForwardWork, Send, token_message


class RingWork(ForwardWork):
    """`by_link`: it came by a link and nobody waits for an answer; what cannot leave by a link is relayed.
    Otherwise the daemon brought it, and gets back what cannot leave by a link."""

    def __init__(
        self,
        message: Forward,
        data: np.ndarray,
        engine: Engine,
        decodings: dict[str, Decoding],
        send: Send,
        ring: Ring,
        seat: Seat,
        since: float,
        *,
        by_link: bool = False,
    ) -> None:
        """`since`: when the job came to this node, by `time.perf_counter`."""
        super().__init__(message, data, engine, decodings, send)
        self._ring = ring
        self._seat = seat
        self._since = since
        self._by_link = by_link

    def _deliver(self, hidden: np.ndarray | None) -> None:
        message = self._message
        if hidden is None:
            super()._deliver(hidden)
            return
        onward = self._ring.pass_hidden(
            self._seat, message.position, hidden, self._timings(), may_relay=self._by_link
        )
        if self._by_link:
            self._ring.turn(self._seat, self._compute_s)
            return
        answer = LayerResult(
            id=message.id, request_id=message.request_id, compute_s=self._compute_s, onward=onward
        )
        self._send(answer, b"" if onward else encode_tensor(hidden))

    def _deliver_token(self, decoded: Decoded) -> None:
        message = self._message
        onward = self._ring.pass_token(
            self._seat,
            message.position + len(self._data),
            decoded,
            self._timings(),
            may_relay=self._by_link,
        )
        if self._by_link:
            self._ring.turn(self._seat, self._compute_s)
            return
        self._send(
            token_message(message.id, message.request_id, decoded, self._compute_s, onward=onward),
            decoded.text,
        )

    def _timings(self) -> tuple[StageTiming, ...]:
        busy_s = max(0.0, time.perf_counter() - self._since)
        own = StageTiming(self._seat.message.stage, self._compute_s, busy_s)
        return (*self._message.timings, own)
