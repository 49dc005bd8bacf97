"""Guesses at the head of a cut model, checked by the whole pipeline in one trip: pure, with `now` passed in.

The head hears every token first, so the guesses leave with the token and no hop is added. A trip with guesses
is compared with one without, as a step of one worker is (`cost_gate`): what a trip takes has the ways
between the nodes, every stage's computing and the waiting in it, so the number of guesses follows all of
them. The head knows what was generated, and the prompt only where it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from swarmllm_workers.speculation.cost_gate import CostGate
from swarmllm_workers.speculation.drafting import Drafter

_ROOM: Final = 256


class ChainGuesser:
    def __init__(
        self,
        gate: CostGate,
        begin: Callable[[np.ndarray], Sequence[Drafter]],
        answered: Callable[[np.ndarray, Sequence[int]], None] = lambda prompt, answer: None,
    ) -> None:
        """Of one request. `gate`: of the pipeline. `begin` gives what guesses after a prompt (i32, empty
        where that is not known), as soon as there may be guesses; `answered` hears a prompt that is known
        with the whole answer."""
        self.gate = gate
        self.n_guessed = 0
        """Guesses that were checked."""
        self.n_right = 0
        """Of these."""
        self._begin = begin
        self._drafters: Sequence[Drafter] | None = None
        self._tell_answered = answered
        self._n_prompt = 0
        self._history = np.empty(_ROOM, np.int32)
        self._n_known = 0
        """Generated tokens in it."""
        self._left_at: float | None = None
        self._once_s = 0.0
        self._kind = ""
        self._n_on_way = 0
        self._is_over = False
        self._was_tried = self._is_after_trial = False

    def know(self, prompt: np.ndarray) -> None:
        """What came before the first token, i32. It may come late; only the first time counts."""
        if self._n_prompt or self._is_over:
            return
        history = self._history[: self._n_known]
        self._history = np.concatenate((prompt, history, np.empty(_ROOM, np.int32)))
        self._n_prompt = len(prompt)
        self._end_drafts()

    def guess(
        self, tokens: Sequence[int], n_rows_max: int, n_left: int, now: float, *, is_alone: bool = True
    ) -> tuple[int, ...]:
        """The last of `tokens`, all that were generated, leaves now, and these leave with it: with it at most
        `n_rows_max`, and no more than the `n_left` tokens that may still come. `is_alone`: no other request
        is here, whose rows would fill a batch with certainties."""
        n_new = len(tokens) - self._n_known
        if self._is_over or n_new < 1:  # a token was repeated: others come now than were learnt
            self._is_over = True
            return ()
        if self._left_at is not None:
            n_right = min(n_new - 1, self._n_on_way)
            self.n_guessed += self._n_on_way
            self.n_right += n_right
            if is_alone and not self._is_trial():
                trip_s = now - self._left_at - self._once_s
                self.gate.judged(self._kind, self._n_on_way, n_right, trip_s, self._once_s)
        self._learn(tokens)
        self._left_at, self._n_on_way, self._once_s = None, 0, 0.0
        if not is_alone:
            return ()
        self._left_at = now
        n_max = min(n_rows_max, n_left) - 1
        if n_max < 1:
            return ()
        if self._drafters is None:
            self._drafters = self._begin(self._history[: self._n_prompt])
        history = self._history[: self._n_prompt + self._n_known]
        for drafter in self._drafters:
            draft = drafter.draft(
                history, lambda kind, once_s: self.gate.n_worth(kind, n_max, n_left, once_s)
            )
            if draft is not None:
                guesses = draft.tokens[:n_max]
                self._kind, self._n_on_way, self._once_s = draft.kind, len(guesses), draft.once_s
                return guesses
        return ()

    def answered(self, tokens: Sequence[int]) -> None:
        """The last token has been sampled; `tokens` are all that were generated."""
        if self._n_prompt:
            self._tell_answered(self._history[: self._n_prompt], tokens)

    def close(self) -> None:
        """The request is over here."""
        self._is_over = True
        self._end_drafts()

    def _end_drafts(self) -> None:
        for drafter in self._drafters or ():
            drafter.close()
        self._drafters = None

    def _is_trial(self) -> bool:
        """Whether the trip that ends is the first with guesses, or the one after it: stages try then how
        many rows they can compute at once, so how long it takes says nothing."""
        if self._n_on_way and not self._was_tried:
            self._was_tried, self._is_after_trial = True, True
            return not self.gate.has_measured(self._kind)
        is_after, self._is_after_trial = self._is_after_trial, False
        return is_after

    def _learn(self, tokens: Sequence[int]) -> None:
        n_before, n_after = self._n_prompt + self._n_known, self._n_prompt + len(tokens)
        while len(self._history) < n_after:
            self._history = np.concatenate((self._history, np.empty_like(self._history)))
        self._history[n_before:n_after] = tokens[self._n_known :]
        self._n_known = len(tokens)
