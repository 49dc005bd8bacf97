"""A model that guesses for itself by leaving layers out (SWIFT: Xia et al. 2024).

libllama runs a loaded model as a whole, so a model that is to guess is loaded as a chain of segments: the
guess runs through some of them, the check through all. Which layers are left out is fixed: the share
`swift_skip_ratio` of those between the first and the last two, spread evenly, in whole multiples of the
model's cut alignment. (SWIFT searches for the best set while it runs; on a chain every other set would have
to be loaded anew.) Whether that pays at all: `swift_trial.py`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.schedule.segment_route import Route
from swarmllm_workers.speculation.drafting import Draft, Worth

KIND: Final = "swift"


def kept_route(engine: Engine, route: Route) -> Route:
    """Without the segments that guesses leave out."""
    skipped = engine.cuts.skipped
    return Route(route.start, route.end, tuple(s for s in route.segments if (s.start, s.end) not in skipped))


class SwiftDrafter:
    """Of one request. Its guesses' rows are taken back by the check, which begins where they began."""

    def __init__(self, engine: Engine, route: Route, slot: int, n_tokens_max: int) -> None:
        self._engine = engine
        self._slot = slot
        self._n_tokens_max = n_tokens_max
        self._route = kept_route(engine, route)
        self.is_possible = len(self._route.segments) < len(route.segments)

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        n = min(worth(KIND, 0.0), self._n_tokens_max) if self.is_possible else 0
        tokens: list[int] = []
        token = int(history[-1])
        for i in range(n):
            data = np.array([token], np.int32)
            span = Span(self._slot, len(history) - 1 + i, data, "logits")
            token = int(self._engine.run(self._route, [span])[0].argmax())
            tokens.append(token)
        return Draft(tuple(tokens), KIND) if tokens else None

    def close(self) -> None:
        pass
