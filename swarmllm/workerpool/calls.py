"""Calls to a worker that wait for their answer, and the errors that a worker's Error messages become."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from swarmllm.errors import (
    BadModel,
    ContextFull,
    GrammarTooComplex,
    InvalidRequest,
    Overloaded,
    SwarmLLMError,
    WorkerError,
)
from swarmllm.supervision import Outcome
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.ipc import AnyWorkerMessage, Error, GenerateDone, Progress, Token, WorkerMessage

log = logging.getLogger("swarmllm.workerpool")


_MAPPED: dict[str, type[SwarmLLMError]] = {
    "context_full": ContextFull,
    "bad_model": BadModel,
    "cannot_cut": BadModel,
    "bad_template": InvalidRequest,
    "bad_picture": InvalidRequest,
    "no_slot": Overloaded,
    "no_room": Overloaded,
}
"""By kind; every other kind is a WorkerError that carries it."""

_FIELDS = {"bad_template": "messages", "bad_picture": "messages", "context_full": "messages"}
"""The field of the caller's request to blame where the worker names none."""


_SAMPLING = {
    "sampling.grammar": "grammar",
    "sampling.json_schema": "response_format",
    "sampling.logit_bias": "logit_bias",
    "sampling.repeat_penalty": "repeat_penalty",
}
"""What only the worker can check, and the field of the caller's request that it came from."""
OnProgress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def worker_fault(error: Error) -> SwarmLLMError:
    field = error.field or _FIELDS.get(error.kind)
    if error.kind == "too_complex":
        return GrammarTooComplex(error.message, field=_SAMPLING.get(error.field, field))
    if error.kind == "bad_message" and error.field in _SAMPLING:
        return InvalidRequest(error.message, field=_SAMPLING[error.field])
    mapped = _MAPPED.get(error.kind)
    if mapped is not None:
        return mapped(error.message, field=field)
    return WorkerError(f"{error.kind}: {error.message}", kind=error.kind, field=field)


class Pending(Protocol):
    def receive(self, message: AnyWorkerMessage, payload: memoryview) -> bool:
        """Whether this was the last message. Raises BadMessage for one that has no place here."""
        ...

    def fail(self, error: SwarmLLMError) -> None: ...


class Call:
    """One message to the worker, one answer; Progress may come in between."""

    def __init__(
        self,
        expects: type[WorkerMessage] | tuple[type[WorkerMessage], ...],
        timeout_s: float,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._expects = expects
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._outcome: Outcome[tuple[WorkerMessage, memoryview]] = Outcome()
        self._scope = trio.CancelScope()

    async def wait(self) -> bool:
        """False where the answer did not come in time; Progress extends it."""
        if not self._outcome.is_over:
            self._scope.deadline = trio.current_time() + self._timeout_s
            with self._scope:
                await self._outcome.over()
        return self._outcome.is_over

    def answer(self) -> tuple[WorkerMessage, memoryview]:
        """After `wait`: one of the types that it expects, with its payload. Raises what the worker's Error,
        or its death, made of the call."""
        return self._outcome.result()

    def receive(self, message: AnyWorkerMessage, payload: memoryview) -> bool:
        if isinstance(message, self._expects):
            self._outcome.succeed((message, payload))
        elif isinstance(message, Error):
            self._outcome.fail(worker_fault(message))
        elif isinstance(message, Progress):
            self._scope.deadline = trio.current_time() + self._timeout_s
            self._tell(message)
            return False
        else:
            expects = self._expects if isinstance(self._expects, tuple) else (self._expects,)
            expected = " or ".join(each.__name__ for each in expects)
            raise BadMessage("type", f"{type(message).__name__} answers a call that expects {expected}")
        return True

    def fail(self, error: SwarmLLMError) -> None:
        self._outcome.fail(error)

    def _tell(self, message: Progress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(message.done_bytes, message.total_bytes)
        except Exception:
            # The caller that watched has gone; the load itself is nobody's to spoil.
            log.debug("progress is no longer wanted", exc_info=True)
            self._on_progress = None


class TokenStream:
    """A running Generate: iterate for (Token, UTF-8 bytes to show); `done` is set when the iteration ends
    by itself.

    Tokens wait here while the reader is slower than the model; `max_tokens` bounds how many. Raises what
    the worker, or its death, made of the request.
    """

    def __init__(self, silence_s: float, on_silence: Callable[[], Awaitable[None]]) -> None:
        """`on_silence` is awaited whenever nothing has come for `silence_s`, and raises to give up. The
        worker calls `look` when that is due: a deadline for each token would cost more than all else."""
        self._silence_s = silence_s
        self._waits_since_s: float | None = None
        """None: its reader does not wait."""
        self._is_silent = False
        self._on_silence = on_silence
        self._tokens: deque[tuple[Token, bytes]] = deque()
        self._arrived = trio.Event()
        self._error: SwarmLLMError | None = None
        self.done: GenerateDone | None = None

    @property
    def finished(self) -> bool:
        """Whether the worker has nothing more to say about it."""
        return self.done is not None or self._error is not None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> tuple[Token, bytes]:
        # Not a whole checkpoint: there are never more tokens than were read at once, and a turn of the event
        # loop costs as much as everything else that is done for a token.
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._tokens:
            if self._error is not None:
                raise self._error
            if self.done is not None:
                raise StopAsyncIteration
            self._arrived = trio.Event()
            self._waits_since_s = trio.current_time()
            try:
                await self._arrived.wait()
            finally:
                self._waits_since_s = None
            is_silent, self._is_silent = self._is_silent, False
            if is_silent and not self._tokens and not self.finished:
                await self._on_silence()
        return self._tokens.popleft()

    def look(self, now_s: float) -> float:
        """When to look again, in seconds of trio's clock."""
        if self._waits_since_s is None:
            return now_s + self._silence_s
        if now_s >= self._waits_since_s + self._silence_s:
            self._is_silent = True
            self._arrived.set()
            return now_s + self._silence_s
        return self._waits_since_s + self._silence_s

    def receive(self, message: AnyWorkerMessage, payload: memoryview) -> bool:
        if isinstance(message, Token):
            self._tokens.append((message, bytes(payload)))
        elif isinstance(message, GenerateDone):
            self.done = message
        elif isinstance(message, Error):
            self._error = worker_fault(message)
        elif not isinstance(message, Progress):
            raise BadMessage("type", f"{type(message).__name__} answers a Generate")
        self._arrived.set()
        return self.finished

    def fail(self, error: SwarmLLMError) -> None:
        self._error = error
        self._arrived.set()
