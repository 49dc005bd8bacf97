"""Work in progress: forwards and generations, one span at a time.

A work tells how many rows it could run, offers a span of as many as it is given, and takes the result; it
never runs anything itself. Seconds of computing are those of the batch: what the request waited for,
the work that shared it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from msgspec import UNSET

from swarmllm_proto.codec import encode_scores
from swarmllm_proto.ipc import (
    FinishReason,
    Forward,
    LayerResult,
    Token,
    TokenLogprob,
)
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.decode.grammar import GrammarPending
from swarmllm_workers.decode.sampling import logprobs
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.positions import rows_until_edge, sees_later
from swarmllm_workers.engine.ranges import Route
from swarmllm_workers.engine.segment import Span, Want
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels.row_codec import round_rows
from swarmllm_workers.schedule.owner_shares import OWN

STEP_ROWS_MAX: Final = 16
"""Rows up to which a Forward is a step that somebody waits for, not a piece of a prompt."""

Send = Callable[..., None]
"""`send(message, payload=b"")` to the daemon."""


class Work(Protocol):
    call_id: int
    request_id: str
    is_finished: bool
    can_restart: bool
    """Whether `restart` works: all it needs is here."""
    has_tokens: bool
    """Token ids, as opposed to hidden states, are what it feeds."""
    arrived_at: float
    """By `time.perf_counter`."""

    layers: tuple[int, int]
    """Which its rows go through: [start, end)."""
    owner: str
    """For whom it is: see `owner_shares`."""

    @property
    def wants_alone(self) -> bool:
        """Whether the waiting rows may not share a batch with other rows."""

    @property
    def rows_of_piece(self) -> int:
        """Pieces of the rows that wait are as long as this, but for the last, whatever else runs there; 0:
        as long as there is room for."""

    def begin(self) -> None:
        """Start the work: it has a slot, and may look for rows that are kept."""

    @property
    def n_waiting(self) -> int:
        """The number of rows that could run now, at least 1."""

    @property
    def is_decode(self) -> bool:
        """Whether the waiting rows are a step that runs in one piece."""

    @property
    def goes_around(self) -> bool:
        """Whether it is a decode step at the first stage of a pipeline: its rows run elsewhere next, and the
        request's next step comes from there."""

    def look_ahead(self, n_rows_max: int) -> None:
        """Prepare a round, before `n_waiting` is read: a step may add guesses. It has `n_rows_max` rows at
        most."""

    def next_span(self, n_rows: int) -> Span:
        """The span of the next `n_rows` waiting rows."""

    def decode_step(self, route: Route) -> Span | None:
        """`look_ahead` of a work that is alone, and the span of all rows that wait, where they are a step.
        Raises CallError."""

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        """Take the result of the last span. Raises CallError."""

    @property
    def is_parked(self) -> bool:
        """Its last result waits for an answer of the grammar process; until then it has nothing to run."""

    def go_on(self) -> None:
        """Try again to use a parked result. Raises CallError."""

    def restart(self) -> None:
        """Begin anew: the KV was dropped, and all rows wait again."""

    def cancel(self) -> None:
        """End the work without another span, and answer that it was cancelled."""


