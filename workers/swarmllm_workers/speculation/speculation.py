"""Speculation inside one worker: guess some tokens, check them all in one batch, keep those that are right.

Lossless by exact acceptance: a guess is right if it is the very token that the request's own sampler draws at
that place from the model's logits there. The sampler is a function of logits, seed, place and the tokens
before, so the text is the same as without guesses at temperature 0, with a seed at any temperature, and
without a seed in distribution. (Rejection sampling, Leviathan et al. 2023, accepts more often at high
temperatures, but draws other tokens than the plain run with the same seed would, which would make text
depend on what the machine had time for.)

That holds to the bit only where a row's logits are the same in a batch as alone. Whether they are is tried
out with the loaded model, once, before the first guess counts: a batch of rows against the same rows one by
one. Where they differ nothing is guessed. It also tells what checking guesses costs. A request that is long
enough to gain by it tries in its course, else it is tried after a request, when nobody waits.

Requests guess only while they are alone in the worker: others' rows fill a batch with certainties. Models
with recurrent layers cannot take a row back, so they never guess.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from swarmllm_proto.ipc.base import GuessCount
from swarmllm_proto.ipc.base import Guesser as Way
from swarmllm_proto.limits import GUESSES_MAX
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.memory import Memory
from swarmllm_workers.engine.operation import Operation
from swarmllm_workers.engine.ranges import Route
from swarmllm_workers.engine.segment import Segment, Span
from swarmllm_workers.engine.segment_maker import LoadProgress
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.speculation import draft_model, swift
from swarmllm_workers.speculation.chain_guesser import AHEAD_MAX
from swarmllm_workers.speculation.cost_gate import CostGate
from swarmllm_workers.speculation.draft_model import DraftModel, ModelDrafter
from swarmllm_workers.speculation.drafting import AGAIN, Continuations, Drafter, NgramLookup, Remembered
from swarmllm_workers.speculation.swift import SwiftDrafter, SwiftTrial
from swarmllm_workers.speculation.unsent_guesses import UnsentGuesses

log = logging.getLogger(__name__)

_TRIED_ROWS: Final = (ROWS_MAX, 3)
"""Sizes of batch that are tried, largest first. 3: what ggml computes row by row of weights that it
rearranged when it loaded them."""
_WAYS: Final[dict[str, Way]] = {AGAIN: "again", draft_model.KIND: "draft", swift.KIND: "swift"}
"""Kinds of drafts as they are told; of all others text was looked up."""
_LONG: Final = 48
"""Tokens that may still come, from which on a request tries in its course: trying takes some ten steps."""


@dataclass(frozen=True)
class SpeculationSettings:
    ngram_size_max: int = 0
    """0: no lookup."""
    ngram_tokens_max: int = 10
    draft_path: str = ""
    """"": no draft model."""
    draft_tokens_max: int = 4
    swift_tokens_max: int = 0
    """0: no layer skipping."""
    swift_skip_ratio: float = 0.45


class Speculation:
    """The speculation of one worker."""

    def __init__(self, engine: Engine, settings: SpeculationSettings) -> None:
        self._engine = engine
        self.settings = settings
        self._draft_model: DraftModel | None = None
        self.continuations = Continuations(engine.settings.prefixes)
        self.cost_gate = CostGate()
        """Of the latest request."""
        self._n_rows_exact: dict[tuple[Segment, ...], int] = {}
        n_swift = settings.swift_tokens_max
        self._trial = SwiftTrial(engine, n_swift, settings.swift_skip_ratio) if n_swift else None

    @property
    def is_on(self) -> bool:
        settings = self.settings
        return bool(settings.ngram_size_max or settings.draft_path or settings.swift_tokens_max)

    @property
    def guesses_at_head(self) -> bool:
        """Whether anything can guess for a model that is cut."""
        return bool(self.settings.ngram_size_max or self.settings.draft_path)

    def loading(self) -> Operation[None]:
        """The draft model, where there is to be one. Raises CallError bad_model, out_of_memory."""
        if self.settings.draft_path and self._draft_model is None:
            engine = self._engine
            path = Path(self.settings.draft_path)
            self._draft_model = yield partial(DraftModel, path, engine.vocabulary, engine.settings)

    def trying(self, progress: LoadProgress) -> Operation[None]:
        """Measure, after the whole model was loaded, how well guesses do."""
        if self._trial is not None:
            yield from self._trial.beginning(progress)

    def settle(self, *, is_idle: bool) -> None:
        """Apply, between two rounds of works, what the measurements of their guesses have shown."""
        if self._trial is not None:
            self._trial.settle(is_idle=is_idle)

    @property
    def memory(self) -> Memory:
        """The memory of the draft model."""
        return self._draft_model.memory if self._draft_model is not None else Memory()

    def recall(self, prompt: np.ndarray) -> list[int]:
        """How `prompt` (i32) went on the last time; empty where that is not known."""
        if not self.settings.ngram_size_max:
            return []
        tokens: list[int] = self.continuations.recall(prompt, time.monotonic()).tolist()
        return tokens

    def begin_at_head(self, slot: int | None, prompt: np.ndarray) -> list[Drafter]:
        """What guesses for a request whose last layers run here. `prompt`: i32, empty where it is not known
        here; `slot`: of the request. A trip is worth more guesses than a step: what they are limited to for
        one worker does not count here."""
        settings, is_known = self.settings, bool(len(prompt))
        drafters: list[Drafter] = []
        if settings.ngram_size_max:
            if is_known:
                drafters.append(Remembered(len(prompt), self.continuations.recall(prompt, time.monotonic())))
            drafters.append(NgramLookup(settings.ngram_size_max, AHEAD_MAX))
        if self._draft_model is not None and is_known and slot is not None:
            n_tokens = max(settings.draft_tokens_max, GUESSES_MAX)
            drafters.append(ModelDrafter(self._draft_model, slot, n_tokens))
        return drafters

    def begin(self, route: Route, slot: int, prompt: np.ndarray) -> Guesser | None:
        """The guesser for a request. None: there is nothing to guess with."""
        if not self.is_possible(route):
            return None
        settings = self.settings
        drafters: list[Drafter] = []
        if settings.ngram_size_max:
            drafters.append(Remembered(len(prompt), self.continuations.recall(prompt, time.monotonic())))
            drafters.append(NgramLookup(settings.ngram_size_max, settings.ngram_tokens_max))
        if self._draft_model is not None:
            drafters.append(ModelDrafter(self._draft_model, slot, settings.draft_tokens_max))
        if settings.swift_tokens_max:
            drafters.append(SwiftDrafter(self._engine, route, slot, settings.swift_tokens_max))
        return Guesser(self, route, slot, drafters)

    def is_possible(self, route: Route) -> bool:
        return self.is_on and not any(segment.is_recurrent for segment in route.segments)

    def saw(self, kind: str, n_guessed: int, n_tokens: int, n_steps: float) -> None:
        """Record a step of a request that ran alone: so many tokens in the time of so many steps without
        guesses."""
        if self._trial is not None and (kind == swift.KIND or not n_guessed):
            self._trial.saw(n_tokens, n_steps)

    def answered(self, prompt: np.ndarray, answer: Sequence[int]) -> None:
        """Record that a request has ended."""
        if self.settings.ngram_size_max:
            self.continuations.remember(prompt, np.array(answer, np.int32), time.monotonic())

    def n_rows_exact(self, route: Route) -> int | None:
        """How many rows of one batch have the logits, to the bit, that each has alone: at least 1. None where
        that has not been tried with these segments."""
        return self._n_rows_exact.get(route.segments)

    def try_out(self, route: Route, slot: int, position: int, tokens: np.ndarray) -> int:
        """Compute `tokens` (repeated) at `position`, where the slot's rows then have to be written anew, and
        know from then on. Needs cells for ROWS_MAX rows."""
        known = next((n for n in _TRIED_ROWS if self._is_exact(route, slot, position, tokens, n)), 1)
        self._n_rows_exact = {route.segments: known}
        if known == 1:
            log.info("no speculation: rows of a batch differ from single ones with this model and build")
        return known

    def try_out_after(self, route: Route, slot: int, history: np.ndarray) -> None:
        """The same after a request has ended whose slot has rows for all of `history`, where there is room
        and nobody else is served."""
        n_rows, settings = len(history) + ROWS_MAX, self._engine.settings
        if self.n_rows_exact(route) is not None or n_rows > settings.n_ctx or not self.is_possible(route):
            return
        if self._engine.make_room(route, ROWS_MAX) < ROWS_MAX:
            return
        try:
            self.try_out(route, slot, len(history), history[-ROWS_MAX:])
        except CallError as error:  # the request has had its answer
            log.info("guesses were not tried: %s", error.message)

    def _is_exact(self, route: Route, slot: int, position: int, tokens: np.ndarray, n_rows: int) -> bool:
        rows, together_s, alone_s = np.resize(tokens, n_rows), [], []
        for _ in range(2):  # the first time libllama makes its graph
            started = time.perf_counter()
            together = self._engine.run(route, [Span(slot, position, rows, "rows")])[0]
            together_s.append(time.perf_counter() - started)
        together = together.copy()
        for i in range(n_rows):
            started = time.perf_counter()
            alone = self._engine.run(route, [Span(slot, position + i, rows[i : i + 1], "logits")])[0]
            alone_s.append(time.perf_counter() - started)
            if not np.array_equal(alone, together[i]):
                return False
        self.cost_gate.measured(AGAIN, float(np.median(alone_s)), n_rows - 1, min(together_s))
        return True

    def close(self) -> None:
        if self._draft_model is not None:
            self._draft_model.close()
            self._draft_model = None


class Guesser:
    """Guesses for one request, and learns from which guesses were right."""

    def __init__(self, speculation: Speculation, route: Route, slot: int, drafters: list[Drafter]) -> None:
        self._speculation = speculation
        self._route = route
        self._slot = slot
        self._drafters = drafters
        self._kind = ""
        self._counts: dict[Way, tuple[int, int]] = {}
        self._started_s = 0.0
        """When the step began, later by what does not count; 0 where it says nothing about guesses."""
        self._once_s = 0.0
        self.cost_gate = speculation.cost_gate = speculation.cost_gate.successor()
        self._unsent = UnsentGuesses(self.cost_gate.saw_unsent)

    def guess(self, history: np.ndarray, n_rows_max: int, n_left: int) -> tuple[int, ...]:
        """Tokens to be checked behind the last one of `history`, whose row is the only one that the slot
        does not have yet. There is room for `n_rows_max` rows, and `n_left` tokens may still come."""
        self._started_s = 0.0
        self._unsent.compare(history)
        if n_rows_max < 2:  # it is not alone, or at its end
            return ()
        self._started_s = time.perf_counter()
        n_exact = self._speculation.n_rows_exact(self._route)
        if n_exact is None and (n_left < _LONG or n_rows_max < ROWS_MAX):
            return ()
        n_max = min(n_rows_max, n_left, n_exact or ROWS_MAX) - 1
        draft = self._unsent.draft(
            self._drafters,
            history,
            lambda kind, once_s: self.cost_gate.n_worth(kind, n_max, n_left, once_s),
        )
        if draft is None:
            return ()
        self._started_s += draft.once_s
        self._once_s = draft.once_s
        self._kind = draft.kind
        return draft.tokens[: self._n_checked(history, draft.tokens, n_exact)]

    def _n_checked(self, history: np.ndarray, tokens: tuple[int, ...], n_exact: int | None) -> int:
        if n_exact is None:
            started = time.perf_counter()
            rows = np.array([history[-1], *tokens], np.int32)
            n_exact = self._speculation.try_out(self._route, self._slot, len(history) - 1, rows)
            self._started_s += time.perf_counter() - started
        return n_exact - 1

    @property
    def counts(self) -> tuple[GuessCount, ...]:
        """How each way of guessing fared."""
        return tuple(GuessCount(way, *counts) for way, counts in self._counts.items())

    def judged(self, n_guessed: int, n_right: int) -> None:
        """The step that began with `guess` is over; so many guesses were checked and so many right."""
        if n_guessed:
            way = _WAYS.get(self._kind, "lookup")
            n_checked, n_right_before = self._counts.get(way, (0, 0))
            self._counts[way] = n_checked + n_guessed, n_right_before + n_right
        if self._started_s:
            seconds = time.perf_counter() - self._started_s
            self.cost_gate.judged(self._kind, n_guessed, n_right, seconds, self._once_s)
            n_steps = seconds / self.cost_gate.plain_s if n_guessed and self.cost_gate.plain_s else 1.0
            self._speculation.saw(self._kind, n_guessed, n_right + 1, n_steps)
        self._started_s = self._once_s = 0.0

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
