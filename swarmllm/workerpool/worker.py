"""One running worker: sends calls, receives answers, and reports once how the worker ended.

However a worker ends (it exits, is killed, closes the socket, sends nonsense, falls silent, is asked to
leave), `run` notices, reaps the process, and only then fails the pending calls: the error tells how the
worker ended and its last lines of output.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import trio

from swarmllm.errors import DeadlineExceeded, InvalidRequest, WorkerDied
from swarmllm.workerpool.calls import Call, OnProgress, Pending, TokenStream
from swarmllm.workerpool.channel import Channel, ChannelClosed
from swarmllm.workerpool.process import WorkerProcess, describe_exit
from swarmllm_proto.codec import encode_ipc
from swarmllm_proto.errors import BadMessage, FrameTooLarge
from swarmllm_proto.frames import Payload
from swarmllm_proto.ipc import (
    AnyDaemonMessage,
    AnyWorkerMessage,
    Bye,
    Done,
    Error,
    Generate,
    Ready,
    ReleaseRequestKv,
    Shutdown,
    WorkerMessage,
)

log = logging.getLogger("swarmllm.workerpool")

EXIT_GRACE_S = 0.25
"""A worker that has closed its socket is about to exit by itself; waiting a moment tells us how. Short: its
callers wait too."""
PROBE_REQUEST_ID = "-"
"""Of no request: releasing it does nothing, and the answer shows that the worker still reads its socket."""

Answer = TypeVar("Answer", bound=WorkerMessage)


OnNotice = Callable[["Worker", AnyWorkerMessage, memoryview], None]
"""What a worker says unasked: (worker, message, payload)."""


class Worker:
    def __init__(
        self,
        process: WorkerProcess,
        *,
        start_timeout_s: float,
        stop_timeout_s: float,
        on_notice: OnNotice = lambda worker, message, payload: None,
    ) -> None:
        assert process.connection is not None
        self._process = process
        self._channel = Channel(process.connection, self._on_message)
        self._stop_timeout_s = stop_timeout_s
        self._on_notice = on_notice
        self._pending: dict[int, Pending] = {}
        self._last_id = 0
        self._last_heard_at = trio.current_time()
        self.alive = True
        """It takes calls. Read several times for each call, where a property costs two Python functions."""
        self._ending = trio.Event()
        self._end_reason = ""
        self.was_asked_to_leave = False
        """Its end is no failure."""
        self._grace_s = 0.0
        self._had_to_kill = False
        self.ended = trio.Event()
        self.last_used_at = trio.current_time()
        self.n_threads = 0
        """With which it computes, as it was told."""
        self._ready = Call(Ready, start_timeout_s)
        self._pending[0] = self._ready
        self._stream_began = trio.Event()

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        socket_dir: Path,
        *,
        start_timeout_s: float,
        stop_timeout_s: float,
        on_notice: OnNotice = lambda worker, message, payload: None,
    ) -> Worker:
        """A connected worker, which somebody must `run`. Raises WorkerDied."""
        process = await WorkerProcess.spawn(command, socket_dir, start_timeout_s)
        return cls(
            process, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s, on_notice=on_notice
        )

    def __repr__(self) -> str:
        state = "alive" if self.alive else "ending"
        return f"<Worker {self.pid} {state} pending={len(self._pending)}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    @property
    def n_calls(self) -> int:
        return self._last_id

    @property
    def bytes_sent(self) -> int:
        return self._channel.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._channel.bytes_received

    @property
    def exit_summary(self) -> str:
        """How it ended, once it has."""
        if self._had_to_kill:
            return self._process.exit_summary(
                f"{self._end_reason or 'closed its socket'} and had to be killed"
            )
        how = describe_exit(self._process.exit_status)
        return self._process.exit_summary(f"{self._end_reason} and {how}" if self._end_reason else how)

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def run(self) -> None:
        """Until the worker has ended and is reaped. Cancelling it stops the worker."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_closed, self._channel.receive)
                nursery.start_soon(self._until_closed, self._channel.flush)
                nursery.start_soon(self._process.log_stderr)
                nursery.start_soon(self._until_exit)
                nursery.start_soon(self._look_for_silence)
                await self._ending.wait()
                nursery.cancel_scope.cancel()
        except Exception as error:
            self.kill(f"could not be talked to ({type(error).__name__})")
            raise
        finally:
            with trio.CancelScope(shield=True):
                if self.alive:
                    self._leave("was stopped with the pool")
                self._had_to_kill = await self._process.reap(self._grace_s)
                self._close_after_exit()

    async def ready(self) -> Ready:
        """The worker's first message. Raises WorkerDied."""
        if not await self._ready.wait():
            self.kill("connected, but did not get ready in time")
            await self.ended.wait()
        ready, _ = self._ready.answer()
        assert isinstance(ready, Ready)
        return ready

    async def call(
        self,
        message: AnyDaemonMessage,
        expects: type[Answer] | tuple[type[Answer], ...],
        *,
        payload: Payload = b"",
        timeout_s: float,
        on_progress: OnProgress | None = None,
        descriptor: int | None = None,
    ) -> tuple[Answer, memoryview]:
        """Send a call and wait for its answer. A cancelled caller leaves no trace but the work it caused.
        `descriptor`: an open file that goes with it.

        Raises WorkerDied; DeadlineExceeded where the worker lives but did not get to it; what the worker's
        Error became.
        """
        call = Call(expects, timeout_s, on_progress)
        sent_at = await self._send(message, payload, call, descriptor)
        try:
            if not await call.wait():
                silent_s = trio.current_time() - max(self._last_heard_at, sent_at)
                if silent_s < timeout_s:
                    raise DeadlineExceeded(
                        f"the worker is busy: no answer to {type(message).__name__} within {timeout_s:g} s"
                    )
                self.kill(f"did not answer {type(message).__name__} within {timeout_s:g} s")
                await self.ended.wait()
        finally:
            self._pending.pop(message.id, None)
        answer, answer_payload = call.answer()
        assert isinstance(answer, expects)
        return answer, answer_payload

    async def generate(self, message: Generate, payload: Payload, *, silence_s: float) -> TokenStream:
        """Start a Generate; `forget` it when it is over. Raises WorkerDied."""

        async def probe() -> None:
            # A long prompt on a slow machine is computed without a word; a hung worker does not answer.
            await self.call(
                ReleaseRequestKv(id=self.new_id(), request_id=PROBE_REQUEST_ID),
                Done,
                timeout_s=silence_s,
            )

        stream = TokenStream(silence_s, probe)
        await self._send(message, payload, stream)
        self._stream_began.set()
        return stream

    def forget(self, call_id: int) -> None:
        """Drop what may still come for a call."""
        self._pending.pop(call_id, None)

    def kill(self, reason: str) -> None:
        """End it now; `ended` tells when it is gone. `reason` has the worker as its subject."""
        self._end(reason, grace_s=0.0)

    async def stop(self, reason: str) -> None:
        """Ask it to leave, wait, kill it if it does not."""
        if self.alive:
            self._leave(reason)
        await self.ended.wait()

    async def _send(
        self, message: AnyDaemonMessage, payload: Payload, pending: Pending, descriptor: int | None = None
    ) -> float:
        try:
            pieces = encode_ipc(message, payload)
        except FrameTooLarge as error:
            # Refused here, before a byte of it is written: the worker could only hang up.
            raise InvalidRequest(f"the request is too large for a worker: {error}") from error
        if self.alive:
            await self._channel.room()
        if not self.alive:
            await self.ended.wait()
            raise self._death()
        self._pending[message.id] = pending
        if descriptor is None:
            self._channel.send(pieces)
        else:
            await self._channel.hand_over(pieces, descriptor)
        self.last_used_at = trio.current_time()
        return self.last_used_at

    def _on_message(self, message: AnyWorkerMessage, payload: memoryview) -> None:
        self._last_heard_at = trio.current_time()
        if isinstance(message, Bye):
            self._end("said goodbye", grace_s=self._stop_timeout_s)
            return
        if isinstance(message, Error) and message.fatal:
            self._end(f"gave up ({message.kind}: {message.message})", grace_s=self._stop_timeout_s)
        pending = self._pending.get(message.id)
        if pending is not None:
            if pending.receive(message, payload):
                del self._pending[message.id]
        elif not message.id:
            self._on_notice(self, message, payload)
        elif message.id > self._last_id:
            raise BadMessage("id", f"{message.id} was never given to a call")

    async def _until_closed(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except ChannelClosed as error:
            self._end(str(error), grace_s=EXIT_GRACE_S)

    async def _look_for_silence(self) -> None:
        while True:
            self._stream_began = trio.Event()
            now_s = trio.current_time()
            streams = (each for each in self._pending.values() if isinstance(each, TokenStream))
            with trio.move_on_at(min((each.look(now_s) for each in streams), default=math.inf)):
                await self._stream_began.wait()

    async def _until_exit(self) -> None:
        await self._process.wait()
        # What it said last may still lie in the socket; the end of that is the end.
        with trio.move_on_after(EXIT_GRACE_S):
            await self._ending.wait()
        self._end("", grace_s=0.0)

    def _leave(self, reason: str) -> None:
        if self.alive:
            self.was_asked_to_leave = True
            self._channel.send(encode_ipc(Shutdown(id=self.new_id())))
            self._end(reason, grace_s=self._stop_timeout_s)

    def _end(self, reason: str, *, grace_s: float) -> None:
        # The first reason is the cause; what follows from it is not.
        if self.alive:
            self.alive = False
            self._end_reason = reason
            self._grace_s = grace_s
            self._ending.set()

    def _close_after_exit(self) -> None:
        self._channel.abandon()
        log.info("worker has ended: %s", self.exit_summary)
        for pending in self._pending.values():
            pending.fail(self._death())
        self._pending.clear()
        self.ended.set()

    def _death(self) -> WorkerDied:
        return WorkerDied(self.exit_summary)
