"""The load of this node, for routes from here and for the record that it publishes: how many requests run,
and for how large a request there is room."""

from __future__ import annotations

from collections.abc import Mapping

from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange, covers
from swarmllm.pipeline.origin.requests import OriginRequest, OriginRequests
from swarmllm.pipeline.route.inputs import OwnLoad
from swarmllm.pipeline.route.reported_loads import ReportedLoad
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.stage.capacity import HeldCapacity, Room, room_left
from swarmllm.pipeline.stage.compute import Compute
from swarmllm_proto.identifiers import ModelId, NodeId


class LocalLoad:
    def __init__(
        self, pool: Compute, requests: OriginRequests, sessions: Sessions, settings: PipelineSettings
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._sessions = sessions
        self._settings = settings

    def is_busy(self) -> bool:
        """Whether requests run here, of anybody."""
        return len(self._requests) > 0 or self._sessions.n_for_others() > 0

    def room(self) -> Room:
        """For one more request, of the model with least of it."""
        return room_left(self._held(), self._settings, self._pool.context_sizes())

    def n_running(self) -> int:
        """Requests of anybody."""
        return len(self._requests) + self._sessions.n_for_others()

    def now(
        self,
        entry: CatalogueEntry,
        n_tokens: int,
        reported: Mapping[NodeId, ReportedLoad],
        *,
        n_asking: int,
        besides: OriginRequest | None = None,
    ) -> OwnLoad:
        """As a request for `n_tokens` meets it, answer included; it is one of `n_asking` that count here
        already, and have no route. `reported`: by nodes, of their own load. `besides`: a request whose
        attempts do not count."""
        n_active = max(0, len(self._requests) - n_asking) + self._sessions.n_for_others()
        # What runs here as a whole waits for its turn; a stage would be refused.
        waits = covers(self._pool.loaded(entry.model_id), LayerRange(0, entry.manifest.n_layers))
        return OwnLoad(
            n_active,
            "" if waits else self._room_of(entry.model_id).lack(n_tokens),
            self._requests.just_sent(reported, besides),
            {node_id: load.n_running for node_id, load in reported.items()},
        )

    def _room_of(self, model_id: ModelId) -> Room:
        n_ctx = self._pool.context_sizes().get(model_id, self._settings.n_ctx)
        held = (each for each in self._held() if each.model_id == model_id)
        return room_left(held, self._settings, {model_id: n_ctx})

    def _held(self) -> list[HeldCapacity]:
        return [
            *self._requests.held(),
            *self._sessions.held_for_others(),
        ]
