"""The projectors of this node's models: attached by hand, found beside a model, or fetched.

A projector counts once a grey picture has been encoded with it, in a process of its own; what a damaged or
hostile file does there costs that process, and the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import trio

from swarmllm.errors import BadModel, SwarmLLMError, WorkerDied
from swarmllm.models import Catalogue, CatalogueEntry
from swarmllm.models.projector import Projector, found_beside, read_projector, require_fit
from swarmllm.models.projector_store import ProjectorStore
from swarmllm.workerpool import ModelFile, WorkerPool

log = logging.getLogger("swarmllm.node")

Progress = Callable[[int, int], None]


class ProjectorKeeper:
    def __init__(self, catalogue: Catalogue, pool: WorkerPool, store: ProjectorStore) -> None:
        self._catalogue = catalogue
        self._pool = pool
        self._store = store
        self._settling = trio.Lock()
        """A file that has come is nobody's until it is attached."""

    async def attach(self, entry: CatalogueEntry, path: Path, report: Progress) -> CatalogueEntry:
        """A file that its user gives, which stays where it is. `report` is called in a thread. Raises
        BadModel."""
        return await self._attach(entry, await trio.to_thread.run_sync(read_projector, path, report))

    async def attach_read(self, entry: CatalogueEntry, projector: Projector) -> CatalogueEntry:
        """`attach` for one that was hashed already."""
        return await self._attach(entry, projector)

    async def attach_found(self, entry: CatalogueEntry, report: Progress) -> CatalogueEntry:
        """The projector that lies beside the model, where there is one that can be used."""
        if entry.is_stored or (found := await trio.to_thread.run_sync(found_beside, entry.path)) is None:
            return entry
        try:
            return await self.attach(entry, found, report)
        except SwarmLLMError as error:
            log.warning("%s takes no pictures: %s", entry.name, error.message)
            return entry

    async def take_in(self, entry: CatalogueEntry, path: Path) -> CatalogueEntry:
        """A file that was fetched becomes the store's, and is attached; one that cannot be used is deleted.
        Raises BadModel."""
        async with self._settling:
            projector = await trio.to_thread.run_sync(self._store.take_in, path)
            try:
                return await self._attach(entry, projector)
            except SwarmLLMError:
                await trio.to_thread.run_sync(self._delete_unused)
                raise

    async def tidy(self) -> None:
        """Delete what was fetched and belongs to no model any more."""
        async with self._settling:
            await trio.to_thread.run_sync(self._delete_unused)

    def _delete_unused(self) -> None:
        self._store.keep([entry.projector for entry in self._catalogue.list() if entry.projector is not None])

    async def _attach(self, entry: CatalogueEntry, projector: Projector) -> CatalogueEntry:
        """After a picture has been encoded with it. Raises BadModel."""
        require_fit(projector, entry.manifest)
        try:
            await self._pool.check_projector(ModelFile.of(entry), projector)
        except WorkerDied as error:
            file = Path(projector.path).name
            raise BadModel(f"{file} is damaged: a grey picture ended its process", field="mmproj") from error
        return await trio.to_thread.run_sync(self._catalogue.attach, entry.model_id, projector)
