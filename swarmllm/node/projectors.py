"""The projectors of this node's models: attached by hand, found beside a model, or fetched.

A projector is used once a grey picture has been encoded with it, in a process of its own; a damaged or
hostile file costs only that process, and is then refused.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from swarmllm.errors import BadModel, Conflict, SwarmLLMError, WorkerDied, WorkerError
from swarmllm.models import Catalogue, CatalogueEntry
from swarmllm.models.projector import Projector, found_beside, read_projector, require_fit
from swarmllm.models.projector_names import other_model_named
from swarmllm.models.projector_store import ProjectorStore
from swarmllm.node.views import ProjectorTrouble
from swarmllm.transfer import ModelTransfer
from swarmllm.workerpool import ModelFile, WorkerPool
from swarmllm_proto.identifiers import Digest, ModelId

log = logging.getLogger("swarmllm.node")

Progress = Callable[[int, int], None]


REFUSED_MAX: Final = 256
LAYERS_MMPROJ: Final = "mmproj"
LAYERS_ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class WantedShards:
    """The shards of a load or an unload, as people write them."""

    layers: str | None
    """START:END; None: all."""
    has_layers: bool
    has_projector: bool

    @classmethod
    def parse(cls, text: str | None) -> WantedShards:
        """`mmproj`: the projector alone; `all`: it and all layers; else layers alone."""
        if text == LAYERS_MMPROJ:
            return cls(None, has_layers=False, has_projector=True)
        if text == LAYERS_ALL:
            return cls(None, has_layers=True, has_projector=True)
        return cls(text, has_layers=True, has_projector=False)


class ProjectorKeeper:
    def __init__(
        self, catalogue: Catalogue, pool: WorkerPool, transfer: ModelTransfer, store: ProjectorStore
    ) -> None:
        self._catalogue = catalogue
        self._pool = pool
        self._transfer = transfer
        self._store = store
        self._settling = trio.Lock()
        """A file that has come is nobody's until it is attached."""
        self._arriving: set[Digest] = set()
        self._refused: dict[Digest, str] = {}
        """What was fetched, could not be used, and why: it is not fetched again until the next start."""
        self._troubles: dict[ModelId, str] = {}
        """Of models whose projector was refused, or could not be opened, the last time that it was tried."""

    def trouble(self, entry: CatalogueEntry) -> ProjectorTrouble | None:
        """None where nothing is known. One that is unloaded is not looked at. Blocking."""
        known = self._troubles.get(entry.model_id, "")
        if entry.projector is not None:
            try:
                entry.projector.check_file()
                require_fit(entry.projector, entry.manifest)
            except BadModel as error:
                known = error.message
        if not known:
            return None
        name = shlex.quote(entry.name)
        remedy = f"give it one that can be used: swarmllm models projector {name} MMPROJ.gguf"
        return ProjectorTrouble(known, remedy)

    def knows_trouble(self, entry: CatalogueEntry) -> bool:
        """Whether there is anything that `trouble` would look at."""
        return entry.projector is not None or entry.model_id in self._troubles

    async def load(self, entry: CatalogueEntry, fetching: Progress) -> CatalogueEntry:
        """Open the model's projector and keep it open, now and after each start; where none is here, it is
        fetched from other nodes, which `fetching` tells of on the trio thread. Raises BadModel, WorkerError,
        NodeUnreachable where nobody gives one, StoreFull."""
        if entry.attached_projector is None:
            entry = await self.fetch(entry, fetching)
        projector = entry.attached_projector
        assert projector is not None
        await self._open(entry, projector)
        return await trio.to_thread.run_sync(self._catalogue.set_projector_state, entry.model_id, "loaded")

    async def unload(self, entry: CatalogueEntry) -> CatalogueEntry:
        """End its process, and encode no more pictures with it here until it is loaded again. Raises Conflict
        where the model has none here."""
        if entry.projector is None:
            raise Conflict(f"no projector of {entry.name} is loaded here.", field="layers")
        entry = await trio.to_thread.run_sync(self._catalogue.set_projector_state, entry.model_id, "unloaded")
        await self._pool.close_projectors(entry.model_id)
        return entry

    async def let_go(self, entry: CatalogueEntry) -> CatalogueEntry:
        """End its process, and forget it; its file is deleted if it was fetched."""
        self._troubles.pop(entry.model_id, None)
        entry = await trio.to_thread.run_sync(self._catalogue.detach, entry.model_id)
        await self._pool.close_projectors(entry.model_id)
        await self.tidy()
        return entry

    async def fetch(self, entry: CatalogueEntry, fetching: Progress) -> CatalogueEntry:
        """The model with the projector that most connected nodes give for it. Raises as `load` does."""

        def part_of(digest: Digest) -> Path:
            if digest in self._refused:
                raise BadModel(self._refused[digest], field="mmproj")
            self._arriving.add(digest)
            arriving.append(digest)
            return self._store.part_of(digest)

        arriving: list[Digest] = []
        try:
            digest, part = await self._transfer.fetch_projector(entry, part_of, fetching)
            try:
                return await self.take_in(entry, part)
            except (BadModel, WorkerError) as error:
                log.warning("a projector for %s, from other nodes: %s", entry.name, error.message)
                self._refused[digest] = error.message
                while len(self._refused) > REFUSED_MAX:
                    del self._refused[next(iter(self._refused))]
                self._arriving.discard(digest)
                await self.tidy()
                raise
        finally:
            self._arriving.difference_update(arriving)

    async def restore(self) -> None:
        """At the start: open what was loaded when the daemon ended."""
        for entry in await trio.to_thread.run_sync(self._catalogue.list):
            if entry.projector is not None and entry.projector_state == "loaded":
                try:
                    await self._open(entry, entry.projector)
                except SwarmLLMError as error:
                    log.warning("the projector of %s is not loaded: %s", entry.name, error.message)

    async def _open(self, entry: CatalogueEntry, projector: Projector) -> None:
        """Raises BadModel, WorkerError."""
        try:
            await self._pool.keep_projector_open(ModelFile.of(entry), projector)
        except WorkerDied as error:
            self._troubles[entry.model_id] = damaged(projector).message
            raise damaged(projector) from error
        except BadModel as error:
            self._troubles[entry.model_id] = error.message
            raise
        self._troubles.pop(entry.model_id, None)

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
            self._troubles[entry.model_id] = error.message
            return entry

    async def take_in(self, entry: CatalogueEntry, path: Path) -> CatalogueEntry:
        """A file that was fetched becomes the store's, and is attached; one that cannot be used is deleted.
        Raises BadModel."""
        async with self._settling:
            try:
                projector = await trio.to_thread.run_sync(self._store.take_in, path)
                return await self._attach(entry, projector)
            except SwarmLLMError as error:
                if entry.attached_projector is None:
                    self._troubles[entry.model_id] = error.message
                await trio.to_thread.run_sync(self._delete_unused)
                raise

    async def forget(self, model_id: ModelId) -> None:
        """Call when a model has been removed."""
        self._troubles.pop(model_id, None)
        await self.tidy()

    async def tidy(self) -> None:
        """Delete what was fetched and belongs to no model any more."""
        async with self._settling:
            await trio.to_thread.run_sync(self._delete_unused)

    def _delete_unused(self) -> None:
        attached = [entry.attached_projector for entry in self._catalogue.list()]
        self._store.keep([each for each in attached if each is not None], self._arriving)

    async def _attach(self, entry: CatalogueEntry, projector: Projector) -> CatalogueEntry:
        """After a picture has been encoded with it. Raises BadModel."""
        require_fit(projector, entry.manifest)
        try:
            await self._pool.check_projector(ModelFile.of(entry), projector)
        except WorkerDied as error:
            raise damaged(projector) from error
        named = await trio.to_thread.run_sync(other_model_named, entry.path, Path(projector.path))
        if named:
            log.warning("%s may see wrongly, with the projector of another model: %s", entry.name, named)
        self._troubles.pop(entry.model_id, None)
        await self._pool.close_projectors(entry.model_id, but=projector.blake3)
        return await trio.to_thread.run_sync(self._catalogue.attach, entry.model_id, projector)


def damaged(projector: Projector) -> BadModel:
    return BadModel(
        f"{Path(projector.path).name} is damaged: a grey picture ended its process", field="mmproj"
    )
