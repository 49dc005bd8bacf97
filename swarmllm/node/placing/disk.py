"""The disk space that may be used for models which are fetched in order to be placed here.

A model whose first bytes came for its placement counts against the budget until it is removed; one that its
user added, pulled or loaded does not, and is not removed here. When a share ends, its fetched layers stay as
long as their room is not needed, because its node may come back. A model without any fetched bytes is removed
at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmllm.config import AutoManageTable
from swarmllm.errors import ModelNotFound, SwarmLLMError
from swarmllm.memory_info import memory_bytes
from swarmllm.models import CatalogueEntry, LayerRange, needed_tensors
from swarmllm.node.model_access import StoredModels
from swarmllm.node.placing.share_book import ShareBook
from swarmllm_proto.identifiers import ModelId

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("swarmllm.node")


class PlacingDisk:
    def __init__(self, budget_bytes: int, book: ShareBook, models: StoredModels) -> None:
        self._budget_bytes = budget_bytes
        self._book = book
        self._models = models
        self._used_bytes = 0
        self._is_to_save = False
        self._arriving_bytes: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        """As of the last look."""
        return max(0, self._budget_bytes - self._used_bytes - sum(self._arriving_bytes.values()))

    async def look(self) -> None:
        """Count what is there."""
        used_bytes = 0
        for model_id in list(self._book.fetched):
            try:
                used_bytes += stored_bytes(await self._models.known(model_id))
            except ModelNotFound:
                self._book.fetched.pop(model_id, None)
                self._is_to_save = True
            except SwarmLLMError as error:
                log.info("what is here of %s is not counted: %s", model_id, error.message)
        self._used_bytes = used_bytes
        if self._is_to_save:
            self._is_to_save = False
            await self._book.save()

    async def make_room(self, entry: CatalogueEntry, layers: LayerRange, keep: Collection[ModelId]) -> bool:
        """Whether what `layers` still need fits; other models go for it, the oldest first, but none of
        `keep`."""
        wanted_bytes = missing_bytes(entry, layers)
        await self.look()
        for model_id in list(self._book.fetched):
            if wanted_bytes <= self.free_bytes:
                break
            if model_id not in keep and model_id != entry.model_id:
                await self._let_go(model_id)
                await self.look()
        return wanted_bytes <= self.free_bytes

    def reserve(self, what: str, n_bytes: int) -> None:
        """For bytes that arrive for a model which nobody can name yet; `what` names them instead. 0 gives
        them back."""
        self._arriving_bytes[what] = n_bytes
        if not n_bytes:
            del self._arriving_bytes[what]

    async def charge(self, model_id: ModelId) -> None:
        """What is here of a model came for others' sake, and may go when its room is needed."""
        if model_id not in self._book.fetched:
            self._book.fetched[model_id] = None
            await self._book.save()
            await self.look()

    @contextmanager
    def arriving(self, entry: CatalogueEntry, layers: LayerRange) -> Iterator[None]:
        """Its bytes count for the time of the block, whether or not they are there yet."""
        self._arriving_bytes[entry.model_id] = missing_bytes(entry, layers)
        try:
            yield
        finally:
            del self._arriving_bytes[entry.model_id]

    async def begin(self, entry: CatalogueEntry) -> None:
        """It is about to be fetched; it is charged to the budget if nothing of it is here."""
        if entry.is_stored and entry.model_id not in self._book.fetched and not stored_bytes(entry):
            self._book.fetched[entry.model_id] = None
            await self._book.save()

    async def end(self, model_id: ModelId) -> None:
        """It is not placed here any more."""
        try:
            entry = await self._models.known(model_id)
        except SwarmLLMError:
            return
        if entry.is_stored and not entry.pinned and not stored_bytes(entry):
            await self._let_go(model_id)

    def belongs_to_user(self, model_id: ModelId) -> None:
        """A person has loaded it, so that it stays; the next look writes it down."""
        if model_id in self._book.fetched:
            del self._book.fetched[model_id]
            self._is_to_save = True

    async def _let_go(self, model_id: ModelId) -> None:
        try:
            if (await self._models.known(model_id)).pinned:
                return
            await self._models.remove(model_id)
            log.info("removed %s, which was fetched to be placed here and is not any more", model_id)
        except ModelNotFound:
            pass
        except SwarmLLMError as error:
            log.info("%s stays on the disk: %s", model_id, error.message)
            return
        if model_id in self._book.fetched:
            del self._book.fetched[model_id]
            await self._book.save()


def memory_budget_bytes(settings: AutoManageTable) -> int:
    """Of the machine's memory."""
    return int(settings.max_memory_gib * 2**30) or memory_bytes()[0] // 2


def disk_budget_bytes(settings: AutoManageTable) -> int:
    return int(settings.max_disk_gib * 2**30) or memory_budget_bytes(settings)


def stored_bytes(entry: CatalogueEntry) -> int:
    """Of a model that the store owns: what is there of its tensors; 0 for a file of the user's."""
    if entry.present is None:
        return 0
    return sum(tensor.size_bytes for tensor in entry.manifest.tensors if tensor.name in entry.present)


def missing_bytes(entry: CatalogueEntry, layers: LayerRange) -> int:
    """What has to be fetched before `layers` can run here."""
    return sum(tensor.size_bytes for tensor in entry.absent(needed_tensors(entry.manifest, layers)))
