"""The daemon's side of all its workers: one per model, started when it is needed, replaced when it dies.

A method that names a model by `ModelFile` may start its worker; one that takes a model id only talks to a
worker that is there. Workers are never restarted on their own: a model nobody asks for need not be in
memory, and a model that kills its worker does so once per request instead of in a loop.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from swarmllm.errors import SwarmLLMError, WorkerDied, WorkerError
from swarmllm.models.layers import LayerRange
from swarmllm.supervision import Outcome, detach, supervise
from swarmllm.workerpool.calls import TokenStream
from swarmllm.workerpool.cut_check import CutCheckCalls
from swarmllm.workerpool.forward_result import ForwardResult, Hidden, checked_tensor, forward_result
from swarmllm.workerpool.holding_calls import HoldingCalls
from swarmllm.workerpool.hosted import HostedModel, inode_of
from swarmllm.workerpool.prefix_calls import PrefixCalls
from swarmllm.workerpool.process import SOCKET_PATH_MAX
from swarmllm.workerpool.resume_calls import ResumeCalls
from swarmllm.workerpool.ring import NO_RING, RingCalls, RingHint
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm.workerpool.statistics import WorkerStatistics, statistics_of
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.frames import Payload
from swarmllm_proto.ipc import (
    AnyDaemonMessage,
    AnyWorkerMessage,
    ApplyTemplate,
    CancelRequest,
    Detokenize,
    Done,
    Effort,
    Embed,
    Forward,
    Generate,
    LayerResult,
    Opened,
    PrefixManifestUpdate,
    ReleaseRequestKv,
    Sampling,
    Text,
    Token,
    Tokenize,
    Tokens,
)
from swarmllm_proto.tensors import encode_tensor

log = logging.getLogger("swarmllm.workerpool")

# -P: the folder the daemon was started in must not provide modules to its workers.
WORKER_COMMAND = (sys.executable, "-P", "-m", "swarmllm_workers")
SOCKET_NAME_LENGTH = 32
"""More than a socket's file name has."""

T = TypeVar("T")
TokenIds = npt.NDArray[np.int32]


