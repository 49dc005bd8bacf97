"""Guesses at the head of a cut model, checked by the whole pipeline on the way: pure, with `now` passed in.

The head hears every token first, so the guesses leave with the token and no hop is added. A trip with guesses
is compared with one without, as a step of one worker is (`cost_gate`): what a trip takes has the ways
between the nodes, every stage's computing and the waiting in it, so the number of guesses follows all of
them. The head knows what was generated, and the prompt only where it is told.

Guesses leave in jobs of as many rows as a stage computes at once, so that stages compute different ones at
the same time. Where guesses of a kind are right so often that guesses at what comes behind them pay too, more
jobs follow before the first is back, and one more for each that comes back right (`_more`): until the odds
that everything before a job is right are no longer worth what a refused job costs the next one
(`CostGate.n_ahead`). Their number begins small, grows with each job that is right, and falls by half with a
refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from swarmllm_proto.limits import GUESSES_MAX, JOBS_UNDER_WAY_MAX
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.speculation.cost_gate import CostGate
from swarmllm_workers.speculation.drafting import AGAIN, Drafter
from swarmllm_workers.speculation.jobs_in_flight import JobsInFlight, LaunchedJob
from swarmllm_workers.speculation.unsent_guesses import UnsentGuesses

AHEAD_MAX: Final = JOBS_UNDER_WAY_MAX * ROWS_MAX - 1
"""Guesses under way."""
ROWS_ONE_BY_ONE: Final = 4
"""Of a job, where stages compute its rows one by one."""
_ROOM: Final = 256


class JobLimits(NamedTuple):
    """The limits on what leaves the head."""

    n_left: int
    """Tokens that may still come."""
    n_rows: int = 1
    """Of one job."""
    n_jobs: int = 1
    """Under way at once."""
    n_at_once: int = 0
    """Rows that a stage computes in one batch; 0: not known yet."""

    @property
    def has_several(self) -> bool:
        return self.n_jobs > 1 and self.n_at_once > 0

    @property
    def n_piece(self) -> int:
        """The number of rows of each job, where there are several."""
        return min(self.n_rows, self.n_at_once if self.n_at_once > 1 else ROWS_ONE_BY_ONE)


class ChainGuesser:
    def __init__(
        self,
        gate: CostGate,
        begin: Callable[[np.ndarray], Sequence[Drafter]],
        answered: Callable[[np.ndarray, Sequence[int]], None] = lambda prompt, answer: None,
        recall: Callable[[np.ndarray], Sequence[int]] = lambda prompt: (),
    ) -> None:
        """Of one request. `gate`: of the pipeline. `begin` gives what guesses after a prompt (i32, empty
        where that is not known), as soon as there may be guesses; `answered` hears a prompt that is known
        with the whole answer; `recall` gives the answer that a prompt had before, as far as it is known."""
        self.gate = gate
        self.jobs_in_flight = JobsInFlight()
        self.n_guessed = 0
        """Guesses that left and are over."""
        self.n_right = 0
        """Of these."""
        self._unsent = UnsentGuesses(gate.saw_unsent)
        self._begin = begin
        self._drafters: Sequence[Drafter] | None = None
        self._tell_answered = answered
        self._recall = recall
        self._n_prompt = 0
        self._history = np.empty(_ROOM, np.int32)
        self._n_known = 0
        """Generated tokens in it."""
        self._left_at: float | None = None
        """When the newest fresh token left; None: not to be measured."""
        self._once_s = 0.0
        self._kind = ""
        self._n_first = 0
        """Guesses behind the fresh token that are compared with a trip without; others may be behind them."""
        self._n_sent = 0
        """All guesses behind the fresh token."""
        self._n_true = 0
        """Of these, right so far."""
        self._is_judged = True
        """The first ones are."""
        self._n_ahead_max = GUESSES_MAX
        self._is_over = False
        self._was_tried = self._is_after_trial = False

    def know(self, prompt: np.ndarray) -> None:
        """Set the tokens before the first one, i32. They may come late; only the first call counts."""
        if self._n_prompt or self._is_over:
            return
        history = self._history[: self._n_known]
        self._history = np.concatenate((prompt, history, np.empty(_ROOM, np.int32)))
        self._n_prompt = len(prompt)
        self._end_drafts()

    def early_jobs(
        self, position: int, limits: JobLimits, *, is_alone: bool = True
    ) -> tuple[LaunchedJob, ...]:
        """What leaves before there is any token: how the same prompt went on before, where guesses of that
        kind pay. The first token of it is a guess, too, and stands at `position`. `is_alone`: as in
        `next_jobs`."""
        is_possible = is_alone and self._n_prompt and not (self._n_known or self._is_over)
        n_max = min(AHEAD_MAX if limits.has_several else limits.n_rows, limits.n_left - 1)
        if not is_possible or n_max < 1 or self.jobs_in_flight.n_under_way:
            return ()
        tokens = self._recall(self._history[: self._n_prompt])[:n_max]
        n_first_max = min(len(tokens), limits.n_rows, GUESSES_MAX)
        n = self.gate.n_worth(AGAIN, n_first_max, limits.n_left)
        if not n:
            return ()
        self._kind, self._once_s, self._left_at = AGAIN, 0.0, None
        self._is_judged, self._n_true, self._n_first = False, 0, n
        tokens = tokens[: max(n, self._n_ahead(AGAIN, limits)) if limits.has_several else n]
        jobs = [tuple(tokens)]
        if limits.has_several:
            # The first one shares its batch with the last row of the prompt.
            n = max(1, limits.n_piece - 1)
            n_spare = self.jobs_in_flight.n_spare
            jobs = [tuple(tokens[:n]), *_pieces(tokens[n:], limits.n_piece, n_spare - 1)]
        self._n_sent = sum(map(len, jobs))
        return self.jobs_in_flight.launch(position, jobs, are_numbered=True)

    def next_jobs(
        self, tokens: Sequence[int], position: int, limits: JobLimits, now: float, *, is_alone: bool = True
    ) -> tuple[LaunchedJob, ...]:
        """What leaves when the last of `tokens`, all that were generated, has been sampled; it stands at
        `position`. Nothing, where it is on its way as a guess that was right, and no more are to follow.
        `is_alone`: no other request is here, whose rows would fill a batch with certainties."""
        jobs_in_flight, is_on = self.jobs_in_flight, self._take(tokens, position, now, is_alone=is_alone)
        if is_on:
            more = self._more(limits) if is_alone and not self._is_over else []
            return jobs_in_flight.launch(position, more, are_numbered=True)
        guesses = self._first(limits) if is_alone and not self._is_over else ()
        rows = (tokens[-1], *guesses)
        n_piece = limits.n_piece if limits.has_several else len(rows)
        jobs = _pieces(rows, n_piece, max(1, jobs_in_flight.n_spare))
        self._n_sent = sum(map(len, jobs)) - 1
        self._n_first = min(self._n_first, self._n_sent)
        are_numbered = jobs_in_flight.n_under_way > 0 or (limits.n_jobs > 1 and self._n_sent > 0)
        return jobs_in_flight.launch(position, jobs, are_numbered=are_numbered)

    def answered(self, tokens: Sequence[int], now: float, *, is_alone: bool = True) -> None:
        """Take the complete answer: the last token has been sampled, and `tokens` are all that were
        generated."""
        self.jobs_in_flight.refuse()
        self._take(tokens, 0, now, is_alone=is_alone)
        if self._n_prompt:
            self._tell_answered(self._history[: self._n_prompt], tokens)

    def close(self) -> None:
        """End the request here."""
        self._is_over = True
        self._end_drafts()

    def _end_drafts(self) -> None:
        for drafter in self._drafters or ():
            drafter.close()
        self._drafters = None

    def _take(self, tokens: Sequence[int], position: int, now: float, *, is_alone: bool) -> bool:
        """Learn the new tokens, and judge what left before them. Whether the last one is on its way."""
        n_new = len(tokens) - self._n_known
        if self._is_over or n_new < 1:  # a token was repeated: others come now than were learnt
            self._is_over = True
            self.jobs_in_flight.refuse()
            return False
        is_on = self.jobs_in_flight.brings(tokens[-1], position)
        self._judge(n_new if is_on else n_new - 1, now, is_on=is_on, is_alone=is_alone)
        self._learn(tokens)
        self._unsent.compare(self._history[: self._n_prompt + self._n_known])
        if not is_on:
            self.jobs_in_flight.refuse()
            self._left_at = now if is_alone else None
            self._once_s, self._n_first, self._n_sent, self._n_true = 0.0, 0, 0, 0
            self._is_judged = False
        return is_on

    def _judge(self, n_right: int, now: float, *, is_on: bool, is_alone: bool) -> None:
        """So many guesses more were right. Unless it `is_on`, there was no other one or it was wrong."""
        n_before, n_first = self._n_true, self._n_first
        self._n_true = n_true = min(n_before + n_right, self._n_sent)
        is_refused = not is_on and n_true < self._n_sent
        if not self._is_judged and (not is_on or n_true >= n_first):
            self._is_judged, n_right = True, min(n_true, n_first)
            if self._left_at is not None and is_alone and not self._is_trial():
                trip_s = now - self._left_at - self._once_s
                self.gate.judged(self._kind, n_first, n_right, trip_s, self._once_s)
            elif n_first:
                self.gate.saw(self._kind, n_right, is_refused=n_right < n_first)
        if n_true > n_first or (is_refused and n_true == n_first):
            self.gate.saw(self._kind, n_true - max(n_before, n_first), is_refused=is_refused)
        if is_on:
            self._n_ahead_max = min(self._n_ahead_max + n_right, AHEAD_MAX)
            return
        if is_refused:
            n_half = (self._n_ahead_max + min(n_true, self._n_ahead_max)) // 2
            self._n_ahead_max = max(n_half, GUESSES_MAX)
        self.n_guessed += self._n_sent
        self.n_right += n_true

    def _first(self, limits: JobLimits) -> tuple[int, ...]:
        """Guesses behind a fresh token."""
        n_max = min(AHEAD_MAX if limits.has_several else limits.n_rows - 1, limits.n_left - 1)
        n_first_max = min(n_max, limits.n_rows - 1, GUESSES_MAX)
        if n_first_max < 1:
            return ()

        def worth(kind: str, once_s: float) -> int:
            self._n_first = n = self.gate.n_worth(kind, n_first_max, limits.n_left, once_s)
            return min(max(n, self._n_ahead(kind, limits)), n_max) if n and limits.has_several else n

        history = self._history[: self._n_prompt + self._n_known]
        draft = self._unsent.draft(self._begun_drafters(), history, worth)
        if draft is not None:
            self._kind, self._once_s = draft.kind, draft.once_s
            return draft.tokens[:n_max]
        self._n_first = 0
        return ()

    def _more(self, limits: JobLimits) -> list[tuple[int, ...]]:
        """Guesses behind those that are under way, in pieces: none where another drafter than before, or
        the same one by now, guesses otherwise."""
        _, *ahead = self.jobs_in_flight.ahead
        n_spare, n_piece = self.jobs_in_flight.n_spare, limits.n_piece
        n_end = limits.n_left - 1 - len(ahead)
        """More than that cannot come true."""
        if not limits.has_several or not n_spare or n_end < 1:
            return []

        def worth(kind: str, once_s: float) -> int:
            n_more = min(self._n_ahead(kind, limits) - len(ahead), n_end)
            return 0 if once_s or n_more < min(n_piece, n_end) else len(ahead) + n_more

        history = self._history[: self._n_prompt + self._n_known]
        for drafter in self._begun_drafters():
            draft = drafter.draft(history, worth)
            if draft is None:
                continue
            if list(draft.tokens[: len(ahead)]) != ahead:
                return []
            more = draft.tokens[len(ahead) :]
            n_whole = len(more) if len(more) == n_end else len(more) // n_piece * n_piece
            pieces = _pieces(more[:n_whole], n_piece, n_spare)
            self._n_sent += sum(map(len, pieces))
            return pieces
        return []

    def _begun_drafters(self) -> Sequence[Drafter]:
        if self._drafters is None:
            self._drafters = self._begin(self._history[: self._n_prompt])
        return self._drafters

    def _n_ahead(self, kind: str, limits: JobLimits) -> int:
        return min(self.gate.n_ahead(kind, limits.n_piece), self._n_ahead_max)

    def _is_trial(self) -> bool:
        """Whether the trip that ends is the first with guesses, or the one after it: stages try then how
        many rows they can compute at once, so how long it takes says nothing."""
        if self._n_first and not self._was_tried:
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


def _pieces(tokens: Sequence[int], n_piece: int, n_pieces_max: int) -> list[tuple[int, ...]]:
    starts = range(0, len(tokens), n_piece)[:n_pieces_max]
    return [tuple(tokens[start : start + n_piece]) for start in starts]
