"""Provides a model that a request asks for: fetches it, loads it or shares it, and reports progress.

The model is loaded on this node, which fetches missing layers from nodes that have them. Where this node has
no room for all of it, the model is spread over the nodes that accept this node's shares, for as long as
requests ask for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import trio

from swarmllm.errors import BadModel, Conflict, DeadlineExceeded, SwarmLLMError
from swarmllm.models import CatalogueEntry
from swarmllm.node.model_access import ProvisionsModels
from swarmllm.node.placing.plan import shape_of
from swarmllm.node.sharing.sharing import Sharing
from swarmllm.workerpool import LoadOptions, WorkerPool
from swarmllm_proto.identifiers import ModelId

log = logging.getLogger("swarmllm.node")

SPREAD_S = 1800.0
"""Until the nodes hold all layers of a model that is spread over them for a request."""
LOOK_S = 0.25


@dataclass(slots=True)
class Provisioning:
    """The progress of a model that is loaded for a request."""

    model: str
    phase: Literal["fetching", "loading", "sharing"] = "loading"
    done: int = 0
    total: int = 0
    """In bytes; of `sharing`, in layers that are held. 0: not known yet."""

    @property
    def text(self) -> str:
        """For people."""
        percent = f" {100 * self.done // self.total} %" if self.total else ""
        return f"{self.phase} {self.model}{percent}"


class ModelProvisioner:
    def __init__(self, models: ProvisionsModels, pool: WorkerPool, sharing: Sharing) -> None:
        self._models = models
        self._pool = pool
        self._sharing = sharing
        self._under_way: dict[ModelId, tuple[CatalogueEntry, Provisioning]] = {}
        self.spread: set[ModelId] = set()
        """Models that are shared because a request asked for them."""

    @property
    def under_way(self) -> tuple[Provisioning, ...]:
        return tuple(provisioning for _, provisioning in self._under_way.values())

    def of(self, model: str) -> Provisioning | None:
        """By name or id."""
        for entry, each in self._under_way.values():
            if model in (entry.name, entry.model_id, *entry.further_names):
                return each
        return None

    def can_bring(self, entry: CatalogueEntry) -> bool:
        """Whether all of it is here, or other nodes have some of it to give."""
        return not entry.absent(entry.manifest.tensors) or self._models.has_givers(entry.model_id)

    def lacks_room(self, entry: CatalogueEntry) -> bool:
        """Whether its weights alone are more than the memory that is left."""
        free_bytes = self._pool.free_bytes()
        return free_bytes is not None and shape_of(entry.manifest).n_bytes(entry.manifest.whole) > free_bytes

    async def fetch(self, entry: CatalogueEntry) -> None:
        """What is not on this disk, if the model has room here. Raises what fetching raises."""
        if not entry.absent(entry.manifest.tensors) or self.lacks_room(entry):
            return
        with self._reporting(entry) as provisioning:
            provisioning.phase = "fetching"

            def fetching(done_bytes: int, total_bytes: int) -> None:
                provisioning.done, provisioning.total = done_bytes, total_bytes

            await self._models.fetch(entry, entry.manifest.whole, fetching)

    async def load(self, entry: CatalogueEntry, options: LoadOptions) -> None:
        """Onto this node. Raises what loading and fetching raise."""
        with self._reporting(entry) as provisioning:

            def loading(done_bytes: int, total_bytes: int) -> None:
                provisioning.phase, provisioning.done, provisioning.total = "loading", done_bytes, total_bytes

            def fetching(done_bytes: int, total_bytes: int) -> None:
                provisioning.phase, provisioning.done, provisioning.total = (
                    "fetching",
                    done_bytes,
                    total_bytes,
                )

            await self._models.hold(entry, entry.manifest.whole, loading, fetching, options)

    async def spread_out(self, entry: CatalogueEntry) -> bool:
        """Over the nodes that accept what this one shares; False: they have no room for it either. Raises
        DeadlineExceeded."""
        with self._reporting(entry) as provisioning:
            provisioning.phase = "sharing"
            try:
                await self._sharing.share(entry.model_id, is_permanent=False)
            except (BadModel, Conflict) as error:
                log.info("%s is not spread over other nodes: %s", entry.name, error.message)
                return False
            self.spread.add(entry.model_id)
            log.info("%s is spread over other nodes, for as long as it is asked for", entry.name)
            try:
                with trio.move_on_after(SPREAD_S):
                    while not self._models.is_complete(entry):
                        view = await self._sharing.view(entry.model_id)
                        provisioning.done, provisioning.total = view.n_ready, view.n_layers
                        await trio.sleep(LOOK_S)
                    return True
                raise DeadlineExceeded(f"the nodes do not hold {entry.name} after {SPREAD_S / 60:g} minutes")
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self.let_go(entry)
                raise

    async def let_go(self, entry: CatalogueEntry) -> None:
        """Raises what unloading raises."""
        if entry.model_id not in self.spread:
            await self._models.drop(entry, entry.manifest.whole)
            return
        self.spread.discard(entry.model_id)
        try:
            await self._sharing.unshare(entry.model_id)
        except SwarmLLMError as error:
            # Its user has shared it by command meanwhile, or has ended that.
            log.info("%s is not shared any more: %s", entry.name, error.message)

    @contextmanager
    def _reporting(self, entry: CatalogueEntry) -> Iterator[Provisioning]:
        """Of several requests for one model, the last one's begins anew."""
        provisioning = Provisioning(entry.name)
        self._under_way[entry.model_id] = entry, provisioning
        try:
            yield provisioning
        finally:
            if self._under_way.get(entry.model_id, (entry, None))[1] is provisioning:
                del self._under_way[entry.model_id]
