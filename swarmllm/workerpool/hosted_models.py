"""The models that have, or may get, a worker on this node, by id. Only this object adds and removes them.

The pool's parts (layers, prefixes, repairs, links, cuts) share this object and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import trio

from swarmllm.errors import DeadlineExceeded, WorkerDied, WorkerError
from swarmllm.supervision import Outcome, detach, spawn, supervise
from swarmllm.workerpool.gpus import KnownGpus
from swarmllm.workerpool.hosted import HostedModel
from swarmllm.workerpool.process import SOCKET_PATH_MAX
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm.workerpool.thread_shares import ThreadShares
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import AnyWorkerMessage, AtWork, Done, UseThreads

log = logging.getLogger("swarmllm.workerpool")

SOCKET_NAME_LENGTH: Final = 32
"""More than a socket's file name has."""

T = TypeVar("T")
OnNotice = Callable[[ModelId, Worker, AnyWorkerMessage, memoryview], None]
"""What a worker that is up says unasked: (model id, worker, message, payload)."""


class HostedModels:
    """Iterates over the hosted models."""

    def __init__(self, settings: WorkerSettings, runtime_dir: Path, command: Sequence[str]) -> None:
        """`runtime_dir`: for sockets, made private. `command`: runs a worker."""
        self.settings = settings
        self.command = command
        self.socket_dir = runtime_dir
        self.gpus = KnownGpus(is_used=settings.n_gpu_layers != 0)
        self.on_notice: OnNotice = lambda model_id, worker, message, payload: None
        self._runtime_dir = runtime_dir
        self._hosted: dict[ModelId, HostedModel] = {}
        self._nursery: trio.Nursery | None = None
        self._threads: ThreadShares[Worker] = ThreadShares()
        self.when_idle: list[Callable[[], Awaitable[None]]] = []
        """Called now and then: workers of another kind may have become idle."""

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(tuple(self._hosted.values()))

    def items(self) -> tuple[tuple[ModelId, HostedModel], ...]:
        """By model id."""
        return tuple(self._hosted.items())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Workers may start inside this block; when it is left, every one has ended."""
        temporary = await trio.to_thread.run_sync(self._prepare_folders)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                supervise(nursery, "idle workers", self._stop_idle_workers)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._hosted.clear()
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    def of(self, model: ModelFile) -> HostedModel:
        """The hosted model of this file, made where there is none. Raises WorkerError outside `running`."""
        hosted = self._hosted.get(model.model_id)
        if hosted is None:
            hosted = HostedModel(
                model,
                self.settings,
                self.command,
                self.socket_dir,
                self.nursery(),
                self,
            )
            self._hosted[model.model_id] = hosted
        else:
            # The same content, perhaps added again from another place, or more is known of its cuts.
            hosted.model = model
        return hosted

    def get(self, model_id: ModelId) -> HostedModel | None:
        return self._hosted.get(model_id)

    def worker(self, model_id: ModelId) -> Worker | None:
        """The one that is up."""
        hosted = self._hosted.get(model_id)
        return hosted.worker if hosted is not None else None

    async def ready(self, model: ModelFile) -> Worker:
        """A worker with everything loaded that is wanted of the model. Raises WorkerDied, BadModel,
        WorkerError."""
        return await self.of(model).ready()

    def background(self, work: Callable[[], Awaitable[T]]) -> Outcome[T]:
        """Work that goes on when those who wait for it leave. Raises WorkerError outside `running`."""
        closed = WorkerDied("the worker pool was closed")
        return detach(self.nursery(), "worker", work, closed=closed)

    @property
    def mapped_bytes(self) -> int:
        """Of weights, that workers have mapped or are mapping: the system counts them as available, and they
        are not."""
        return sum(hosted.mapped_bytes for hosted in self)

    def mapped_beside(self, hosted: HostedModel) -> int:
        return self.mapped_bytes - hosted.mapped_bytes

    def drop_if_empty(self, model_id: ModelId) -> None:
        hosted = self._hosted.get(model_id)
        if hosted is not None and hosted.is_empty:
            del self._hosted[model_id]

    def nursery(self) -> trio.Nursery:
        """Of all workers. Raises WorkerError outside `running`."""
        if self._nursery is None:
            raise WorkerError("the worker pool is not running")
        return self._nursery

    def notice(
        self, model_id: ModelId, worker: Worker, message: AnyWorkerMessage, payload: memoryview
    ) -> None:
        """A worker says something that answers no call."""
        # What the last worker had to say concerns nobody any more.
        if worker is not self.worker(model_id):
            return
        if isinstance(message, AtWork):
            n_threads = self._hosted[model_id].settings.n_threads
            self._tell_threads(self._threads.note(worker, n_threads, is_at_work=message.is_at_work))
        else:
            self.on_notice(model_id, worker, message, payload)

    def worker_ended(self, worker: Worker) -> None:
        self._tell_threads(self._threads.forget(worker))

    def _tell_threads(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.alive and self._nursery is not None:
                spawn(self._nursery, "worker", self._tell_share, worker)

    async def _tell_share(self, worker: Worker) -> None:
        # Of several such tasks any may be the first; all tell the latest.
        n_threads = self._threads.share(worker)
        if n_threads is None:
            return
        message = UseThreads(id=worker.new_id(), n_threads=n_threads)
        try:
            await worker.call(message, Done, timeout_s=self.settings.load_timeout_s)
            worker.n_threads = n_threads
        except (WorkerError, DeadlineExceeded) as error:
            log.debug("worker %d was not told its threads: %s", worker.pid, error)

    async def _stop_idle_workers(self) -> None:
        limit_s = self.settings.idle_timeout_s
        while True:
            await trio.sleep(limit_s / 4)
            for model_id, hosted in self.items():
                idle_since = hosted.idle_since
                if idle_since is not None and trio.current_time() - idle_since >= limit_s:
                    await hosted.stop("was stopped because it was idle")
                self.drop_if_empty(model_id)
            for stop_idle in self.when_idle:
                await stop_idle()

    def _prepare_folders(self) -> Path | None:
        """Make the folders; returns one to remove in the end, where sockets need a shorter path."""
        self.settings.cache_dir.mkdir(parents=True, exist_ok=True)
        self._runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._runtime_dir.chmod(0o700)
        self.socket_dir = self._runtime_dir
        if len(os.fsencode(self._runtime_dir.absolute())) + SOCKET_NAME_LENGTH <= SOCKET_PATH_MAX:
            return None
        self.socket_dir = Path(tempfile.mkdtemp(prefix="swarmllm-"))
        return self.socket_dir
