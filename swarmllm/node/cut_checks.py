"""When a model's cuts are tried: as soon as this node has the whole file of one whose architecture is not in
the table, which is when it is added, at the latest when a part of it is to be loaded.

The verdict goes into the catalogue, so that is once per model and version of the engine.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.models import Catalogue, CatalogueEntry
from swarmllm.models.manifest import needs_check, with_verdict
from swarmllm.workerpool import ModelFile, WorkerPool
from swarmllm.workerpool.cut_check import engine_version
from swarmllm_proto.identifiers import ModelId

log = logging.getLogger("swarmllm.node")


class CutChecks:
    def __init__(self, pool: WorkerPool, catalogue: Catalogue) -> None:
        self._pool = pool
        self._catalogue = catalogue
        self._locks: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    def forget(self, model_id: ModelId) -> None:
        """The model is no longer known here."""
        if model_id in self._locks and not self._locks[model_id].locked():
            del self._locks[model_id]

    @staticmethod
    def is_due(entry: CatalogueEntry) -> bool:
        """Whether the entry may say more about its cuts once it is tried."""
        tensors = entry.manifest.tensors
        return needs_check(entry.manifest, engine_version()) and not entry.absent(tensors)

    async def ensure(self, entry: CatalogueEntry, progress: Callable[[int, int], None]) -> CatalogueEntry:
        """The entry with what is known of its cuts, tried now where that is due. `progress` is called on the
        trio thread. Where it cannot be tried now, the entry stays as it is."""
        if not self.is_due(entry):
            return entry
        async with self._locks[entry.model_id]:
            entry = await trio.to_thread.run_sync(self._catalogue.get, entry.model_id)
            if not self.is_due(entry):
                return entry
            try:
                verdict = await self._pool.cuts.check(ModelFile.of(entry), progress)
            except SwarmLLMError as error:
                log.warning("where %s may be cut cannot be tried now: %s", entry.name, error.message)
                return entry
            manifest = with_verdict(
                entry.manifest, verdict.cut_alignment, verdict.whole_reason, engine_version()
            )
            log.info("%s: %s", entry.name, verdict.whole_reason or f"cuts every {verdict.cut_alignment}")
            return await trio.to_thread.run_sync(self._catalogue.revise, entry.model_id, manifest)
