"""The part of the pool that loads and unloads layers, and says what is held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarmllm.errors import Conflict
from swarmllm.models.layers import LayerRange
from swarmllm.supervision import Outcome
from swarmllm.workerpool.calls import OnProgress
from swarmllm.workerpool.hosted import HostedModel
from swarmllm.workerpool.settings import (
    AS_CONFIGURED,
    LoadOptions,
    ModelFile,
    ModelMemory,
    WorkerSettings,
)

T = TypeVar("T")
Then = Callable[[], Awaitable[object]]


class HoldingCalls(ABC):
    _settings: WorkerSettings
    _hosted: dict[str, HostedModel]
    _on_change: Callable[[], None]

    @abstractmethod
    def _host(self, model: ModelFile) -> HostedModel: ...

    @abstractmethod
    def _background(self, work: Callable[[], Awaitable[T]]) -> Outcome[T]: ...

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
                held = await self._host(model).load(layers, progress, options)
                if then is not None:
                    await then()
                return held
            finally:
                self._on_change()

        return await self._background(work).wait()

    async def unload(
        self,
        model_id: str,
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
            hosted = self._hosted.get(model_id)
            if hosted is None:
                raise Conflict("no layers of this model are loaded here", field="layers")
            try:
                held = await hosted.unload(layers, progress)
                if then is not None:
                    await then()
                return held
            finally:
                self._on_change()

        return await self._background(work).wait()

    def memory(self, model_id: str) -> ModelMemory:
        hosted = self._hosted.get(model_id)
        return hosted.memory if hosted else ModelMemory()

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        """The model's layers here, in order; a stage may be any part of one range that respects the cut
        alignment."""
        hosted = self._hosted.get(model_id)
        return hosted.wanted if hosted is not None else ()

    def models(self) -> dict[str, tuple[LayerRange, ...]]:
        """Every model of which layers are to be served here, whether or not its worker is up at this
        moment."""
        return {model_id: hosted.wanted for model_id, hosted in self._hosted.items() if hosted.wanted}

    def loaded_with(self, model_id: str) -> LoadOptions | None:
        """What counts for a model that is loaded here, every option said."""
        hosted = self._hosted.get(model_id)
        return LoadOptions.of(hosted.settings) if hosted is not None and hosted.wanted else None

    def context_sizes(self) -> dict[str, int]:
        """KV cells (n_ctx) of every model of which layers are to be served here."""
        return {model_id: hosted.settings.n_ctx for model_id, hosted in self._hosted.items() if hosted.wanted}
