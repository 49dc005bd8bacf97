"""Loads a model because a request asks for it, and drops it when it has not been asked for some time.

Only where nobody decided otherwise: the whole model is on this disk, none of its layers is loaded here, the
connected nodes do not hold all of them, and no placement manages it. What a person loads stays until a person
unloads it. Where memory is short, models go that were loaded for requests and are idle, the one that was not
asked for longest first.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

import trio

from swarmllm.errors import SwarmLLMError, WorkerError
from swarmllm.models import CatalogueEntry, LayerRange
from swarmllm.node.keep_alive import KeepAlive
from swarmllm.workerpool import LoadOptions

log = logging.getLogger("swarmllm.node")

OUT_OF_MEMORY = "out_of_memory"
"""The kind of a worker's refusal."""


class OnDemand:
    def __init__(
        self,
        *,
        loaded: Callable[[str], tuple[LayerRange, ...]],
        load: Callable[[CatalogueEntry, LoadOptions], Awaitable[object]],
        drop: Callable[[CatalogueEntry], Awaitable[object]],
        is_complete: Callable[[CatalogueEntry], bool],
        managed: Callable[[], Collection[str]],
        may_load: Callable[[], bool],
    ) -> None:
        """`loaded`: what is loaded here of a model, by its id. `is_complete`: a request for it would find a
        pipeline. `managed`: ids of the models that placement loads and drops. `may_load`: whether anything
        is loaded on demand now."""
        self._loaded = loaded
        self._load = load
        self._drop = drop
        self._is_complete = is_complete
        self._managed = managed
        self._may_load = may_load
        self._kept = KeepAlive()
        self._entries: dict[str, CatalogueEntry] = {}
        self._changing = trio.Lock()
        """One load or drop at a time: each is fitted into the memory that the others leave."""
        self._going: set[str] = set()
        """Models that are being dropped: they look loaded until they are gone."""
        self._changed = trio.Event()

    @asynccontextmanager
    async def using(
        self, entry: CatalogueEntry, options: LoadOptions, keep_s: float, said_s: float | None = None
    ) -> AsyncIterator[None]:
        """For the time of a request. `keep_s`: how long the model stays afterwards if it has to be loaded;
        `said_s`: what the request says about that. Raises what loading raises."""
        model_id = entry.model_id
        if self._is_wanted(entry) or model_id in self._going:
            async with self._changing:
                if self._is_wanted(entry):
                    await self._bring(entry, options, keep_s)
                self._kept.begin(model_id, said_s)
        else:
            self._kept.begin(model_id, said_s)
        try:
            yield
        finally:
            self._kept.end(model_id, trio.current_time())
            self._changed.set()

    def forget(self, model_id: str) -> None:
        """A person has loaded or unloaded it."""
        self._kept.forget(model_id)
        self._entries.pop(model_id, None)

    def expires_in_s(self, model_id: str) -> float | None:
        """None: it does not."""
        return self._kept.expires_in_s(model_id, trio.current_time())

    async def run(self) -> None:
        """Drop what was not asked for long enough, until cancelled."""
        while True:
            with trio.move_on_at(self._kept.next_s()):
                await self._changed.wait()
            self._changed = trio.Event()
            for model_id in self._kept.expired(trio.current_time()):
                await self._let_go(model_id)

    def _is_wanted(self, entry: CatalogueEntry) -> bool:
        return (
            self._may_load()
            and not self._loaded(entry.model_id)
            and entry.model_id not in self._managed()
            and not entry.absent(entry.manifest.tensors)
            and not self._is_complete(entry)
        )

    async def _bring(self, entry: CatalogueEntry, options: LoadOptions, keep_s: float) -> None:
        log.info("loading %s, which a request asks for", entry.name)
        while True:
            try:
                await self._load(entry, options)
            except WorkerError as error:
                idle = self._kept.idle_longest()
                if error.kind != OUT_OF_MEMORY or idle is None or idle == entry.model_id:
                    raise
                log.info("unloading %s to make room for %s", self._entries[idle].name, entry.name)
                await self._drop_now(idle)
            else:
                break
        self._entries[entry.model_id] = entry
        self._kept.loaded(entry.model_id, keep_s, trio.current_time())
        self._changed.set()

    async def _let_go(self, model_id: str) -> None:
        async with self._changing:
            # Somebody may have asked for it while another one went.
            if self._kept.is_expired(model_id, trio.current_time()):
                log.info("unloading %s, which nobody has asked for", self._entries[model_id].name)
                await self._drop_now(model_id)

    async def _drop_now(self, model_id: str) -> None:
        entry = self._entries[model_id]
        self.forget(model_id)
        self._going.add(model_id)
        try:
            await self._drop(entry)
        except SwarmLLMError as error:
            log.info("%s is not unloaded: %s", entry.name, error.message)
        finally:
            self._going.discard(model_id)