class ForwardWork:
    """The work of a Forward. Its result is a LayerResult or a Token."""

    def __init__(
        self,
        message: Forward,
        position: int,
        data: np.ndarray,
        engine: Engine,
        decodings: dict[str, Decoding],
        send: Send,
    ) -> None:
        """`position` counts, not the message's. Raises CallError bad_message."""
        self.call_id = message.id
        self.request_id = message.request_id
        self.is_finished = False
        self.can_restart = False
        self.has_tokens = data.ndim == 1
        self._gives_rows = message.want in ("normed", "scores", "again")
        self.is_exact = message.exact_rows > 0
        self.layers = message.start, message.end
        self.owner = message.owner or OWN
        self.is_parked = False
        self.arrived_at = time.perf_counter()
        self._message = message
        self._position = position
        self._data = data
        self._engine = engine
        if self.is_exact:
            gives_rows = message.want in ("normed", "scores")
            kv_type = None if message.kv_type is UNSET else message.kv_type
            engine.set_apart(self.request_id, message.exact_rows, gives_rows=gives_rows, kv_type=kv_type)
        self._decodings = decodings
        self._send = send
        self._n_done = 0
        self._n_running = 0
        self._compute_s = 0.0
        self._hidden: list[np.ndarray] = []
        self._scores: list[tuple[TokenLogprob, ...]] = []
        self._parked: np.ndarray | None = None
        """Logits of the token that is to be sampled."""

    def begin(self) -> None:
        return

    @property
    def samples(self) -> bool:
        """Whether it gives a token."""
        return self._message.want == "token"

    @property
    def n_rows(self) -> int:
        return len(self._data)

    @property
    def end_position(self) -> int:
        """The position behind its last row."""
        return self._position + len(self._data)

    @property
    def wants_alone(self) -> bool:
        return self._gives_rows or self._run_alone() is not None

    def _run_alone(self) -> PictureRun | None:
        """Of which the rows that wait are, where those see each other."""
        n_left = len(self._data) - self._n_done
        return sees_later(self._message.picture_runs, self._position + self._n_done, min(n_left, 1))

    @property
    def rows_of_piece(self) -> int:
        if self.is_exact:
            return EXACT_ROWS
        run = self._run_alone()
        return 0 if run is None else run.n_rows

    @property
    def n_waiting(self) -> int:
        n_left = len(self._data) - self._n_done
        if self.is_exact:
            return self._n_exact(n_left)
        if not self._gives_rows:
            return rows_until_edge(self._message.picture_runs, self._position + self._n_done, n_left)
        route = self._engine.known_route(self.request_id, *self.layers)
        return n_left if route is None else min(n_left, route.segments[-1].n_outputs_max)

    def _n_exact(self, n_left: int) -> int:
        """A piece of the prompt as it always is, or one row of what follows it."""
        at = self._position + self._n_done
        if at >= self._message.n_prompt_tokens:
            return 1
        return min(n_left, EXACT_ROWS - at % EXACT_ROWS, self._message.n_prompt_tokens - at)

    @property
    def is_decode(self) -> bool:
        return len(self._data) <= (1 if self.is_exact else STEP_ROWS_MAX)

    @property
    def goes_around(self) -> bool:
        return False

    def look_ahead(self, n_rows_max: int) -> None:
        pass

    def next_span(self, n_rows: int) -> Span:
        message = self._message
        slot = self._engine.slots.take(message.request_id)
        rows = self._data[self._n_done : self._n_done + n_rows]
        self._n_running = len(rows)
        is_last = self._n_done + len(rows) == len(self._data)
        want: Want
        if message.want == "token":
            want = "logits" if is_last else "none"
        else:
            want = "rows" if message.want == "scores" or message.want == "again" else message.want
        return Span(slot, self._position + self._n_done, rows, want, message.picture_runs)

    def decode_step(self, route: Route) -> Span | None:
        n_rows = len(self._data)
        is_step = self.is_decode and not self.wants_alone and self.n_waiting == n_rows
        return self.next_span(n_rows) if is_step else None

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        message = self._message
        self._compute_s += compute_s
        self._n_done += self._n_running
        is_last = self._n_done == len(self._data)
        if message.want == "scores":
            self._score(result)
        if message.want in ("hidden", "normed"):
            self._hidden.append(result if is_last and not self._hidden else result.copy())
        if not is_last:
            return
        if message.want == "token":
            self._sample(result)
            return
        hidden = self._hidden[0] if len(self._hidden) == 1 else None
        if hidden is None and self._hidden:
            hidden = np.concatenate(self._hidden)
        if hidden is not None and message.rounded:
            # Before they leave and before they are kept: whatever is sent again has the same bits.
            hidden = round_rows(hidden)
        self._deliver(hidden)
        if message.want == "hidden" and hidden is not None:
            # After the send: nobody waits for this.
            self._engine.journals.write(message.request_id, message.end, self._position, hidden)
        self._keep_received()
        self.is_finished = True

    def _deliver(self, hidden: np.ndarray | None) -> None:
        message = self._message
        payload: Any = encode_tensor(hidden) if hidden is not None else b""
        if message.want == "scores":
            payload = encode_scores(tuple(self._scores))
        self._send(
            LayerResult(id=message.id, request_id=message.request_id, compute_s=self._compute_s), payload
        )

    def _score(self, logits: np.ndarray) -> None:
        """Of f32 [n, n_vocab], a view that the next batch overwrites, nothing is kept but what is told."""
        started = time.perf_counter()
        sampling, vocabulary = self._message.sampling, self._engine.vocabulary
        n_top = sampling.top_logprobs if sampling is not None else 0
        if not np.isfinite(logits.max(axis=-1)).all():
            raise CallError("engine", "the model gives logits that are no numbers")
        first = self._n_done - self._n_running
        for row, token in zip(logits, self._message.scored[first : self._n_done], strict=True):
            self._scores.append(logprobs(row, token, n_top, vocabulary.full_piece))
        self._compute_s += time.perf_counter() - started

    def _sample(self, logits: np.ndarray) -> None:
        message = self._message
        decoding = self._decodings.get(message.request_id)
        if decoding is None or (message.sampling is not None and message.sampling != decoding.sampling):
            if message.sampling is None:
                raise CallError(
                    "bad_message", "the first forward that wants a token brings the sampling", "sampling"
                )
            decoding = Decoding(self._engine.vocabulary, message.sampling)
            decoding.resume(message.generated)
            self._decodings[message.request_id] = decoding
        index = self._position + len(self._data) - message.n_prompt_tokens
        started = time.perf_counter()
        try:
            decoded = decoding.decode(logits, index)
        except GrammarPending:
            # Logits are a view of what the next batch overwrites.
            self._parked = logits.copy() if self._parked is None else self._parked
            self.is_parked = True
            return
        finally:
            self._compute_s += time.perf_counter() - started
        self._parked, self.is_parked = None, False
        self._deliver_token(decoded)
        self._keep_received()
        self.is_finished = True

    def _keep_received(self) -> None:
        """After the send: nobody waits for this."""
        message = self._message
        # Nobody asks for rows of pictures that came in with further parts: who checks computes from tokens.
        is_wide = message.start == 0 and self._engine.n_embd_input > self._engine.n_embd
        if not self.has_tokens and not (is_wide and message.picture_runs):
            self._engine.received.write(message.request_id, message.start, self._position, self._data)

    def go_on(self) -> None:
        if self._parked is not None:
            self._sample(self._parked)

    def _deliver_token(self, decoded: Decoded) -> None:
        message = self._message
        self._send(token_message(message.id, message.request_id, decoded, self._compute_s), decoded.text)

    def restart(self) -> None:
        raise CallError("engine", "the rows of a forward are not here any more")

    def cancel(self) -> None:
        self.is_finished = True
        raise CallError("engine", "the request was cancelled", "request_id")


def token_message(
    call_id: int,
    request_id: str,
    decoded: Decoded,
    compute_s: float,
    finish: FinishReason | None = None,
    *,
    onward: bool = False,
) -> Token:
    return Token(
        id=call_id,
        request_id=request_id,
        index=decoded.index,
        token=decoded.token,
        finish_reason=finish or decoded.finish_reason,
        compute_s=compute_s,
        logprobs=decoded.logprobs,
        onward=onward,
        stopped_by=decoded.stopped_by,
        fingerprint=decoded.fingerprint or UNSET,
    )
