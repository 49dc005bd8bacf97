"""Loads and unloads the layers of this node's workers, and lists the loaded ones."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from swarmllm.errors import Conflict, DeadlineExceeded, WorkerError
from swarmllm.memory_info import memory_bytes
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.calls import OnProgress
from swarmllm.workerpool.hosted import inode_of
from swarmllm.workerpool.hosted_models import HostedModels
from swarmllm.workerpool.settings import (
    AS_CONFIGURED,
    LoadOptions,
    ModelFile,
    ModelMemory,
)
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import Cut, Done

log = logging.getLogger("swarmllm.workerpool")

Then = Callable[[], Awaitable[object]]


class HeldLayers:
    def __init__(self, hosts: HostedModels, on_change: Callable[[], None]) -> None:
        """`on_change` is called after `models()` has changed."""
        self._hosts = hosts
        self._on_change = on_change

    async def load(
        self,
        model: ModelFile,
        layers: LayerRange,
        progress: OnProgress | None = None,
        options: LoadOptions = AS_CONFIGURED,
        then: Then | None = None,
    ) -> tuple[LayerRange, ...]:
        """Make `layers` runnable; returns all ranges held now. Goes on when the caller leaves, `then`
        included, which follows when they are.

        `progress`: (bytes done, bytes in all), called on the trio thread. `options` hold until the model's
        last layer is unloaded; raises Conflict where layers of it are loaded with other ones, BadModel,
        WorkerError, WorkerDied, InvalidRequest (options that exclude each other).
        """

        async def work() -> tuple[LayerRange, ...]:
            try:
                held = await self._hosts.of(model).load(layers, progress, options)
                if then is not None:
                    await then()
                return held
            finally:
                self._on_change()

        return await self._hosts.background(work).wait()

    async def unload(
        self,
        model_id: ModelId,
        layers: LayerRange | None = None,
        progress: OnProgress | None = None,
        then: Then | None = None,
    ) -> tuple[LayerRange, ...]:
        """Drop `layers` (None: all); returns the ranges still held. The process leaves with its last range.
        Goes on when the caller leaves, `then` included, which follows when they are dropped.

        `progress`: (bytes given back and read anew, bytes in all). Raises Conflict where none of them is
        loaded, WorkerError, WorkerDied.
        """

        async def work() -> tuple[LayerRange, ...]:
            hosted = self._hosts.get(model_id)
            if hosted is None:
                raise Conflict("no layers of this model are loaded here", field="layers")
            try:
                held = await hosted.unload(layers, progress)
                if then is not None:
                    await then()
                return held
            finally:
                self._on_change()

        return await self._hosts.background(work).wait()

    def cut(self, model_id: ModelId, layers: LayerRange, *, if_idle: bool = False) -> None:
        """Have segments made of exactly these layers, a part of what is loaded, so that a request for them
        need not wait; goes on in the background. `if_idle`: only where that moves no rows. What fails is
        tried again by the request."""
        hosted = self._hosts.get(model_id)
        worker = None if hosted is None else hosted.worker
        if hosted is None or worker is None or layers in hosted.wanted:
            return
        message = Cut(id=worker.new_id(), start=layers.start, end=layers.end, if_idle=if_idle)

        async def work() -> None:
            try:
                await worker.call(message, Done, timeout_s=hosted.settings.load_timeout_s)
            except (WorkerError, DeadlineExceeded) as error:
                log.debug("layers %s of %s are not cut ahead: %s", layers, model_id, error.message)

        self._hosts.background(work)

    def memory(self, model_id: ModelId) -> ModelMemory:
        hosted = self._hosts.get(model_id)
        return hosted.memory if hosted else ModelMemory()

    def free_bytes(self) -> int | None:
        """What the machine can still give: what the system says is available, without the weights that
        workers have mapped, which it counts. None: nobody says."""
        available_bytes = memory_bytes()[1]
        return max(0, available_bytes - self._hosts.mapped_bytes) if available_bytes else None

    def loaded(self, model_id: ModelId) -> tuple[LayerRange, ...]:
        """The model's layers here, in order; a stage may be any part of one range that respects the cut
        alignment."""
        hosted = self._hosts.get(model_id)
        return hosted.wanted if hosted is not None else ()

    def models(self) -> dict[ModelId, tuple[LayerRange, ...]]:
        """Every model of which layers are to be served here, whether or not its worker is up at this
        moment."""
        return {model_id: hosted.wanted for model_id, hosted in self._hosts.items() if hosted.wanted}

    def loaded_with(self, model_id: ModelId) -> LoadOptions | None:
        """What counts for a model that is loaded here, every option said."""
        hosted = self._hosts.get(model_id)
        return LoadOptions.of(hosted.settings) if hosted is not None and hosted.wanted else None

    def context_sizes(self) -> dict[ModelId, int]:
        """KV cells (n_ctx) of every model of which layers are to be served here."""
        return {model_id: hosted.settings.n_ctx for model_id, hosted in self._hosts.items() if hosted.wanted}

    def kernel_class(self, model_id: ModelId) -> str:
        """The kernel class that is announced of a model that is loaded here (see `ShardAnnounce`); "": it
        equals no other node's."""
        hosted = self._hosts.get(model_id)
        return hosted.kernel_class if hosted is not None and hosted.wanted else ""

    async def serves_without_file(self, model: ModelFile) -> bool:
        """Whether layers of the model run on although its file is gone, or another one is in its place: what
        a worker has mapped stays until it is unmapped."""
        hosted = self._hosts.get(model.model_id)
        if hosted is None or hosted.worker is None or not hosted.wanted:
            return False
        return hosted.inode != await trio.to_thread.run_sync(inode_of, model.path)

    async def forget(self, model_id: ModelId) -> None:
        """The model is no longer this node's: end its worker and keep nothing of it. Layers of it that were
        wanted are so no longer. Goes on when the caller leaves."""

        async def work() -> None:
            if (hosted := self._hosts.get(model_id)) is not None:
                await hosted.close("was stopped because its model was removed")
                # Unless somebody has asked for the model again meanwhile.
                self._hosts.drop_if_empty(model_id)
                self._on_change()

        if self._hosts.get(model_id) is not None:
            await self._hosts.background(work).wait()
