"""A generation that runs beside the HTTP response it feeds.

The response must not set the pace of the model: a slot in a worker is worth more than a slow reader's
comfort. So each streamed request has two tasks in one nursery, the *feed*, which drains the generation into a
buffer of text, and the writer of the response, which takes whatever has gathered. Together they coalesce:
what came while the writer was busy becomes one chunk, and between two chunks at least MIN_FLUSH_INTERVAL_S
pass, which nobody can see and which keeps a model of a thousand tokens per second from spending its core on
HTTP. The buffer is bounded by the model's context.

The feed lives in the request's nursery (see `app.Connection`), not in the handler: between a handler's return
and the first byte of its response there is a moment that belongs to neither, and a client may leave just
then.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import trio

from swarmllm.api.errors import as_swarmllm_error
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.generation import Generation

MIN_FLUSH_INTERVAL_S = 0.01


class Feed:
    def __init__(self, opening: AbstractAsyncContextManager[Generation]) -> None:
        self._opening = opening
        self._texts: list[str] = []
        self._news = trio.Event()
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
                    self.generation = generation
                    async for piece in generation:
                        if piece.text:
                            self._texts.append(piece.text)
                            self._news.set()
                    # Not after closing: the reader need not wait for other nodes to tidy up.
                    self._finish()
        except Exception as error:
            self._fail(error)

    @property
    def has_text(self) -> bool:
        return bool(self._texts)

    def stop(self) -> None:
        """The reader is gone; a generation that has ended by itself is left to close in peace."""
        if not self.finished:
            self._scope.cancel()

    async def wait(self, timeout_s: float) -> bool:
        """Whether there is text, the end or an error within the time."""
        with trio.move_on_after(timeout_s):
            if not self.finished and not self._texts:
                self._news = trio.Event()
                await self._news.wait()
            return True
        return False

    async def take(self, timeout_s: float) -> str | None:
        """All text gathered so far, "" at the end, None when nothing came within `timeout_s`."""
        if not await self.wait(timeout_s):
            return None
        if not self.finished:
            await trio.sleep_until(self._last_take_s + MIN_FLUSH_INTERVAL_S)
        self._last_take_s = trio.current_time()
        texts, self._texts = self._texts, []
        return "".join(texts)

    def _finish(self) -> None:
        self.finished = True
        self._news.set()

    def _fail(self, error: Exception) -> None:
        failure = as_swarmllm_error(error)
        if not self.finished:
            self.error = failure
            self._finish()
