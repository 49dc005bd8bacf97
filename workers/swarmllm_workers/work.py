"""Work in progress: forwards and generations, one span at a time.

A work offers the span it wants to run next and takes the result; it never runs anything itself. The runner
decides whose span is next, today one after the other in turn; a planner that puts the spans of several
works into one batch needs only `next_span` and `accept`.

Prefill goes in chunks of 128 rows, so that messages are served and other requests make a step between two
chunks.
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
from swarmllm_workers.decoding import Decoded, Decoding
from swarmllm_workers.engine import Engine, Route
from swarmllm_workers.errors import CallError
from swarmllm_workers.segment import Span, Want

PREFILL_CHUNK: Final = 128
"""Rows."""

Send = Callable[..., None]
"""`send(message, payload=b"")` to the daemon."""


class Work(Protocol):
    call_id: int
    request_id: str
    is_finished: bool

    def next_span(self) -> tuple[Route, Span]:
        """What to run now. Raises CallError."""

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        """The result of that span. Raises CallError."""

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
        self._message = message
        self._data = data
        self._engine = engine
        self._decodings = decodings
        self._send = send
        self._route: Route | None = None
        self._n_done = 0
        self._compute_s = 0.0
        self._hidden: list[np.ndarray] = []

    def next_span(self) -> tuple[Route, Span]:
        message = self._message
        if self._route is None:
            self._route = self._engine.route(message.request_id, message.start, message.end)
        slot = self._engine.take_slot(message.request_id)
        rows = self._data[self._n_done : self._n_done + PREFILL_CHUNK]
        is_last = self._n_done + len(rows) == len(self._data)
        want: Want = "hidden" if message.want == "hidden" else "none"
        if message.want == "token" and is_last:
            want = "logits"
        return self._route, Span(slot, message.position + self._n_done, rows, want)

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        message = self._message
        self._compute_s += compute_s
        self._n_done += min(PREFILL_CHUNK, len(self._data) - self._n_done)
        is_last = self._n_done == len(self._data)
        if message.want == "hidden":
            self._hidden.append(result if is_last and not self._hidden else result.copy())
        if not is_last:
            return
        if message.want == "token":
            self._sample(result)
        else:
            hidden = self._hidden[0] if len(self._hidden) == 1 else None
            if hidden is None and self._hidden:
                hidden = np.concatenate(self._hidden)
            payload: Any = encode_tensor(hidden) if hidden is not None else b""
            self._send(
                LayerResult(id=message.id, request_id=message.request_id, compute_s=self._compute_s), payload
            )
        self.is_finished = True

    def _sample(self, logits: np.ndarray) -> None:
        message = self._message
        decoding = self._decodings.get(message.request_id)
        if decoding is None or (message.sampling is not None and message.sampling != decoding.sampling):
            if message.sampling is None:
                raise CallError(
                    "bad_message", "the first forward that wants a token brings the sampling", "sampling"
                )
            decoding = self._decodings[message.request_id] = Decoding(
                self._engine.vocabulary, message.sampling
            )
        index = message.position + len(self._data) - message.n_prompt_tokens
        started = time.perf_counter()
        decoded = decoding.decode(logits, index)
        self._compute_s += time.perf_counter() - started
        self._send(token_message(message.id, message.request_id, decoded, self._compute_s), decoded.text)

    def cancel(self) -> None:
        self.is_finished = True
        raise CallError("engine", "the request was cancelled", "request_id")


class GenerateWork:
    """A Generate: the prompt in chunks, then a token per step."""

    def __init__(self, message: Generate, tokens: np.ndarray, engine: Engine, send: Send) -> None:
        self.call_id = message.id
        self.request_id = message.request_id
        self.is_finished = False
        self._prompt = tokens
        self._engine = engine
        self._send = send
        self._decoding = Decoding(engine.vocabulary, message.sampling)
        self._route: Route | None = None
        self._position = 0
        self._next: np.ndarray = tokens[:0]
        self._prefill_s = 0.0
        self._decode_s = 0.0

    def next_span(self) -> tuple[Route, Span]:
        if self._route is None:
            self._route = self._engine.route(self.request_id, 0, self._engine.n_layers)
            n_ctx = self._engine.settings.n_ctx
            if len(self._prompt) > n_ctx:
                raise CallError(
                    "context_full",
                    f"the prompt has {len(self._prompt)} tokens, the context {n_ctx} (n_ctx)",
                    "payload",
                )
        slot = self._engine.take_slot(self.request_id)
        if self._position < len(self._prompt):
            data = self._prompt[self._position : self._position + PREFILL_CHUNK]
            is_last = self._position + len(data) == len(self._prompt)
            return self._route, Span(slot, self._position, data, "logits" if is_last else "none")
        return self._route, Span(slot, self._position, self._next, "logits")

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        n_prompt = len(self._prompt)
        is_prefill = self._position < n_prompt
        self._position += min(PREFILL_CHUNK, n_prompt - self._position) if is_prefill else 1
        if self._position < n_prompt:
            self._prefill_s += compute_s
            return
        started = time.perf_counter()
        decoded = self._decoding.decode(result, self._decoding.n_generated)
        compute_s += time.perf_counter() - started
        if is_prefill:
            self._prefill_s += compute_s
        else:
            self._decode_s += compute_s
        finish = decoded.finish_reason
        if finish is None and self._position >= self._engine.settings.n_ctx:
            finish = "length"
        self._send(token_message(self.call_id, self.request_id, decoded, compute_s, finish), decoded.text)
        self._next = np.array([decoded.token], np.int32)
        if finish is not None:
            self._finish(finish)

    def cancel(self) -> None:
        self._finish("cancelled")

    def _finish(self, reason: FinishReason) -> None:
        self.is_finished = True
        self._engine.release(self.request_id)
        self._send(
            GenerateDone(
                id=self.call_id,
                request_id=self.request_id,
                finish_reason=reason,
                n_prompt_tokens=len(self._prompt),
                n_generated=self._decoding.n_generated,
                prefill_s=self._prefill_s,
                decode_s=self._decode_s,
            )
        )


def token_message(
    call_id: int, request_id: str, decoded: Decoded, compute_s: float, finish: FinishReason | None = None
) -> Token:
    return Token(
        id=call_id,
        request_id=request_id,
        index=decoded.index,
        token=decoded.token,
        finish_reason=finish or decoded.finish_reason,
        compute_s=compute_s,
    )
