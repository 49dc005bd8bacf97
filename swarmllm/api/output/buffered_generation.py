"""Buffers the text of a generation for the HTTP response that streams it.

The response must not set the pace of the model: a slot in a worker is worth more than a slow reader's
comfort. So each streamed request has two tasks in one nursery: `BufferedGeneration.run`, which drains the
generation into a buffer of text, and the writer of the response, which takes the buffered text. Text that
came while the writer was busy becomes one chunk, and between two chunks at least MIN_FLUSH_INTERVAL_S pass,
which nobody can see and which keeps a model of a thousand tokens per second from spending its core on HTTP.
The buffer is bounded by the model's context.

The task lives in the request's nursery (see `request_tasks`), not in the handler: between a handler's return
and the first byte of its response there is a moment that belongs to neither, and a client may leave just
then.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import trio

from swarmllm.api.http.errors import as_swarmllm_error
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.origin.generation import GeneratedText, Generation, PromptScores
from swarmllm_proto.ipc import TokenLogprob

MIN_FLUSH_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that a few tokens added."""

    text: str
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Per token, where they were asked for."""
    prompt: PromptScores | None = None
    """What comes before the first token, where it was asked for."""
    pieces: tuple[GeneratedText, ...] = ()
    """The same by token, those included that added no text."""

    @staticmethod
    def of(pieces: Iterable[GeneratedText], prompt: PromptScores | None = None) -> TextDelta:
        pieces = tuple(pieces)
        return TextDelta(
            "".join(piece.text for piece in pieces),
            tuple(piece.logprobs for piece in pieces if piece.logprobs),
            prompt,
            pieces,
        )

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.prompt)


class BufferedGeneration:
    def __init__(
        self,
        opening: AbstractAsyncContextManager[Generation],
        changed: trio.lowlevel.ParkingLot | None = None,
    ) -> None:
        """`changed`: where readers of several generations park."""
        self._opening = opening
        self._pieces: list[GeneratedText] = []
        self._has_text = False
        """One of them has something to tell."""
        self._prompt: PromptScores | None = None
        self._changed = trio.lowlevel.ParkingLot() if changed is None else changed
        self.started = trio.Event()
        """The first token is there, or never will be."""
        self._ended = trio.Event()
        self._last_take_s = float("-inf")
        self._scope = trio.CancelScope()
        self.generation: Generation | None = None
        self.error: SwarmLLMError | None = None
        self.finished = False
        """The last text has been fed, or `error` is set."""

    async def run(self) -> None:
        """Open the generation and drain it. Failures end up in `error`; only cancellation leaves."""
        try:
            with self._scope:
                async with self._opening as generation:
                    self.generation, self._prompt = generation, generation.prompt
                    self.started.set()
                    async for piece in generation:
                        self._pieces.append(piece)
                        if piece.text or piece.logprobs:
                            self._has_text = True
                            self._changed.unpark_all()
                    # Not after closing: the reader need not wait for other nodes to tidy up.
                    self._finish()
        except Exception as error:
            self.has_failed(error)

    @property
    def has_pieces(self) -> bool:
        return self._has_text

    @property
    def has_changed(self) -> bool:
        return self.finished or self._has_text

    def stop(self) -> None:
        """The reader is gone; a generation that has ended by itself is left to close in peace."""
        if not self.finished:
            self._scope.cancel()

    async def wait(self, timeout_s: float) -> bool:
        """Whether there is text, the end or an error within the time."""
        if self.has_changed:
            return True
        with trio.move_on_after(timeout_s):
            while not self.has_changed:
                await self._changed.park()
            return True
        return False

    async def take(self, timeout_s: float) -> TextDelta | None:
        """All that has gathered, nothing at the end, None when nothing came within `timeout_s`."""
        flush_at_s = self._last_take_s + MIN_FLUSH_INTERVAL_S
        if not self.finished and trio.current_time() < flush_at_s:
            # Before the wait for text, which is then over at once where tokens come faster than that.
            with trio.move_on_at(flush_at_s):
                await self._ended.wait()
        if not await self.wait(timeout_s):
            return None
        self._last_take_s = trio.current_time()
        return self.collect()

    def collect(self) -> TextDelta:
        """All that has gathered, at once."""
        pieces, self._pieces, self._has_text = self._pieces, [], False
        prompt, self._prompt = self._prompt, None
        return TextDelta.of(pieces, prompt)

    def _finish(self) -> None:
        self.finished = True
        self.started.set()
        self._ended.set()
        self._changed.unpark_all()

    def has_failed(self, error: Exception) -> None:
        """The reader gets the error, if it has not got the end yet."""
        failure = as_swarmllm_error(error)
        if not self.finished:
            self.error = failure
            self._finish()