class WorkerPool(HoldingCalls, PrefixCalls, CutCheckCalls, ResumeCalls):
    def __init__(
        self,
        settings: WorkerSettings,
        runtime_dir: Path,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`runtime_dir`: for sockets, made private. `on_change` is called after `models()` has changed."""
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._command = command
        self._on_change = on_change or (lambda: None)
        self._hosted = {}
        self._manifests = {}
        self._nursery: trio.Nursery | None = None
        self._socket_dir = runtime_dir
        self.ring = RingCalls(self._worker)
        self.on_notice: Callable[[str, AnyWorkerMessage, memoryview], None] | None = None
        """(model id, message, payload): what a worker says unasked."""

    def __repr__(self) -> str:
        return f"<WorkerPool {list(self._hosted.values())}>"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[WorkerPool]:
        """The pool works inside this block; when it is left, every worker has ended."""
        temporary = await trio.to_thread.run_sync(self._prepare_folders)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                supervise(nursery, "idle workers", self._stop_idle_workers)
                try:
                    yield self
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._hosted.clear()
            self._manifests.clear()
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    async def info(self, model: ModelFile) -> Opened:
        """What the worker found in the file."""
        hosted = self._host(model)
        await hosted.ready()
        assert hosted.opened is not None
        return hosted.opened

    async def tokenize(
        self,
        model: ModelFile,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
    ) -> TokenIds:
        """i32 [n]. `text` as it is, or `messages` through the chat template. Raises InvalidRequest
        (template) ..."""
        worker = await self._ready(model)
        message = Tokenize(id=worker.new_id(), text=text, messages=messages, tools=tools, effort=effort)
        _, payload = await worker.call(message, Tokens, timeout_s=self._settings.call_timeout_s)
        return checked_tensor(payload, "tokens", np.dtype(np.int32), 1)

    async def apply_template(
        self,
        model: ModelFile,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
    ) -> str:
        """The text that a model would read. Raises InvalidRequest (template) ..."""
        worker = await self._ready(model)
        message = ApplyTemplate(id=worker.new_id(), messages=messages, tools=tools, effort=effort)
        return await self._text(worker, message)

    async def detokenize(self, model: ModelFile, tokens: TokenIds) -> str:
        """i32 [n] -> text with special tokens; broken characters at its ends are replaced."""
        worker = await self._ready(model)
        return await self._text(worker, Detokenize(id=worker.new_id()), encode_tensor(tokens))

    async def embed(self, model: ModelFile, tokens: TokenIds) -> Hidden:
        """i32 [n] -> f32 [n, n_embd]."""
        worker = await self._ready(model)
        _, payload = await worker.call(
            Embed(id=worker.new_id()),
            LayerResult,
            payload=encode_tensor(tokens),
            timeout_s=self._settings.call_timeout_s,
        )
        return checked_tensor(payload, "embeddings", np.dtype(np.float32), 2, n_rows=len(tokens))

    async def forward(
        self,
        model: ModelFile,
        *,
        request_id: str,
        layers: LayerRange,
        position: int,
        tensor: npt.NDArray[Any],
        want: Literal["hidden", "none", "token", "normed"],
        sampling: Sampling | None = None,
        n_prompt_tokens: int = 0,
        generated: tuple[int, ...] = (),
        ring: RingHint = NO_RING,
    ) -> ForwardResult:
        """Run `layers` over f32 [n, n_embd], or over i32 [n] token ids where they begin at 0. `generated`:
        with the first token that is wanted here, those that came before it elsewhere.

        The tensor must not be changed before this returns. Raises ContextFull, WorkerError, WorkerDied,
        DeadlineExceeded.
        """
        worker = await self._host(model).worker_for(request_id, position)
        message = Forward(
            id=worker.new_id(),
            request_id=request_id,
            start=layers.start,
            end=layers.end,
            position=position,
            want=want,
            sampling=sampling,
            n_prompt_tokens=n_prompt_tokens,
            generated=generated,
            seat=ring.seat,
            timings=ring.timings,
            waited_s=ring.waited_s,
            resent=ring.resent,
        )
        expects = Token if want == "token" else LayerResult
        result, payload = await worker.call(
            message,
            (expects, Done) if ring.resent else (expects,),
            payload=encode_tensor(tensor),
            timeout_s=self._settings.call_timeout_s,
        )
        return forward_result(result, payload, want=want, n_rows=len(tensor))

    @asynccontextmanager
    async def generate(
        self,
        model: ModelFile,
        *,
        request_id: str,
        tokens: TokenIds,
        sampling: Sampling,
        n_generated: int = 0,
        session: str = "",
    ) -> AsyncIterator[TokenStream]:
        """The whole decode loop in the worker, which must hold every layer: iterate the stream for (Token,
        bytes). The last `n_generated` of `tokens` are no prompt but what came of it elsewhere.

        Leaving early cancels it. Raises as `forward` does, from the iteration.
        """
        worker = await self._ready(model)
        message = Generate(
            id=worker.new_id(),
            request_id=request_id,
            sampling=sampling,
            n_generated=n_generated,
            session_id=session,
        )
        stream = await worker.generate(
            message, encode_tensor(tokens), silence_s=self._settings.call_timeout_s
        )
        try:
            yield stream
        finally:
            if not stream.finished:
                await self._cancel(worker, request_id)
            worker.forget(message.id)

    async def release(self, model_id: str, request_id: str) -> None:
        """Free the request's KV; unknown requests and absent workers are fine."""
        self._forget(model_id, request_id)
        worker = self._worker(model_id)
        if worker is not None:
            await worker.call(
                ReleaseRequestKv(id=worker.new_id(), request_id=request_id),
                Done,
                timeout_s=self._settings.call_timeout_s,
            )

    async def cancel(self, model_id: str, request_id: str) -> None:
        """Stop the request wherever it is and free its KV; unknown requests and absent workers are fine."""
        self._forget(model_id, request_id)
        worker = self._worker(model_id)
        if worker is not None:
            await worker.call(
                CancelRequest(id=worker.new_id(), request_id=request_id),
                Done,
                timeout_s=self._settings.call_timeout_s,
            )

    async def serves_without_file(self, model: ModelFile) -> bool:
        """Whether layers of the model run on although its file is gone, or another one is in its place: what
        a worker has mapped stays until it is unmapped."""
        hosted = self._hosted.get(model.model_id)
        if hosted is None or hosted.worker is None or not hosted.wanted:
            return False
        return hosted.inode != await trio.to_thread.run_sync(inode_of, model.path)

    async def forget(self, model_id: str) -> None:
        """The model is no longer this node's: end its worker and keep nothing of it. Layers of it that were
        wanted are so no longer. Goes on when the caller leaves."""
        if self._hosted.get(model_id) is not None:
            await self._background(partial(self._drop, model_id)).wait()

    async def _drop(self, model_id: str) -> None:
        hosted = self._hosted.get(model_id)
        if hosted is None:
            return
        await hosted.close("was stopped because its model was removed")
        # Somebody may have asked for the model again meanwhile.
        if self._hosted.get(model_id) is hosted and hosted.is_empty:
            del self._hosted[model_id]
            self._manifests.pop(model_id, None)
        self._on_change()

    async def stop(self, model_id: str) -> None:
        """End the model's worker; what was loaded stays wanted, and the next call loads it again."""
        hosted = self._hosted.get(model_id)
        if hosted is not None:
            await hosted.stop("was stopped")

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        return tuple(statistics_of(hosted) for hosted in self._hosted.values())

    def _forget(self, model_id: str, request_id: str) -> None:
        if (hosted := self._hosted.get(model_id)) is not None:
            hosted.forget(request_id)

    async def _ready(self, model: ModelFile) -> Worker:
        return await self._host(model).ready()

    async def _text(self, worker: Worker, message: AnyDaemonMessage, payload: Payload = b"") -> str:
        _, data = await worker.call(message, Text, payload=payload, timeout_s=self._settings.call_timeout_s)
        return str(data, "utf-8", "replace")

    def _worker(self, model_id: str) -> Worker | None:
        hosted = self._hosted.get(model_id)
        return hosted.worker if hosted is not None else None

    def _host(self, model: ModelFile) -> HostedModel:
        hosted = self._hosted.get(model.model_id)
        if hosted is None:
            if self._nursery is None:
                raise WorkerError("the worker pool is not running")
            hosted = HostedModel(
                model,
                self._settings,
                self._command,
                self._socket_dir,
                self._nursery,
                partial(self._notice, model.model_id),
            )
            self._hosted[model.model_id] = hosted
        else:
            # The same content, perhaps added again from another place, or more is known of its cuts.
            hosted.model = model
        return hosted

    def _notice(self, model_id: str, worker: Worker, message: AnyWorkerMessage, payload: memoryview) -> None:
        # What the last worker had to say concerns nobody any more.
        if worker is not self._worker(model_id):
            return
        if isinstance(message, PrefixManifestUpdate):
            self._keep_manifest(model_id, worker, message, payload)
        elif self.on_notice is not None:
            self.on_notice(model_id, message, payload)

    def _background(self, work: Callable[[], Awaitable[T]]) -> Outcome[T]:
        if self._nursery is None:
            raise WorkerError("the worker pool is not running")
        return detach(self._nursery, "worker", work, closed=WorkerDied("the worker pool was closed"))

    async def _cancel(self, worker: Worker, request_id: str) -> None:
        if not worker.alive or self._nursery is None:
            return

        async def work() -> None:
            message = CancelRequest(id=worker.new_id(), request_id=request_id)
            await worker.call(message, Done, timeout_s=self._settings.call_timeout_s)

        cancelling = detach(self._nursery, "worker", work)
        deadline = trio.current_time() + self._settings.cancel_timeout_s
        with trio.CancelScope(deadline=deadline, shield=True):
            try:
                await cancelling.wait()
            except SwarmLLMError as error:
                log.info("a request could not be cancelled: %s", error.message)

    async def _stop_idle_workers(self) -> None:
        limit_s = self._settings.idle_timeout_s
        while True:
            await trio.sleep(limit_s / 4)
            for model_id, hosted in list(self._hosted.items()):
                idle_since = hosted.idle_since
                if idle_since is not None and trio.current_time() - idle_since >= limit_s:
                    await hosted.stop("was stopped because it was idle")
                if hosted.is_empty:
                    del self._hosted[model_id]
                    self._manifests.pop(model_id, None)

    def _prepare_folders(self) -> Path | None:
        """Make the folders; returns one to remove in the end, where sockets need a shorter path."""
        self._settings.cache_dir.mkdir(parents=True, exist_ok=True)
        self._runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._runtime_dir.chmod(0o700)
        self._socket_dir = self._runtime_dir
        if len(os.fsencode(self._runtime_dir.absolute())) + SOCKET_NAME_LENGTH <= SOCKET_PATH_MAX:
            return None
        self._socket_dir = Path(tempfile.mkdtemp(prefix="swarmllm-"))
        return self._socket_dir
