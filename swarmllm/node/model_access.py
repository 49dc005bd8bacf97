"""Interfaces by which parts of a node use its models; `ModelKeeper` implements them.

Each part takes the narrowest one, so that its test needs no keeper.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from swarmllm.models import CatalogueEntry, LayerRange
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions
from swarmllm_proto.identifiers import ModelId, NodeId

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""
Sources = tuple[tuple[NodeId, str], ...]
"""Nodes that say that a model's file is published, and where."""


def unseen(done_bytes: int, total_bytes: int) -> None:
    """For progress that nobody watches."""


class FindsModels(Protocol):
    async def find(self, name_or_id: str) -> CatalogueEntry:
        """Raises ModelNotFound, BadModel, and what asking other nodes raises."""
        ...


class KnowsNewModels(FindsModels, Protocol):
    def may_be_told(self, model_id: ModelId) -> bool:
        """Whether other nodes may hear that its file is here."""
        ...


class LoadsModels(FindsModels, Protocol):
    async def hold(
        self,
        entry: CatalogueEntry,
        layers: LayerRange,
        progress: Progress = unseen,
        fetching: Progress = unseen,
        options: LoadOptions = AS_CONFIGURED,
    ) -> object:
        """Fetch and load layers. Raises what either raises."""
        ...


class PlacesModels(LoadsModels, Protocol):
    async def fetch(
        self, entry: CatalogueEntry, layers: LayerRange, progress: Progress, sources: Sources = ()
    ) -> object:
        """What layers need, onto this node's disk, from other nodes or from `sources`."""
        ...

    async def drop(self, entry: CatalogueEntry, layers: LayerRange) -> None:
        """Unload layers. Raises Conflict where none is loaded."""
        ...


class ProvisionsModels(PlacesModels, Protocol):
    def is_complete(self, entry: CatalogueEntry) -> bool:
        """Whether connected nodes, this one among them, hold every layer."""
        ...

    def has_givers(self, model_id: ModelId) -> bool:
        """Whether connected nodes have files of it."""
        ...


class RequestModels(Protocol):
    """For requests of this node's users; `Node` implements it."""

    async def model_for_texts(self, model: str) -> CatalogueEntry:
        """With what reading a prompt takes. Raises ModelNotFound."""
        ...

    async def model_for_embeddings(self, model: str) -> CatalogueEntry:
        """The same, but all of a model that encodes whole texts."""
        ...

    def loaded(
        self, entry: CatalogueEntry, name: str, keep_alive_s: float | None = None
    ) -> AbstractAsyncContextManager[None]:
        """While some node can run it."""
        ...


class PlacesProjectors(Protocol):
    async def hold_projector(self, entry: CatalogueEntry) -> None:
        """Open a model's projector, fetched from other nodes if it is not here. Raises what either raises."""
        ...

    async def let_go_projector(self, entry: CatalogueEntry) -> None:
        """Close it, and delete it if it was fetched."""
        ...


class StoredModels(Protocol):
    async def known(self, model_id: ModelId) -> CatalogueEntry:
        """From this node's catalogue only. Raises ModelNotFound."""
        ...

    async def remove(self, name_or_id: str) -> object:
        """Delete what was fetched of it. Raises Conflict where it is in use."""
        ...
