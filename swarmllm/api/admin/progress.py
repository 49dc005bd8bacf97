"""Work that reports progress while an HTTP response shows it: hashing a model, loading layers.

Like a `BufferedGeneration`, it runs beside the response in the request's nursery and ends with it. Only the
latest report counts, so a reader that is slower than the work skips some and never holds it up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Literal, TypeVar

import trio

from swarmllm.api.http.errors import as_swarmllm_error
from swarmllm.errors import SwarmLLMError

T = TypeVar("T")
WorkKind = Literal["add", "load", "unload", "verify"]
Report = Callable[..., None]
"""(done_bytes, total_bytes, phase=""), where the work has several."""


class ProgressStream(Generic[T]):
    """`async for done_bytes, total_bytes, phase in work`; then `result` or `error` is set."""

    def __init__(
        self,
        task: Callable[[Report], Awaitable[T]],
        *,
        kind: WorkKind,
        subject: str,
        from_thread: bool = False,
    ) -> None:
        """`subject`: the name of the model that is worked on."""
        self.kind = kind
        self.subject = subject
        self.latest = (0, 0, "")
        """The last report, for others who look on."""
        self.result: T | None = None
        self.error: SwarmLLMError | None = None
        self._task = task
        self._from_thread = from_thread
        self._scope = trio.CancelScope()
        self._changed = trio.Event()
        self._progress: tuple[int, int, str] | None = None
        self._finished = False

    async def run(self) -> None:
        report: Report = self._report
        if self._from_thread:
            token = trio.lowlevel.current_trio_token()

            def report(done_bytes: int, total_bytes: int, phase: str = "") -> None:
                token.run_sync_soon(self._report, done_bytes, total_bytes, phase, idempotent=True)

        try:
            with self._scope:
                self.result = await self._task(report)
        except Exception as error:
            self.has_failed(error)
        finally:
            self._finished = True
            self._changed.set()

    def has_failed(self, error: Exception) -> None:
        """The reader gets the error."""
        self.error = as_swarmllm_error(error)
        self._finished = True
        self._changed.set()

    @property
    def is_running(self) -> bool:
        return not self._finished

    def stop(self) -> None:
        self._scope.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, int, str]]:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            progress, self._progress = self._progress, None
            if progress is not None:
                yield progress
            if self._finished:
                return

    def _report(self, done_bytes: int, total_bytes: int, phase: str = "") -> None:
        self._progress = self.latest = (done_bytes, total_bytes, phase)
        self._changed.set()


class ProgressStreams:
    """The work that runs now, for readers of /api/events."""

    def __init__(self) -> None:
        self._streams: list[ProgressStream[Any]] = []

    def add(self, work: ProgressStream[Any]) -> None:
        self._streams = [*self.running(), work]

    def running(self) -> list[ProgressStream[Any]]:
        return [work for work in self._streams if work.is_running]
