"""Work in progress: forwards and generations, one span at a time.

A work tells how many rows it could run, offers a span of as many as it is given, and takes the result; it
never runs anything itself. Seconds of computing are those of the batch: what the request waited for,
whoever shared it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from swarmllm_proto.ipc import (
    FinishReason,
    Forward,
    Generate,
    GenerateDone,
    LayerResult,
    Token,
)
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.cache.prefixes import Name
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.segment import Span, Want
from swarmllm_workers.errors import CallError
from swarmllm_workers.schedule.segment_route import Route
from swarmllm_workers.speculation.speculation import Guesser, Speculation

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
    wants_alone: bool
    """Its rows share no batch."""

    def route(self) -> Route:
        """Through what its rows go. Raises CallError."""

    def begin(self) -> None:
        """It has a slot, and may look for rows that are there already."""

    @property
    def n_waiting(self) -> int:
        """Rows that could run now, at least 1."""

    @property
    def is_decode(self) -> bool:
        """Whether these rows are a step that runs in one piece."""

    def look_ahead(self, n_rows_max: int) -> None:
        """Before `n_waiting` is asked for a round: a step may bring guesses along, so many rows in all."""

    def next_span(self, n_rows: int) -> Span:
        """The next rows, `n_rows` of those that wait."""

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        """The result of that span. Raises CallError."""

    def restart(self) -> None:
        """Its KV is gone: all rows wait again."""

    def cancel(self) -> None:
        """End without another span, and say so."""


class ForwardWork:
    """A Forward: LayerResult or Token at the end."""

    def __init__(
        self, message: Forward, data: np.ndarray, engine: Engine, decodings: dict[str, Decoding], send: Send
    ) -> None:
        self.call_id = message.id
        self.request_id = message.request_id
        self.is_finished = False
        self.can_restart = False
        self.has_tokens = data.ndim == 1
        self.wants_alone = message.want == "normed"
        self._message = message
        self._data = data
        self._engine = engine
        self._decodings = decodings
        self._send = send
        self._n_done = 0
        self._n_running = 0
        self._compute_s = 0.0
        self._hidden: list[np.ndarray] = []

    def route(self) -> Route:
        return self._engine.route(self.request_id, self._message.start, self._message.end)

    def begin(self) -> None:
        return

    @property
    def n_waiting(self) -> int:
        n_left = len(self._data) - self._n_done
        if self._message.want != "normed":
            return n_left
        return min(n_left, self.route().segments[-1].n_outputs_max)

    @property
    def is_decode(self) -> bool:
        return len(self._data) <= STEP_ROWS_MAX

    def look_ahead(self, n_rows_max: int) -> None:
        pass

    def next_span(self, n_rows: int) -> Span:
        message = self._message
        slot = self._engine.take_slot(message.request_id)
        rows = self._data[self._n_done : self._n_done + n_rows]
        self._n_running = len(rows)
        is_last = self._n_done + len(rows) == len(self._data)
        want: Want = "none" if message.want == "token" else message.want
        if message.want == "token" and is_last:
            want = "logits"
        return Span(slot, message.position + self._n_done, rows, want)

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        message = self._message
        self._compute_s += compute_s
        self._n_done += self._n_running
        is_last = self._n_done == len(self._data)
        if message.want in ("hidden", "normed"):
            self._hidden.append(result if is_last and not self._hidden else result.copy())
        if not is_last:
            return
        if message.want == "token":
            self._sample(result)
        else:
            hidden = self._hidden[0] if len(self._hidden) == 1 else None
            if hidden is None and self._hidden:
                hidden = np.concatenate(self._hidden)
            self._deliver(hidden)
            if message.want == "hidden" and hidden is not None:
                # After the send: nobody waits for this.
                self._engine.journals.write(message.request_id, message.end, message.position, hidden)
        self.is_finished = True

    def _deliver(self, hidden: np.ndarray | None) -> None:
        message = self._message
        payload: Any = encode_tensor(hidden) if hidden is not None else b""
        self._send(
            LayerResult(id=message.id, request_id=message.request_id, compute_s=self._compute_s), payload
        )

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
        index = message.position + len(self._data) - message.n_prompt_tokens
        started = time.perf_counter()
        decoded = decoding.decode(logits, index)
        self._compute_s += time.perf_counter() - started
        self._deliver_token(decoded)

    def _deliver_token(self, decoded: Decoded) -> None:
        message = self._message
        self._send(token_message(message.id, message.request_id, decoded, self._compute_s), decoded.text)

    def restart(self) -> None:
        raise CallError("engine", "the rows of a forward are not here any more")

    def cancel(self) -> None:
        self.is_finished = True
        raise CallError("engine", "the request was cancelled", "request_id")


class GenerateWork:
    """A Generate: the prompt in chunks, then a token per step. A restarted one runs its prompt and what it
    has generated so far as one prompt."""

    def __init__(
        self,
        message: Generate,
        tokens: np.ndarray,
        engine: Engine,
        send: Send,
        speculation: Speculation | None = None,
    ) -> None:
        self.call_id = message.id
        self.request_id = message.request_id
        self.is_finished = False
        self.can_restart = True
        self.has_tokens = True
        self._session = message.session_id
        self.wants_alone = False
        self._n_given = len(tokens)
        """The prompt, and what was generated elsewhere."""
        self._n_prompt = len(tokens) - message.n_generated
        n_max = min(self._n_prompt + message.sampling.max_tokens, engine.settings.n_ctx + 1)
        self._history = np.empty(max(n_max, len(tokens)), np.int32)
        """The prompt and the tokens generated so far."""
        self._history[: len(tokens)] = tokens
        self._n_history = len(tokens)
        self._engine = engine
        self._send = send
        self._decoding = Decoding(engine.vocabulary, message.sampling)
        self._decoding.resume(tokens[self._n_prompt :].tolist())
        self._position = 0
        self._has_begun = False
        self._n_running = 0
        self._n_cached = 0
        """Rows of the prompt that an earlier request had computed."""
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._speculation = speculation
        self._guesser: Guesser | None = None
        self._guesses: tuple[int, ...] = ()
        """To be checked in this step, behind the last token."""
        self._is_alone = False

    def route(self) -> Route:
        n_ctx = self._engine.settings.n_ctx
        if self._n_history > n_ctx:
            raise CallError(
                "context_full",
                f"the prompt has {self._n_prompt} tokens, the context {n_ctx} (n_ctx)",
                "payload",
            )
        return self._engine.route(self.request_id, 0, self._engine.n_layers)

    def begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        route, history = self.route(), self._history[: self._n_history]
        self._position = self._engine.reuse(self.request_id, route, history, self._session)
        self._engine.prefixes.follow(self.request_id, route.segments, self._name)
        if self._n_history == self._n_given:
            self._n_cached = min(self._position, self._n_prompt)

    @property
    def n_waiting(self) -> int:
        return self._n_history + len(self._guesses) - self._position

    @property
    def is_decode(self) -> bool:
        return self._n_history - self._position == 1 and self._position >= self._n_given

    def look_ahead(self, n_rows_max: int) -> None:
        self._guesses = ()
        self._is_alone = n_rows_max > 1
        if self._speculation is None or self._n_history - self._position != 1:
            return
        if self._guesser is None:
            slot = self._engine.take_slot(self.request_id)
            self._guesser = self._speculation.begin(self.route(), slot, self._history[: self._n_prompt])
            if self._guesser is None:
                self._speculation = None
                return
        n_left = self._decoding.sampling.max_tokens - self._decoding.n_generated
        n_rows_max = min(n_rows_max, self._engine.settings.n_ctx - self._position)
        self._guesses = self._guesser.guess(self._history[: self._n_history], n_rows_max, n_left)

    def next_span(self, n_rows: int) -> Span:
        slot = self._engine.take_slot(self.request_id)
        data = self._history[self._position : min(self._position + n_rows, self._n_history)]
        self._n_running = len(data)
        if self._guesses:
            rows = np.concatenate([data, np.array(self._guesses, np.int32)])
            return Span(slot, self._position, rows, "rows")
        is_last = self._position + len(data) == self._n_history
        return Span(slot, self._position, data, "logits" if is_last else "none")

    def _name(self) -> Name:
        return Name((), self._history[: self._position])

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        self._position += self._n_running
        is_prefill = self._n_history == self._n_given
        guesses, self._guesses = self._guesses, ()
        decoded: list[Decoded] = []
        if self._position == self._n_history:
            started = time.perf_counter()
            decoded = self._decode(np.atleast_2d(result), guesses)
            compute_s += time.perf_counter() - started
        if self._guesser is not None and decoded:
            self._guesser.judged(len(guesses), len(decoded) - 1)
        if is_prefill:  # its last row may bring tokens along that were guessed
            self._prefill_s += compute_s / max(1, len(decoded))
            self._decode_s += compute_s - compute_s / max(1, len(decoded))
        else:
            self._decode_s += compute_s
        for i, one in enumerate(decoded):
            self._position += i > 0
            self._give(one, compute_s / len(decoded))
        if len(decoded) <= len(guesses) and not self.is_finished:
            self._engine.empty(self.request_id, self._position)

    def _decode(self, logits: np.ndarray, guesses: tuple[int, ...]) -> list[Decoded]:
        """The token that follows the last one, and one more for every guess that was right."""
        decoded: list[Decoded] = []
        for i, row in enumerate(logits):
            one = self._decoding.decode(row, self._decoding.n_generated)
            decoded.append(one)
            if one.finish_reason is not None or guesses[i : i + 1] != (one.token,):
                break
        return decoded

    def _give(self, decoded: Decoded, compute_s: float) -> None:
        finish = decoded.finish_reason
        if finish is None and self._position >= self._engine.settings.n_ctx:
            finish = "length"
        self._send(token_message(self.call_id, self.request_id, decoded, compute_s, finish), decoded.text)
        if finish is not None:
            self._finish(finish)
            return
        self._history[self._n_history] = decoded.token
        self._n_history += 1

    def restart(self) -> None:
        self._position = 0
        self._has_begun = False
        self._guesses = ()

    def cancel(self) -> None:
        self._finish("cancelled")

    def _finish(self, reason: FinishReason) -> None:
        self.is_finished = True
        if self._guesser is not None:
            self._guesser.close()
        if self._position:
            self._engine.empty(self.request_id, self._position)
            self._engine.keep(self.request_id, self._history[: self._position], self._session)
        self._send(
            GenerateDone(
                id=self.call_id,
                request_id=self.request_id,
                finish_reason=reason,
                n_prompt_tokens=self._n_prompt,
                n_cached_tokens=self._n_cached,
                n_generated=self._decoding.n_generated - (self._n_given - self._n_prompt),
                prefill_s=self._prefill_s,
                decode_s=self._decode_s,
                guesses=self._guesser.counts if self._guesser is not None else (),
            )
        )
        if self._speculation is not None:
            self._speculation.answered(self._history[: self._n_prompt], self._decoding.tokens)
            if self._guesser is not None and self._is_alone and reason != "cancelled":
                self._speculation.try_out_after(
                    self.route(), self._engine.take_slot(self.request_id), self._history[: self._position]
                )
        self._engine.release(self.request_id)


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
    )
