"""The presets of this node's models by name: read once from the catalogue's database, changed by its user."""

from __future__ import annotations

import trio

from swarmllm.models import Catalogue
from swarmllm.models.presets import NO_PRESET, Preset, Presets


class NamedPresets:
    def __init__(self, catalogue: Catalogue) -> None:
        self._stored = Presets(catalogue)
        self._by_name: dict[str, Preset] | None = None
        self._reading = trio.Lock()

    async def get(self, name: str) -> Preset:
        """An empty one where there is none. Raises BadModel where the database cannot be read."""
        if self._by_name is None:
            async with self._reading:
                if self._by_name is None:
                    self._by_name = await trio.to_thread.run_sync(self._stored.all)
        return self._by_name.get(name, NO_PRESET)

    async def put(self, name: str, preset: Preset) -> None:
        """Raises ModelNotFound."""
        await trio.to_thread.run_sync(self._stored.put, name, preset)
        self._by_name = None

    async def drop(self, *names: str) -> None:
        """These names lead to no model any more."""
        await trio.to_thread.run_sync(self._stored.drop, *names)
        self._by_name = None
