"""Places projectors on this node: looks at the plan (see `scheduling.projector_placement`) for each model
that is placed here, and takes one step when the plan has asked for the same step three times in a row."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import trio
from msgspec import UNSET

from swarmllm.errors import SwarmLLMError
from swarmllm.models import CatalogueEntry
from swarmllm.node.model_access import PlacesProjectors
from swarmllm.scheduling.placement import Hysteresis
from swarmllm.scheduling.projector_placement import HOLDERS_WANTED, ProjectorNode, next_act
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import NodeRecord, ProjectorAnnounce

log = logging.getLogger("swarmllm.node")

RETRY_S = 60.0
"""After a projector could not be taken."""


class ProjectorPlacing:
    def __init__(self, node_id: NodeId, models: PlacesProjectors, *, n_wanted: int = HOLDERS_WANTED) -> None:
        self._node_id = node_id
        self._models = models
        self._n_wanted = n_wanted
        self._hysteresis: dict[ModelId, Hysteresis] = {}
        self._taken: dict[ModelId, tuple[CatalogueEntry, int]] = {}
        """The models, and the sizes of their projectors in bytes."""
        self._retry_at_s: dict[ModelId, float] = {}

    @property
    def used_bytes(self) -> int:
        """Of the projectors that were taken."""
        return sum(size_bytes for _, size_bytes in self._taken.values())

    def belongs_to_user(self, model_id: ModelId) -> None:
        """A person has loaded or unloaded it, so that it is not this plan's to drop."""
        self._taken.pop(model_id, None)

    async def look_after(self, entry: CatalogueEntry, records: Mapping[NodeId, NodeRecord]) -> None:
        """One look, and what follows from it. `records`: of this node and of those that are connected and
        trusted."""
        model_id, now_s = entry.model_id, trio.current_time()
        if not self._n_wanted or now_s < self._retry_at_s.get(model_id, now_s):
            return
        said = {node_id: _said(record, entry) for node_id, record in records.items()}
        sizes = [each.size_bytes for each in said.values() if each and each.size_bytes is not UNSET]
        if not sizes:
            # Nobody gives one.
            return
        nodes = [
            ProjectorNode(
                node_id,
                record.capability.placing_free_bytes,
                said[node_id] is not None,
                model_id in record.capability.placed_models,
            )
            for node_id, record in records.items()
        ]
        act = next_act(self._node_id, nodes, max(sizes), self._n_wanted, took_it=model_id in self._taken)
        hysteresis = self._hysteresis.setdefault(model_id, Hysteresis())
        if not act:
            hysteresis.forget()
        elif hysteresis.see(act):
            hysteresis.forget()
            try:
                await self._act(act, entry, max(sizes))
            except SwarmLLMError as error:
                log.info("placing the projector of %s: %s", entry.name, error.message)
                self._retry_at_s[model_id] = trio.current_time() + RETRY_S

    async def _act(self, act: str, entry: CatalogueEntry, size_bytes: int) -> None:
        if act == "take":
            if entry.unloaded_projector is not None:
                # Its user wants it so.
                return
            log.info("placing the projector of %s here", entry.name)
            await self._models.hold_projector(entry)
            self._taken[entry.model_id] = entry, size_bytes
        else:
            log.info("dropping the projector of %s, others have it", entry.name)
            del self._taken[entry.model_id]
            await self._models.let_go_projector(entry)

    async def forget(self, model_id: ModelId) -> None:
        """The model is not placed here any more."""
        self._hysteresis.pop(model_id, None)
        self._retry_at_s.pop(model_id, None)
        if (taken := self._taken.pop(model_id, None)) is not None:
            await self._models.let_go_projector(taken[0])


def _said(record: NodeRecord, entry: CatalogueEntry) -> ProjectorAnnounce | None:
    """What a node says of a projector that fits the model."""
    for each in record.projectors or ():
        if each.model_id == entry.model_id and each.n_embd == entry.manifest.n_embd_input:
            return each
    return None
