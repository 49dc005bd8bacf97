"""Jobs of a request that has a seat here: their results may leave by a link.

A job is a work, which the scheduler runs with others (`RingWork`). But most jobs of a pipeline are decode
steps that came by a link and have the worker to themselves, and the next stage waits for each of them: such a
one is run at once (`LoneSteps`). A step has read every weight before the next one begins, so the caches hold
nothing of the code between them: each function on the way costs microseconds, most of which it takes to come
from memory. Here are as few of them as will do: as a work of the scheduler, a hop takes a third longer
(`python -m bench.lone_hop`). Whatever is out of the ordinary (other rows than one, a position that is not the
next one, no room, a first token) is left to the works, which know all cases and say what is wrong.
"""

from __future__ import annotations

import ctypes
import math
import time
from struct import Struct
from typing import Any, Final

import numpy as np

from swarmllm_proto.errors import BadTensor
from swarmllm_proto.ipc import Forward, LayerResult, StageTiming
from swarmllm_proto.ipc_base import RowFormat
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import encode_tensor, is_packed, unpack_rows
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.kernels.interposing import find_library
from swarmllm_workers.kernels.row_codec import RowTaker, pack, round_and_pack
from swarmllm_workers.ring.ring import Ring
from swarmllm_workers.ring.seat import Seat
from swarmllm_workers.schedule.cohorts import Cohorts
from swarmllm_workers.schedule.work import ForwardWork, Send, token_message

_HEAD: Final = Struct("<4I")
_F32: Final = np.dtype("<f4")


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


class LoneSteps:
    def __init__(
        self,
        engine: Engine,
        decodings: dict[str, Decoding],
        ring: Ring,
        cohorts: Cohorts | None = None,
        *,
        native: bool = True,
    ) -> None:
        """`native`: by `lone_row.c`, where it was built."""
        self._cohorts = cohorts
        self._engine = engine
        self._decodings = decodings
        self._ring = ring
        self._head = _HEAD.pack(2, 1, engine.n_embd, 0)
        """Of one row of f32 as it is sent."""
        self._n_bytes = len(self._head) + 4 * engine.n_embd
        self._fed = np.empty((1, engine.n_embd), np.float32)
        self._fed_address = self._fed.ctypes.data
        self._take_row: Any = _taker() if native else None
        self._take_packed = RowTaker(engine.n_embd, self._fed_address) if native else None

    def run(
        self, seat: Seat, job: LayerForward, payload: memoryview, since: float, *, is_idle: bool = False
    ) -> bool:
        """False: it is an ordinary piece of work, and nothing has been done. Raises CallError engine,
        context_full. `since`: when the job came, by `time.perf_counter`. `is_idle`: nothing ran
        until then."""
        its, engine, position = seat.message, self._engine, job.position
        slot = engine.slots.get(its.request_id)
        row = self._row(job, payload)
        if row is None or slot is None or (row.ndim == 1) is not (its.start == 0):
            return False
        decoding = None
        if its.sampling is not None:
            decoding = self._decodings.get(its.request_id)
            if decoding is None or decoding.sampling != its.sampling or decoding.grammar is not None:
                return False
        route = engine.known_route(its.request_id, its.start, its.end)
        if route is None:
            return False
        if not engine.can_step(route, slot, position):
            return False
        started = time.perf_counter()
        fed = row
        row = engine.step(route, slot, position, row, "hidden" if decoding is None else "logits")
        if decoding is None:
            compute_s = time.perf_counter() - started
            timing = StageTiming(its.stage, compute_s, time.perf_counter() - since)
            sent, kept = self._leaving(row, its.row_format)
            self._ring.pass_rows(seat, position, 1, sent, (*job.timings, timing), may_relay=True)
            # After the send: nobody waits for this.
            engine.journals.append(its.request_id, its.end, position, kept, len(self._head))
        else:
            decoded = decoding.decode(row, position + 1 - its.n_prompt_tokens)
            compute_s = time.perf_counter() - started
            timing = StageTiming(its.stage, compute_s, time.perf_counter() - since)
            guesses = next_guesses(self._ring, seat, decoding, decoded, position + 1)
            self._ring.pass_token(
                seat, position + 1, decoded, (*job.timings, timing), may_relay=True, guesses=guesses
            )
        if job.step == "layer":
            came = bytes(payload) if len(payload) == self._n_bytes else b"".join((self._head, fed.data))
            engine.received.append(its.request_id, its.start, position, came, len(self._head))
        self._ring.turn(seat, compute_s)
        if its.start == 0 and self._cohorts is not None and self._ring.n_requests > 1:
            layers, now = (its.start, its.end), time.perf_counter()
            self._cohorts.arrived(layers, its.request_id, 1, since, is_idle=is_idle)
            self._cohorts.left(layers, (its.request_id,), now - since, now, is_pure=True)
        return True

    def _row(self, job: LayerForward, payload: memoryview) -> np.ndarray | None:
        """i32 [1] or finite f32 [1, n_embd]; None for everything else, also a token that there is not."""
        if job.n_tokens != 1:
            return None
        if job.step == "embed":
            return np.array((job.token,), np.int32) if job.token < self._engine.n_vocab else None
        if len(payload) != self._n_bytes:
            return self._packed_row(payload)
        whole, n_head, n_embd = payload.obj, len(self._head), self._engine.n_embd
        if self._take_row is not None and isinstance(whole, bytes):
            offset = len(whole) - len(payload)
            is_row = self._take_row(whole, offset, self._head, n_head, self._fed_address, n_embd)
            return self._fed if is_row else None
        row = np.ndarray((1, n_embd), _F32, payload, n_head)
        return (
            row if payload[:n_head] == self._head and math.isfinite(np.add.reduce(row, axis=None)) else None
        )

    def _packed_row(self, payload: memoryview) -> np.ndarray | None:
        if self._take_packed is not None and self._take_packed.take(payload):
            return self._fed
        if not is_packed(payload):
            return None
        try:
            row = unpack_rows(payload, n_rows=1, width=self._engine.n_embd)
        except BadTensor:
            return None
        return row if np.isfinite(row).all() else None

    def _leaving(self, row: np.ndarray, row_format: RowFormat) -> tuple[bytes, bytes]:
        """One row as it is sent, and as it is kept."""
        if row_format == "f32":
            plain = b"".join((self._head, row.data))
            return plain, plain
        if row_format == "q8_0":
            row, sent = round_and_pack(row)
        else:
            sent = pack(row, row_format)
        return sent, b"".join((self._head, row.data))


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


def _taker() -> Any:
    library = find_library("lone_row")
    if library is None:
        return None
    function = ctypes.CDLL(str(library)).swarmllm_take_row
    function.restype = ctypes.c_bool
    function.argtypes = (
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    return function
