"""Which pipeline answered a conversation last: its KV is still there, so the next turn should go there too,
where that is not much slower than the best.
"""

from __future__ import annotations

from collections import OrderedDict

from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.swarm import Stage

MAX_SESSIONS = 1024
"""The conversation that was silent longest is forgotten first."""


class Affinity:
    def __init__(self) -> None:
        self._stages: OrderedDict[tuple[str, str], tuple[Stage, ...]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Affinity sessions={len(self._stages)}>"

    def remember(self, model_id: ModelId, session: str, stages: tuple[Stage, ...]) -> None:
        """`session` "": the client names none, and nothing is kept."""
        if not session:
            return
        self._stages[model_id, session] = stages
        self._stages.move_to_end((model_id, session))
        while len(self._stages) > MAX_SESSIONS:
            self._stages.popitem(last=False)

    def previous(self, model_id: ModelId, session: str) -> tuple[Stage, ...]:
        return self._stages.get((model_id, session), ())
