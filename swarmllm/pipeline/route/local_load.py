"""What runs on this node at this moment, for the routes that it chooses and for what it tells others."""

from __future__ import annotations

from collections.abc import Mapping

from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange, covers
from swarmllm.pipeline.route.inputs import Load
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.occupancy import Held, Room, room_left
from swarmllm_proto.identifiers import ModelId, NodeId


class LocalLoad:
    def __init__(self, pool: Compute, sessions: Sessions, settings: PipelineSettings) -> None:
        self.own: dict[str, Held | None] = {}
        """By id, the requests of this node's clients; None: no route yet, or others run all of it."""
        self._pool = pool
        self._sessions = sessions
        self._settings = settings

    def room(self) -> Room:
        """For one more request, of the model with least of it."""
        return room_left(self._held(), self._settings, self._pool.context_sizes())

    def now(self, entry: CatalogueEntry, n_tokens: int, sent: Mapping[NodeId, int], *, n_asking: int) -> Load:
        """As a request for `n_tokens` meets it, answer included; it is one of `n_asking` that count here
        already, and have no route."""
        n_active = max(0, len(self.own) - n_asking) + self._sessions.n_for_others()
        # What runs here as a whole waits for its turn; a stage would be refused.
        waits = covers(self._pool.loaded(entry.model_id), LayerRange(0, entry.manifest.n_layers))
        return Load(n_active, "" if waits else self._room_of(entry.model_id).lack(n_tokens), sent)

    def _room_of(self, model_id: ModelId) -> Room:
        n_ctx = self._pool.context_sizes().get(model_id, self._settings.n_ctx)
        held = (each for each in self._held() if each.model_id == model_id)
        return room_left(held, self._settings, {model_id: n_ctx})

    def _held(self) -> list[Held]:
        return [*filter(None, self.own.values()), *self._sessions.held_for_others()]
