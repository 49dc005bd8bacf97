"""Drafts with the model itself by leaving layers out (SWIFT: Xia et al. 2024).

libllama runs a loaded model as a whole, so a model that is to guess is loaded as a chain of segments: the
guess runs through some of them, the check through all. Which layers are left out is fixed: the share
`swift_skip_ratio` of those between the first and the last two, spread evenly, in whole multiples of the
model's cut alignment. (SWIFT searches for the best set while it runs; on a chain every other set would have
to be loaded anew.)

Whether that pays is tried (`SwiftTrial`). Pieces have a price of their own: each is a graph with work around
it, which a small model notices. So the model is loaded whole, a step of it is timed, and then in pieces:
where not even guesses that are all right would make it faster than whole, it goes back to one piece at once.
Where they might, requests show how often they are right: after TRIED_TOKENS tokens the verdict falls. Once
given up, the worker is one that never guessed this way, until its model is loaded anew.

Rows of requests that run at that moment stay in the pieces until those requests are over.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import numpy as np

from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.operation import Operation
from swarmllm_workers.engine.ranges import Route
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.engine.segment_maker import LoadProgress
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.speculation.cost_gate import GAIN_MIN
from swarmllm_workers.speculation.drafting import Draft, Worth

KIND: Final = "swift"


def kept_route(engine: Engine, route: Route) -> Route:
    """Without the segments that guesses leave out."""
    skipped = engine.cuts.skipped
    return Route(route.start, route.end, tuple(s for s in route.segments if (s.start, s.end) not in skipped))


class SwiftDrafter:
    """Drafts for one request. The check takes back the rows of the guesses, as it begins at the same
    position."""

    is_free = False

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


log = logging.getLogger(__name__)

TRIED_TOKENS: Final = 128
"""Of requests that are alone in the worker, before it is decided for good."""
_N_TIMED: Final = 3
"""Steps, after one in which libllama makes its graph."""
_REQUEST: Final = "(trial)"


class SwiftTrial:
    """The trial of one worker."""

    def __init__(self, engine: Engine, n_tokens_max: int, skip_ratio: float) -> None:
        """`n_tokens_max`: guesses per step."""
        self._engine = engine
        self._n_tokens_max = min(n_tokens_max, ROWS_MAX - 1)
        self._skip_ratio = skip_ratio
        self._slowness = 1.0
        """What a step in pieces takes, in steps of the whole model."""
        self._n_tokens = 0
        self._n_steps = 0.0
        """What those took, in steps in pieces that guess nothing."""
        self._is_over = False
        self._has_failed = False
        self._is_settling = False
        """It is on its way back."""
        self.has_given_up = False
        """The model is to be in one piece again."""

    def beginning(self, progress: LoadProgress) -> Operation[None]:
        """Begin the trial: the whole model is loaded."""
        engine = self._engine
        if self._is_over or len(engine.layers.segments) > 1 or engine.layers.segments[0].is_recurrent:
            return
        try:
            slot = engine.take_slot(_REQUEST)
            whole_s = self._seconds(self._route(), slot)
            yield from engine.layers.rearranging(self._skip_ratio, progress)
            if len(engine.layers.segments) > 1:
                self._judge_pieces(slot, whole_s)
        except CallError as error:
            log.info("guesses with layers left out were not tried: %s", error.message)
            self.has_given_up = True
        finally:
            engine.release(_REQUEST)
        yield from self._settling()

    def _judge_pieces(self, slot: int, whole_s: float) -> None:
        route, n = self._route(), self._n_tokens_max
        plain_s, guess_s = self._seconds(route, slot), self._seconds(kept_route(self._engine, route), slot)
        check_s = self._seconds(route, slot, n + 1)
        self._slowness = plain_s / whole_s
        # With fewer guesses than n, as if checking took as long as one row: a bound has to be generous.
        best = max(
            (m + 1) * whole_s / (m * guess_s + (check_s if m == n else plain_s)) for m in range(1, n + 1)
        )
        self.has_given_up = best < GAIN_MIN

    def _route(self) -> Route:
        return self._engine.route(_REQUEST, 0, self._engine.n_layers)

    def _seconds(self, route: Route, slot: int, n_rows: int = 1) -> float:
        """Of a batch, as fast as the machine gets it done."""
        found = []
        for _ in range(1 + _N_TIMED):
            started = time.perf_counter()
            self._engine.run(route, [Span(slot, 0, np.zeros(n_rows, np.int32), "rows")])
            found.append(time.perf_counter() - started)
        self._engine.empty(_REQUEST)
        return min(found[1:])

    def saw(self, n_tokens: int, n_steps: float) -> None:
        """A step of a request that was alone gave so many tokens in the time of so many without guesses."""
        self._n_tokens += n_tokens
        self._n_steps += n_steps
        if self._n_tokens >= TRIED_TOKENS:
            gain = self._n_tokens / self._n_steps / self._slowness
            self.has_given_up |= gain < GAIN_MIN
            self._n_tokens, self._n_steps = 0, 0.0

    def settle(self, *, is_idle: bool) -> None:
        """Load the model in one piece again, if the trial has failed and nothing prevents it now."""
        if not self.has_given_up or self._is_over or self._is_settling:
            return
        if self._has_failed and not is_idle:
            return  # what running requests hold is what was lacking
        self._is_settling = True
        self._engine.begin(self._settling())

    def _settling(self) -> Operation[None]:
        if not self.has_given_up or self._is_over:
            return
        try:
            if self._engine.cuts.skip_ratio:
                yield from self._engine.layers.rearranging(0.0)
                log.info("guesses with layers left out do not pay here: the model is in one piece again")
            self._is_over = True
        except CallError as error:
            self._has_failed = True
            log.info("the model stays in pieces for now: %s", error.message)
        finally:
            self._is_settling = False
