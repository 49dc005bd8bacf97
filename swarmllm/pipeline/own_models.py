"""The models of this node's catalogue, read without blocking the event loop."""

from __future__ import annotations

from typing import Protocol

import trio

from swarmllm.models import Catalogue, CatalogueEntry
from swarmllm_proto.identifiers import ModelId


class FindsOwnModels(Protocol):
    async def get(self, model_id: ModelId) -> CatalogueEntry:
        """Raises ModelNotFound."""
        ...


class OwnModels:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def get(self, model_id: ModelId) -> CatalogueEntry:
        """Raises ModelNotFound."""
        return await trio.to_thread.run_sync(self._catalogue.get, model_id)
