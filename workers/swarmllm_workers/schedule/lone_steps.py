"""Runs a decode step that came by a link and has the worker to itself, without making a work of it.

Most jobs of a pipeline are such steps, and the next stage waits for each of them. A step has read every
weight before the next one begins, so the caches hold nothing of the code between them: each function on the
way costs microseconds, most of which it takes to come from memory. This path calls as few of them as will do.
What a hop takes beside libllama is a fifth to a third less than by a work (`python -m bench.lone_hop`,
docs/benchmarks.md). Everything out of the ordinary (other rows than one, a position that is not the next one,
no room, a first token) is left to the works, which know all cases and say what is wrong.
"""

from __future__ import annotations

import ctypes
import math
import time
from struct import Struct
from typing import Any, Final

import numpy as np
from msgspec import UNSET

from swarmllm_proto.errors import BadTensor
from swarmllm_proto.ipc import StageTiming
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import is_packed, unpack_rows
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.kernels.interposing import find_library
from swarmllm_workers.kernels.row_codec import RowTaker, pack, round_and_pack
from swarmllm_workers.ring.ring import Ring
from swarmllm_workers.ring.seat import Seat
from swarmllm_workers.schedule.cohorts import Cohorts
from swarmllm_workers.schedule.ring_work import land, next_jobs

_HEAD: Final = Struct("<4I")
_HEAD_VALUES: Final = _HEAD.size // 4
_F32: Final = np.dtype("<f4")


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
        message, engine, position = seat.message, self._engine, job.position
        slot = engine.slots.get(message.request_id)
        row = self._row(job, payload)
        if row is None or slot is None or (row.ndim == 1) is not (message.start == 0):
            return False
        decoding = None
        if message.sampling is not None:
            decoding = self._decodings.get(message.request_id)
            if decoding is None or decoding.sampling != message.sampling or decoding.grammar is not None:
                return False
        route = engine.known_route(message.request_id, message.start, message.end)
        if route is None:
            return False
        if not engine.can_step(route, slot, position):
            return False
        started = time.perf_counter()
        fed = row
        row = engine.step(route, slot, position, row, "hidden" if decoding is None else "logits")
        if decoding is None:
            compute_s = time.perf_counter() - started
            timing = StageTiming(message.stage, compute_s, time.perf_counter() - since)
            sent, kept = self._leaving(row, message.row_format)
            self._ring.pass_rows(seat, position, 1, sent, (*job.timings, timing), may_relay=True)
            # After the send: nobody waits for this.
            engine.journals.append(message.request_id, message.end, position, kept, _HEAD_VALUES)
        else:
            decoded = decoding.decode(row, position + 1 - message.n_prompt_tokens)
            compute_s = time.perf_counter() - started
            timing = StageTiming(message.stage, compute_s, time.perf_counter() - since)
            land(seat, position, 1)
            launched = next_jobs(self._ring, seat, decoding, decoded)
            self._ring.pass_token(seat, decoded, (*job.timings, timing), launched=launched, may_relay=True)
        if job.step == "layer":
            came = bytes(payload) if len(payload) == self._n_bytes else b"".join((self._head, fed.data))
            engine.received.append(message.request_id, message.start, position, came, _HEAD_VALUES)
        self._ring.job_done(seat, compute_s)
        if message.start == 0 and self._cohorts is not None and self._ring.n_requests > 1:
            layers, now = (message.start, message.end), time.perf_counter()
            self._cohorts.arrived(layers, message.request_id, 1, since, is_idle=is_idle)
            self._cohorts.left(layers, (message.request_id,), now - since, now, is_pure=True)
        return True

    def _row(self, job: LayerForward, payload: memoryview) -> np.ndarray | None:
        """i32 [1] or finite f32 [1, n_embd]; None for everything else, also a token that there is not."""
        if job.n_tokens != 1 or job.number is not UNSET:
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
