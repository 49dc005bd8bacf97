"""One model on this node: the layers that should be loaded, and the worker that has them loaded, if there is
one.

The *wanted* ranges are stored apart from the process that holds them, so that a model survives its worker:
the next call after a crash finds no worker, starts one and loads the same ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Protocol

import trio
from msgspec import UNSET

from swarmllm.errors import Conflict, WorkerDied
from swarmllm.models.layers import LayerRange, subtract
from swarmllm.supervision import Outcome, detach, spawn
from swarmllm.workerpool.calls import OnProgress
from swarmllm.workerpool.gpus import KnownGpus
from swarmllm.workerpool.settings import (
    AS_CONFIGURED,
    LoadOptions,
    ModelFile,
    ModelMemory,
    WorkerSettings,
)
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import AnyWorkerMessage, KernelChoice, Load, Loaded, Open, Opened, Unload

log = logging.getLogger("swarmllm.workerpool")


class HostingPool(Protocol):
    """The part of the pool that a hosted model uses."""

    gpus: KnownGpus

    def notice(
        self, model_id: ModelId, worker: Worker, message: AnyWorkerMessage, payload: memoryview
    ) -> None:
        """A worker says something that answers no call."""
        ...

    def worker_ended(self, worker: Worker) -> None: ...

    def mapped_beside(self, hosted: HostedModel) -> int:
        """Bytes of weights that the workers of other models have mapped, or are mapping."""
        ...


class HostedModel:
    def __init__(
        self,
        model: ModelFile,
        settings: WorkerSettings,
        command: Sequence[str],
        socket_dir: Path,
        nursery: trio.Nursery,
        host: HostingPool,
    ) -> None:
        self.model = model
        self.wanted: tuple[LayerRange, ...] = ()
        """As the worker told it: in order, apart from each other."""
        self.opened: Opened | None = None
        self.memory = ModelMemory()
        self.kernels: tuple[KernelChoice, ...] = ()
        self.kernel_class = ""
        self.n_gpu_layers = 0
        """The output matrix counts as one."""
        self.n_starts = 0
        self.inode: tuple[int, int] | None = None
        """Device and number of the file that the worker opened."""
        self._homes: dict[str, Worker] = {}
        """The worker in which each request has begun, by its id: sessions do not see that a worker was
        replaced."""
        self.last_end = ""
        """How the last worker ended; empty while none has."""
        self.n_failures = 0
        """Ends of workers that this daemon did not ask for."""
        self.last_failure = ""
        self.settings = settings
        self._configured = settings
        self._command = command
        self._socket_dir = socket_dir
        self._nursery = nursery
        self._host = host
        self._coming_bytes = 0
        self._worker: Worker | None = None
        self._opened_as: tuple[ModelFile, WorkerSettings] | None = None
        self._starting: Outcome[Worker] | None = None
        self._changing = trio.Lock()

    def __repr__(self) -> str:
        ranges = ",".join(map(str, self.wanted)) or "no layers"
        return f"<HostedModel {self.model.model_id[:8]} {ranges} {self._worker}>"

    @property
    def worker(self) -> Worker | None:
        """The worker, where one is up and takes calls."""
        return self._worker if self._worker is not None and self._worker.alive else None

    @property
    def idle_since(self) -> float | None:
        """Since when a worker has been up for nothing; None while it is of use or there is none."""
        worker = self.worker
        if worker is None or self.wanted or worker.n_pending or self._changing.locked():
            return None
        return worker.last_used_at

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lost with this object: no worker, no layers wanted, nothing under way."""
        is_starting = self._starting is not None and not self._starting.is_over
        has_worker = self._worker is not None and not self._worker.ended.is_set()
        return not (self.wanted or has_worker or is_starting or self._changing.locked())

    async def ready(self) -> Worker:
        """The worker, with everything wanted loaded; starts one where there is none.

        Raises WorkerDied, BadModel, WorkerError.
        """
        worker = self.worker
        if worker is not None:
            return worker
        if self._starting is None or self._starting.is_over:
            # Everybody who comes while it starts waits for this one attempt, and shares its failure.
            self._starting = detach(
                self._nursery, "worker", self._start, closed=WorkerDied("the worker pool was closed")
            )
        return await self._starting.wait()

    async def worker_for(self, request_id: str, position: int) -> Worker:
        """The worker for a request's next forward. A request that has begun in another process cannot go on
        in a fresh one, which knows nothing before `position`: raises WorkerDied with that process's end."""
        home = self._homes.get(request_id)
        if position > 0 and home is not None and home is not self.worker:
            await home.ended.wait()
            raise WorkerDied(home.exit_summary)
        worker = await self.ready()
        self._homes[request_id] = worker
        return worker

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._homes.pop(request_id, None)

    async def load(
        self, layers: LayerRange, on_progress: OnProgress | None, options: LoadOptions = AS_CONFIGURED
    ) -> tuple[LayerRange, ...]:
        async with self._changing:
            await self._adopt(options)
            worker = await self.ready()
            self._hold(await self._load(worker, layers, on_progress))
            return self.wanted

    @property
    def mapped_bytes(self) -> int:
        """Of weights: what a worker has mapped, or is about to map as far as it has said so."""
        return self.memory.mapped_bytes + self._coming_bytes

    async def _load(self, worker: Worker, layers: LayerRange, on_progress: OnProgress | None) -> Loaded:
        def progress(done_bytes: int, total_bytes: int) -> None:
            # Another model that is loaded meanwhile must not take the room that this one is on its way to.
            self._coming_bytes = total_bytes
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)

        message = Load(
            id=worker.new_id(),
            start=layers.start,
            end=layers.end,
            mapped_beside_bytes=self._host.mapped_beside(self) or UNSET,
        )
        try:
            loaded, _ = await worker.call(
                message, Loaded, timeout_s=self.settings.load_timeout_s, on_progress=progress
            )
        finally:
            self._coming_bytes = 0
        return loaded

    async def _adopt(self, options: LoadOptions) -> None:
        """Settings last as long as layers are held; a worker without layers is replaced by one that has
        them."""
        if self._starting is not None:
            await self._starting.over()
        chosen = options.applied_to(self.settings if self.wanted else self._configured)
        if self.wanted and chosen != self.settings:
            name = next(
                each.name
                for each in fields(options)
                if getattr(chosen, each.name) != getattr(self.settings, each.name)
            )
            raise Conflict(
                f"layers of this model are loaded with {name} = {getattr(self.settings, name)}: unload it"
                " first, or load with the same",
                field=name,
            )
        self.settings = chosen
        if not self.wanted and self._opened_as != (self.model, chosen):
            await self.stop("was stopped because the model is to be opened anew")

    async def unload(
        self, layers: LayerRange | None, on_progress: OnProgress | None = None
    ) -> tuple[LayerRange, ...]:
        """Drop `layers`, or all. The process leaves with its last range, and its memory with it."""
        async with self._changing:
            if self._starting is not None:
                await self._starting.over()
            dropped = self.wanted if layers is None else (layers,)
            if not any(layers.overlaps(held) for layers in dropped for held in self.wanted):
                raise Conflict(f"layers {layers if layers else '(any)'} are not loaded here", field="layers")
            if not subtract(self.wanted, dropped):
                # Possible without a worker, too: this is the way out for a model that kills its workers.
                given_back = self.memory.weights_bytes
                self.wanted = ()
                self.memory = ModelMemory()
                self.kernels, self.kernel_class, self.n_gpu_layers = (), "", 0
                self.settings = self._configured
                await self.stop("was stopped because its last layers were unloaded")
                if on_progress is not None:
                    on_progress(given_back, given_back)
                return self.wanted
            # The worker knows where the model may be cut, so it has to be there to say no.
            worker = await self.ready()
            for part in dropped:
                message = Unload(id=worker.new_id(), start=part.start, end=part.end)
                loaded, _ = await worker.call(
                    message, Loaded, timeout_s=self.settings.load_timeout_s, on_progress=on_progress
                )
                self._hold(loaded)
            return self.wanted

    async def close(self, reason: str) -> None:
        """Want no layers any more, and end the worker, also one that is starting."""
        async with self._changing:
            if self._starting is not None:
                await self._starting.over()
            self.wanted = ()
            self.memory = ModelMemory()
            self.kernels, self.kernel_class, self.n_gpu_layers = (), "", 0
            self.settings = self._configured
            self._homes.clear()
            await self.stop(reason)

    async def stop(self, reason: str) -> None:
        worker = self.worker
        if worker is not None:
            await worker.stop(reason)

    def _hold(self, loaded: Loaded) -> None:
        self.wanted = tuple(LayerRange(start, end) for start, end in loaded.ranges)
        self._note(loaded)

    def _note(self, loaded: Loaded) -> None:
        self.memory = memory_of(loaded)
        self.kernels, self.kernel_class = loaded.kernels, loaded.kernel_class or ""
        self.n_gpu_layers = loaded.n_gpu_layers or 0
        if loaded.gpus:
            self._host.gpus.note(loaded.gpus)

    async def _start(self) -> Worker:
        settings = self.settings
        if self._worker is not None:
            # Two copies of a model might not fit.
            await self._worker.ended.wait()
        self.n_starts += 1
        worker = await Worker.spawn(
            (*self._command, "--threads", str(settings.n_threads), "--log-level", settings.log_level),
            self._socket_dir,
            start_timeout_s=settings.start_timeout_s,
            stop_timeout_s=settings.stop_timeout_s,
            on_notice=partial(self._host.notice, self.model.model_id),
        )
        worker.n_threads = settings.n_threads
        spawn(self._nursery, "worker", self._run, worker)
        try:
            await worker.ready()
            self._opened_as = self.model, settings
            self.inode = await trio.to_thread.run_sync(inode_of, self.model.path)
            message = Open(
                id=worker.new_id(),
                path=str(self.model.path),
                model_id=self.model.model_id,
                cache_dir=str(settings.segments_of(self.model)),
                owns_path=settings.owns(self.model),
                n_ctx=settings.n_ctx,
                n_slots=settings.n_slots,
                n_threads=settings.n_threads,
                use_mmap=settings.use_mmap,
                n_gpu_layers=settings.n_gpu_layers,
                continuous_batching=settings.continuous_batching,
                prefill_chunk_tokens=settings.prefill_chunk_tokens,
                n_prefixes=settings.n_prefixes,
                prefix_max_bytes=settings.prefix_max_bytes,
                prefix_min_tokens=settings.prefix_min_tokens,
                prefix_ttl_s=settings.prefix_ttl_s,
                session_ttl_s=settings.session_ttl_s,
                tell_prefixes=settings.tell_prefixes,
                prefix_key=settings.prefix_key,
                max_bytes=settings.max_model_bytes,
                kv_type=settings.kv_type,
                flash_attention=settings.flash_attention,
                use_mlock=settings.use_mlock,
                ngram_max_size=settings.ngram_max_size,
                ngram_num_pred_tokens=settings.ngram_num_pred_tokens,
                draft_path=settings.draft_of(self.model),
                speculative_gamma=settings.speculative_gamma,
                swift_gamma=settings.swift_gamma,
                swift_skip_ratio=settings.swift_skip_ratio,
                journal_max_bytes=settings.journal_max_bytes,
                checked_unit=self.model.checked_unit,
                kernels=settings.kernels,
                kernel_timings=str(settings.kernel_timings or ""),
            )
            self.opened, _ = await worker.call(message, Opened, timeout_s=settings.load_timeout_s)
            for layers in self.wanted:
                loaded = await self._load(worker, layers, None)
                self._note(loaded)
        except BaseException:
            worker.kill("could not be brought up")
            raise
        log.info("worker %d serves model %s", worker.pid, self.model.model_id)
        self._worker = worker
        return worker

    async def _run(self, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            self.last_end = worker.exit_summary
            if not worker.was_asked_to_leave:
                self.n_failures += 1
                self.last_failure = worker.exit_summary
            self._host.worker_ended(worker)


def inode_of(path: Path) -> tuple[int, int] | None:
    """None where there is no such file. Blocking."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def memory_of(loaded: Loaded) -> ModelMemory:
    return ModelMemory(loaded.weights_bytes, loaded.kv_bytes, loaded.work_bytes, loaded.mapped_bytes or 0)
